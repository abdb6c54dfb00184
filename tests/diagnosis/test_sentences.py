"""Sentences that were once false or misleading, each on a run for which the truth is known."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.diagnosis import Diagnosis, diagnose
from featlearn.diagnosis.usefulness import Usefulness
from featlearn.record import RunWriter, open_run

Numbers = dict[str, float]


def told(path: Path, lines: list[Numbers], events: list[tuple[str, int, dict]] = (), **config) -> Diagnosis:
    """The diagnosis of a run of these scalars, one line a step."""
    writer = RunWriter(path, {"name": "run", "probe": {"samples": 30}, **config})
    for step, values in enumerate(lines):
        writer.scalars(step, values)
    for kind, step, details in events:
        writer.event(kind, step, **details)
    writer.close()
    return diagnose(open_run(path))


def falling(steps: int = 9, **scalars: Callable[[int], float]) -> list[Numbers]:
    """Losses that halve in every step, with a large gap and further scalars."""
    lines = []
    for step in range(steps):
        values = {"probe/loss": 0.5**step} | {name.replace("__", "/"): at(step) for name, at in scalars.items()}
        lines.append(values | ({"gap/link": 0.8} if step and "gap__link" not in scalars else {}))
    return lines


def test_a_kernel_norm_of_two_fifths_did_not_keep_its_size(tmp_path: Path):
    text = told(tmp_path / "run", falling(ntk__norm=lambda step: 1 - 0.614 * step / 8)).evidence
    (norm,) = [item for item in text if "the kernel norm became" in item.says]
    assert "0.386 times the first" in norm.says
    assert norm.verdict == "shrank"


def test_a_run_of_no_step_a_zero_loss_and_a_failed_measurement_have_reasons_of_their_own(tmp_path: Path):
    none = told(tmp_path / "none", [{"probe/loss": 1.0}])
    assert none.headline == "lazy or rich cannot be told: no step was trained."
    zero = told(tmp_path / "zero", [{"probe/loss": 0.0}, {"probe/loss": 0.0, "gap/link": math.nan}])
    assert "the loss was zero from the start, so that there was nothing to learn" in zero.headline
    failure = ("failed", 1, {"what": "gap", "message": "UnsupportedModelError: it has a lock"})
    failed = told(tmp_path / "failed", [{"probe/loss": 0.5**step} for step in range(4)], [failure])
    assert "could not be measured: UnsupportedModelError: it has a lock" in failed.headline
    assert "quantities= left it out" not in failed.full


def test_a_dead_network_is_called_dead_with_its_layers(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run", "probe": {"samples": 5}})
    y = numpy.arange(5.0)[:, None]
    writer.array("targets", 0, y=y)
    for step in range(4):
        writer.array("outputs", step, f=numpy.full((5, 1), 0.5 * step))
        shares = {"ntk/layers/0/share": 0.0, "ntk/layers/2/share": 0.0, "ntk/layers/4/share": 1.0}
        gap = {"gap/link": math.nan} if step else {}
        writer.scalars(step, {"probe/loss": 6.0 / (1 + step), **shares, **gap})
    writer.close()
    diagnosis = diagnose(tmp_path / "run")
    assert "the network is dead: its outputs are the same for all samples, and no gradient reaches layers 0 and 2" in (
        diagnosis.headline
    )


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([1.0, 0.2, -0.1, -0.27], "the loss becomes negative"),
        ([1e-9, 0.2, 0.3, 0.1], "the loss begins near zero"),
    ],
)
def test_a_loss_without_a_ratio_gives_no_share_of_it(tmp_path: Path, losses: list[float], why: str):
    """Flows, ELBO and PPO: their loss has no lower end at zero, or begins there."""
    lines = [{"loss": loss, **({"gap/link": 0.8} if step else {})} for step, loss in enumerate(losses)]
    diagnosis = told(tmp_path / "run", lines)
    assert math.isnan(float(diagnosis.numbers["loss_left"]))
    assert f"cannot tell how far the loss fell: {why}" in diagnosis.full
    assert diagnosis.regime == "rich"
    assert "of the first" not in diagnosis.full


def test_a_beginning_is_no_regime(tmp_path: Path):
    lines = [{"probe/loss": 1 - 0.003 * step, **({"gap/link": 0.62} if step else {})} for step in range(11)]
    diagnosis = told(tmp_path / "run", lines)
    assert diagnosis.regime == "cannot tell"
    assert diagnosis.so_far == ("So far it looks like it is learning features (gap 0.62), but 97% of the loss is left.")
    assert str(diagnosis).startswith("run: too early to tell. So far it looks like")
    assert len(str(diagnosis).splitlines()) <= 8


def test_the_headline_says_on_which_samples_its_number_was_measured(tmp_path: Path):
    lines = falling(gap__link=lambda step: 0.7, gap__link_test=lambda step: 1.3, gap__unshrunk=lambda step: 0.5)
    plain = told(tmp_path / "plain", lines, optimizer={"class": "SGD", "groups": [{"lr": 0.1, "weight_decay": 0.0}]})
    assert float(plain.gap) == 1.3
    assert plain.explanation.endswith("misses 130% of what this network learned, on test points.")
    assert "weight decay" not in plain.full
    decayed = told(tmp_path / "decayed", lines, optimizer={"class": "SGD", "groups": [{"weight_decay": 0.1}]})
    assert float(decayed.gap) == 0.5
    assert decayed.explanation.endswith("on the probe, the shrinking by weight decay left out.")
    # a schedule turned the decay on: the stationarity of decayed weights is recorded from then on
    late = [line | {"convergence/0": 0.2} if line["probe/loss"] < 0.1 else line for line in lines]
    groups = [{"lr": 0.1, "weight_decay": 0.0}]
    assert float(told(tmp_path / "late", late, optimizer={"class": "SGD", "groups": groups}).gap) == 0.5


def test_the_gap_through_the_link_counts_and_the_plain_one_stands_beside_it(tmp_path: Path):
    diagnosis = told(tmp_path / "run", falling(gap__link=lambda step: 1e-7, gap__probe=lambda step: 0.45))
    assert diagnosis.regime == "lazy"
    assert float(diagnosis.plain_gap) == 0.45
    older = told(tmp_path / "older", falling(gap__link=lambda step: math.nan, gap__probe=lambda step: 0.45))
    assert older.regime == "rich"
    assert "plain gap: none through the link is recorded" in older.full.replace("\n    ", " ")


def test_merged_weights_are_counted_and_named_beside_the_plain_gap(tmp_path: Path):
    gaps = {"gap__link": lambda _: 0.06, "gap__probe": lambda _: 0.54, "gap__merged_weights": lambda _: 2.0}
    text = " ".join(told(tmp_path / "run", falling(**gaps)).full.split())
    assert "2 weights were taken as they act: frozen map and adapter" in text
    assert "and in the factors themselves, it misses 0.54" in text
    assert "taken as they act" not in told(tmp_path / "plain", falling(gap__probe=lambda _: 0.8)).full


def test_more_weights_that_are_unfrozen_are_said_and_kernels_of_other_sets_not_compared(tmp_path: Path):
    gaps = [math.nan, 0.0, 0.0, 0.0, 0.3, 0.4, 0.7, 0.9, 0.94]  # the change is seen at the next measurement
    norms = [1.0, 1.0, 1.0, 1.0, 439.0, 439.0, 440.0, 441.0, 442.0]
    diagnosis = told(
        tmp_path / "run",
        falling(gap__link=lambda step: gaps[step], ntk__norm=lambda step: norms[step]),
        [("trained_set_changed", 4, {})],
    )
    assert diagnosis.headline == "it learned features, after more weights were unfrozen by step 4 (gap 0 until then)."
    assert math.isnan(float(diagnosis.growth))
    assert "439 times" not in diagnosis.full
    assert "the set of trained weights changed by step 4" in diagnosis.full


def test_mechanisms_do_not_deny_norms_that_were_recorded(tmp_path: Path):
    """Norms of a fused weight are recorded, those of its parts are not."""
    lines = falling(
        **{"layers__q--out__alignment": lambda step: 0.2 + 0.02 * step, "weights__qkv__norm": lambda _: 1.0}
    )
    assert "not recorded" not in "".join(
        item.says for item in told(tmp_path / "run", lines).evidence if item.topic == "mechanism"
    )


# ---- short trainings


def watched(
    path: Path, model: nn.Module, x: Tensor, y: Tensor, objective, optimizer, steps: int, **options
) -> Diagnosis:
    with fl.watch(
        model, (x, y), out=path, optimizer=optimizer, budget=None, every=max(steps // 5, 1), **options
    ) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = objective(model(x), y)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return diagnose(watch.run)


def samples(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


CHEAP = {"quantities": ["gap", "moved", "weights"]}


def test_a_curved_output_function_is_no_feature(tmp_path: Path):
    x, labels = samples()
    labels = x[:, :3].argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    diagnosis = watched(tmp_path / "run", model, x, labels, nn.functional.nll_loss, optimizer, 200, **CHEAP)
    assert diagnosis.regime == "lazy"
    assert float(diagnosis.gap) < 1e-4
    assert float(diagnosis.plain_gap) > 0.1


def test_ten_steps_of_adam_are_a_beginning(tmp_path: Path):
    x, labels = samples()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    diagnosis = watched(tmp_path / "run", model, x, labels, nn.functional.cross_entropy, optimizer, 10, **CHEAP)
    assert diagnosis.regime == "cannot tell"
    assert "of the loss is left" in diagnosis.so_far


def test_a_head_under_batch_norm_is_lazy_and_its_statistics_moved_the_features(tmp_path: Path):
    x, _ = samples(128)
    x = 3 * x + 2
    y = x[:, :1] + x[:, 1:2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), 0.02)
    diagnosis = watched(tmp_path / "run", model, x, y, nn.functional.mse_loss, optimizer, 200, **CHEAP)
    assert diagnosis.regime == "lazy"
    assert float(diagnosis.statistics_moved) > 0.3
    assert diagnosis.headline == (
        "lazy in the trained weights; BatchNorm statistics moved the features by "
        f"{float(diagnosis.statistics_moved):.2g}."
    )


def test_soft_targets_are_judged_by_what_is_learnable(tmp_path: Path):
    """Distillation: the entropy of the targets keeps most of the cross-entropy, and the network is lazy."""
    x, _ = samples()
    torch.manual_seed(0)
    teacher = 0.3 * torch.randn(6, 3)
    y = (x @ teacher).softmax(1)
    model = fl.steer.scale_output(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)), 100.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5 * model.rate_factor)
    options = CHEAP | {"loss": "cross-entropy"}
    diagnosis = watched(tmp_path / "run", model, x, y, nn.functional.cross_entropy, optimizer, 200, **options)
    first, last = (
        line["values"]["loss"] for line in (diagnosis.findings[0].run.lines[1], diagnosis.findings[0].run.lines[-1])
    )
    assert last > 0.7 * first
    assert float(diagnosis.numbers["loss_left"]) < 0.5
    assert diagnosis.regime == "lazy"


def test_cross_entropy_that_was_not_declared_is_recognized(tmp_path: Path):
    """One-hot targets without `loss=`: the loss that was passed fell, and no sentence says that it did not."""
    x, _ = samples()
    labels = x[:, :3].argmax(1)
    y = nn.functional.one_hot(labels, 3).float()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    diagnosis = watched(tmp_path / "run", model, x, y, nn.functional.cross_entropy, optimizer, 300)
    assert float(diagnosis.numbers["loss_left"]) < 0.3
    assert "did not fall" not in diagnosis.full


def test_embeddings_beside_labels_are_no_classes_and_get_no_advice_by_squared_error(tmp_path: Path):
    """SimCLR: 32 numbers of an embedding, and labels that are not what is trained."""
    x, labels = samples(90)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32))

    def contrast(f: Tensor, _: Tensor) -> Tensor:
        z = nn.functional.normalize(torch.cat([f, model(x + 0.1 * torch.randn(x.shape))]), dim=1)
        scores = (z @ z.mT / 0.2).fill_diagonal_(-math.inf)
        return nn.functional.cross_entropy(scores, torch.arange(180).roll(90))

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    diagnosis = watched(tmp_path / "run", model, x, labels, contrast, optimizer, 100, test=(x + 0.1, labels))
    assert diagnosis.why_helped == (
        "Cannot tell: the training loss is not known to be squared error or a cross-entropy."
    )
    assert "pass loss= to fl.watch" in str(diagnosis).lower() or diagnosis.regime == "cannot tell"
    for toward in ("rich", "lazy"):
        if diagnosis.regime != toward:
            assert fl.advise(diagnosis, toward).changes == ()


def test_a_large_gain_on_few_test_points_is_not_called_no_better_than_a_constant():
    errors = {"first": 0.8, "later": 0.8, "constant": 1.0, "error": 0.1, "gain_error": 0.1}
    unclear = errors | {"unit": "variance", "samples": 9}
    assert Usefulness(network=0.7, learned_error=0.2, **unclear).learned is None
    assert Usefulness(network=0.7, learned_error=0.2, **unclear).helped == "cannot tell"
    assert Usefulness(network=0.95, learned_error=0.2, **unclear).learned is None
    assert Usefulness(network=1.5, learned_error=0.2, **unclear).learned is False
    assert Usefulness(network=0.7, learned_error=0.1, **unclear).learned is True


def test_noise_that_was_fitted_is_not_advised_to_be_fitted_lazily(tmp_path: Path):
    x, labels = samples(300)
    torch.manual_seed(0)
    labels = torch.where(torch.rand(300) < 0.7, 0, labels)  # chance is so high that 240 test points show the harm
    model = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loss, test = nn.functional.cross_entropy, (x[60:], labels[60:])
    diagnosis = watched(tmp_path / "run", model, x[:60], labels[:60], loss, optimizer, 200, test=test)
    assert diagnosis.regime == "rich"
    assert diagnosis.helped == "no"
    assert "Next:         Check the targets, or train on more data" in str(diagnosis)


def test_advice_for_a_run_that_cannot_tell_is_whole_sentences(tmp_path: Path):
    early = told(tmp_path / "run", [{"loss": 1.0, "gap/link": math.nan}, {"loss": 0.99, "gap/link": 0.1}])
    assert early.regime == "cannot tell"
    for toward in ("rich", "lazy"):
        first, second = str(fl.advise(early, toward)).splitlines()[0].split(". ", 1)
        assert first == "It is not known whether the run was lazy or rich"
        assert second[0].isupper()
        assert second.endswith(".")


def test_the_full_text_names_all_layers(tmp_path: Path):
    distances = {f"weights__layer{i}__distance": lambda step, i=i: 0.03 * (i + 1) * step for i in range(9)}
    shares = {f"features__layer{i}__share": lambda step, i=i: 0.1 * (i + 1) for i in range(9)}
    full = told(tmp_path / "run", falling(**distances, **shares)).full
    assert [i for i in range(9) if f"layer{i}: " in full] == [*range(9)]
    assert "more" not in full.split("where features are learned:")[1].split("thresholds:")[0]


def test_without_labels_the_test_loss_of_a_language_model_is_told(tmp_path: Path):
    """The mean log-probability of the targets of two test sequences, at the start and at the end."""
    readout = "next_token: mean log-probability of a sequence's targets"
    writer = RunWriter(tmp_path / "run", {"name": "run", "readout": readout})
    for step, f in ((0, [[-4.0], [-5.0]]), (3, [[-1.0], [-2.5]])):
        writer.array("test", step, f=numpy.array(f))
    for step, line in enumerate(falling(4)):
        writer.scalars(step, line)
    writer.close()
    diagnosis = diagnose(tmp_path / "run")
    assert diagnosis.helped == "cannot tell"
    assert diagnosis.why_helped.startswith("Cannot tell: test loss fell from 4.5 to 1.75, but")


def test_weights_that_grew_did_not_decay_where_the_optimizer_is_not_known(tmp_path: Path):
    gaps = {"gap__link": lambda _: 0.8, "gap__unshrunk": lambda _: 0.05}
    grown = told(tmp_path / "grown", falling(weights__0__norm=lambda step: 1.0 + step, **gaps))
    assert float(grown.gap) == 0.8
    shrunk = told(tmp_path / "shrunk", falling(weights__0__norm=lambda step: 9.0 - step, **gaps))
    assert float(shrunk.gap) == 0.05


def test_a_model_that_returns_a_dictionary_gets_no_advice_that_fails(tmp_path: Path):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 200), nn.Linear(200, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"class": self.head(self.body(x).relu())}

    x, labels = samples()
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def objective(f: dict[str, Tensor], y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f["class"], y)

    options = CHEAP | {"loss": "cross-entropy", "readout": lambda out: out["class"]}
    diagnosis = watched(tmp_path / "run", model, x, labels, objective, optimizer, 100, **options)
    for toward in ("rich", "lazy"):
        if diagnosis.regime != toward:
            advice = fl.advise(diagnosis, toward)
            assert advice.changes == ()
            assert "the model returns dict" in advice.note
