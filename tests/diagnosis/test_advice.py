"""Advice is tried before it is given, and followed it does what it says."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.diagnosis.advice import LARGEST, SMALLEST, Change, _degree, advise
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.trial import FEWEST, STEPS, Trial, bench_of
from featlearn.errors import InputValueError
from featlearn.record import Run, RunWriter, open_run
from featlearn.steer import scale_output

STEPS_TRAINED = 120


def task(samples: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3]) / 2


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(lr: float) -> Build:
    return lambda parameters: torch.optim.SGD(parameters, lr)


def trained(path: Path, model: nn.Module, optimizer: Build | torch.optim.Optimizer, steps: int = STEPS_TRAINED) -> Run:
    x, y = task()
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    with fl.watch(
        model,
        (x, y),
        out=path,
        optimizer=optimizer,
        loss="mean",
        budget=None,
        every=steps // 4,
        quantities=["gap", "weights"],
    ) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return watch.run


def start_of(run: Run) -> nn.Module:
    """A copy of the watched network with its first weights."""
    model = copy.deepcopy(run.network.model)
    model.load_state_dict(run.network.initial)
    return model


@pytest.mark.parametrize(
    ("toward", "factor", "build"),
    [
        ("rich", 30.0, sgd(0.05 / 900)),
        ("lazy", 0.3, sgd(0.05 / 0.09)),
        ("rich", 30.0, lambda parameters: torch.optim.AdamW(parameters, 1e-3 / 30, weight_decay=0.01)),
        ("lazy", 1.0, lambda parameters: torch.optim.Adam(parameters, 2e-3)),
    ],
    ids=["SGD to rich", "SGD to lazy", "AdamW to rich", "Adam to lazy"],
)
def test_advice_that_is_followed_moves_the_gap_as_its_trial_did(tmp_path: Path, toward, factor: float, build: Build):
    run = trained(tmp_path / "run", scale_output(network(), factor), build)
    before = diagnose(run)
    change = advise(run, toward).changes[0]
    assert isinstance(change.tried, Trial)
    assert change.tried.keeps_promise(toward)
    assert FEWEST <= change.tried.steps <= STEPS
    model = start_of(run)
    model, optimizer = change.apply(model, build([p for p in model.parameters() if p.requires_grad]))
    after = diagnose(trained(tmp_path / "after", model, optimizer))
    assert float(after.numbers["loss_left"]) < 0.9
    assert (float(after.gap) > float(before.gap)) == (toward == "rich")
    assert after.regime == toward


def test_the_rate_of_adam_is_divided_by_the_factor_and_that_of_sgd_by_its_square(tmp_path: Path):
    for name, build, power in (("sgd", sgd(1e-4), 2), ("adam", lambda p: torch.optim.AdamW(p, 1e-4), 1)):
        run = trained(tmp_path / name, scale_output(network(), 10.0), build, steps=8)
        change = advise(open_run(run.path), "rich").changes[0]
        assert change.rate_factor == pytest.approx(change.factor**-power)
        model = nn.Linear(3, 1)
        optimizer = type(run.network.optimizer)(model.parameters(), lr=0.5)
        scaled, changed = change.apply(model, optimizer)
        assert changed.param_groups[0]["lr"] == pytest.approx(0.5 * change.rate_factor)
        assert changed.param_groups[0]["params"] == list(model.parameters())
        assert scaled.factor == change.factor
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_weight_decay_of_a_step_does_not_grow_with_the_rate():
    change = Change(text="", kind="scale output", factor=0.1, rate_factor=10.0, expect="", because="", command="")
    model = nn.Linear(3, 1)
    _, changed = change.apply(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.2, eps=1e-8))
    (group,) = changed.param_groups
    assert group["lr"] * group["weight_decay"] == pytest.approx(0.01 * 0.2)
    assert group["eps"] == pytest.approx(1e-9)  # gradients are a tenth, too


def test_a_frozen_body_is_unfrozen_and_never_scaled(tmp_path: Path):
    model = network()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    run = trained(tmp_path / "run", model, sgd(0.02))
    assert diagnose(run).regime == "lazy"
    advice = advise(run, "rich")
    assert [change.kind for change in advice.changes] == ["unfreeze"]
    assert advice.changes[0].tried.gap > advice.changes[0].tried.unchanged_gap + 0.01
    assert "Train the 4736 frozen parameters too" in advice.changes[0].text
    start = start_of(run)
    body = [p for p in start.parameters() if not p.requires_grad]
    changed, optimizer = advice.changes[0].apply(start, sgd(0.02)([p for p in start.parameters() if p.requires_grad]))
    assert all(p.requires_grad for p in changed.parameters())
    assert {id(p) for p in body} <= {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not any(p.requires_grad for p in list(run.network.model.parameters())[:4])  # the copy alone


def test_a_model_that_is_linear_in_its_trained_weights_cannot_be_made_rich(tmp_path: Path):
    torch.manual_seed(0)
    run = trained(tmp_path / "run", nn.Linear(8, 1), sgd(0.05))
    advice = advise(run, "rich")
    assert advice.changes == ()
    assert "linear in its trained weights and cannot learn features" in str(advice)


def test_first_weights_are_scaled_only_where_outputs_are_a_power_of_their_scale(tmp_path: Path):
    def degree(model: nn.Module) -> float:
        run = trained(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", model, sgd(1e-3), steps=4)
        bench = bench_of(Findings(run))
        assert not isinstance(bench, str)
        return _degree(bench)

    def plain(*layers: nn.Module) -> nn.Sequential:
        model = nn.Sequential(*layers)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_parameter("bias", None)
        return model

    torch.manual_seed(0)
    assert degree(plain(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 1))) == pytest.approx(3)
    assert math.isnan(degree(plain(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))))
    # the output's layer alone: a norm forgets the scale of the layers before it
    assert degree(plain(nn.Linear(8, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 1))) == pytest.approx(1, abs=0.01)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                plain(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 1)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    assert degree(Branches()) == pytest.approx(3)  # six weight layers, but parallel ones


def test_a_trial_leaves_the_network_its_optimizer_and_random_numbers_alone(tmp_path: Path):
    run = trained(tmp_path / "run", network(), lambda p: torch.optim.Adam(p, 1e-3))
    model, optimizer = run.network.model, run.network.optimizer
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    state, random = copy.deepcopy(optimizer.state_dict()), torch.random.get_rng_state()
    assert advise(run, "lazy").changes[0].tried is not None
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(random, torch.random.get_rng_state())
    assert str(state) == str(optimizer.state_dict())


def test_advice_that_breaks_training_down_is_not_given(tmp_path: Path):
    """Outputs are normalized, so that scaled and centered ones, zero at the start, have no direction."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), x

    x, y = task()
    model = Embedding()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fl.watch(
        model,
        (x, y),
        out=tmp_path / "run",
        optimizer=optimizer,
        loss="mean",
        readout=lambda output: output[0],
        budget=None,
        quantities=["gap", "weights"],
    ) as watch:
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x)[0] - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    advice = advise(watch.run, "lazy")
    assert all(change.kind != "scale output" for change in advice.changes)  # it returns a pair


def test_a_run_goes_to_another_process_without_its_network(tmp_path: Path):
    run = trained(tmp_path / "run", network(), sgd(0.01), steps=4)
    assert run.network is not None
    copied = pickle.loads(pickle.dumps(run))
    assert copied.network is None
    assert copied.lines == run.lines


def test_what_was_not_tried_says_so(tmp_path: Path):
    run = trained(tmp_path / "run", scale_output(network(), 30.0), sgd(0.05 / 900))
    change = advise(open_run(run.path), "rich").changes[0]
    assert change.tried is None
    assert change.not_tried == "the network is not in this process, only its run"
    assert "not tried: the network is not in this process" in str(change)
    assert "(not tried)" in str(diagnose(run.path))
    assert "(tried for" in str(diagnose(run))


def test_a_run_that_shows_nothing_gets_a_guess(tmp_path: Path):
    RunWriter(tmp_path / "run", {}).close()
    for toward, factor in (("rich", 0.01), ("lazy", 100.0)):
        advice = advise(tmp_path / "run", toward=toward)
        assert advice.changes[0].factor == factor
        assert "guess" in str(advice)


@pytest.mark.parametrize(("gap", "toward"), [(g, t) for g in (0.0, 1e-9, 0.3, 0.99, 7.0) for t in ("rich", "lazy")])
def test_factors_are_bounded_and_go_the_right_way(tmp_path: Path, gap: float, toward):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(3):
        writer.scalars(step, {"probe/loss": 0.5**step, **({"gap/probe": gap} if step else {})})
    writer.close()
    for change in advise(tmp_path / "run", toward).changes:
        if toward == "rich":
            assert 1 / LARGEST <= change.factor <= 1 / SMALLEST * 1.05
        else:
            assert SMALLEST <= change.factor <= 10 * LARGEST


def test_a_direction_is_asked_for_in_our_own_words(tmp_path: Path):
    RunWriter(tmp_path / "run", {}).close()
    with pytest.raises(InputValueError, match='toward is missing, expected a direction: toward="rich"'):
        advise(tmp_path / "run")
    with pytest.raises(InputValueError, match="toward='richer', expected a direction"):
        advise(tmp_path / "run", toward="richer")  # type: ignore[arg-type]


def test_nothing_has_to_change_in_the_wanted_direction(tmp_path: Path):
    run = trained(tmp_path / "run", scale_output(network(), 30.0), sgd(0.05 / 900))
    advice = advise(run, "lazy")
    assert advice.changes == ()
    assert "nothing has to change" in str(advice)


def test_no_output_behind_a_softmax_is_scaled(tmp_path: Path):
    """A factor behind log-softmax gives no log-probabilities: the input of the softmax is scaled instead."""
    x, _ = task()
    labels = x[:, :3].argmax(1)
    torch.manual_seed(1)
    model = nn.Sequential(scale_output(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)), 30.0))
    model.append(nn.LogSoftmax(1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5 / 900)
    with fl.watch(
        model, (x, labels), out=tmp_path / "run", optimizer=optimizer, loss=nn.NLLLoss(), budget=None, every=40
    ) as watch:
        for _ in range(120):
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(x), labels)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    diagnosis = diagnose(watch.run)
    assert diagnosis.regime == "lazy"
    advice = advise(diagnosis, "rich")
    assert "scale output" not in {change.kind for change in advice.changes}
    assert "multiply the input of the model's output function" in advice.note
