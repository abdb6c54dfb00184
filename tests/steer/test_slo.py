"""The steps of SLO against the formula, and its manners as an optimizer of torch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.steer import SLO

PATHS = pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "default"])


def parameter(value: Any, gradient: Any = None, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    p = nn.Parameter(torch.as_tensor(value).to(dtype, copy=True))
    p.grad = None if gradient is None else torch.as_tensor(gradient).to(dtype, copy=True)
    return p


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stepped(p: nn.Parameter, lr: float, **options: Any) -> Tensor:
    SLO([p], lr, **options).step()
    return p.detach()


def entries(weight: Tensor) -> list[float]:
    return weight.flatten().tolist()


def plain_step(weight: Tensor, gradient: Tensor, distance: float, eps: float) -> list[float]:
    """The formula, number by number."""
    size = math.sqrt(math.fsum(g * g for g in entries(gradient)))
    return [w - distance * g / (eps + size) for w, g in zip(entries(weight), entries(gradient), strict=True)]


def plain_turn(weight: Tensor, gradient: Tensor, distance: float, eps: float) -> list[float]:
    """Project out W, step, go back to |W|, number by number."""
    w, g = entries(weight), entries(gradient)
    square = math.fsum(a * a for a in w)
    along = math.fsum(a * b for a, b in zip(w, g, strict=True)) / square
    tangent = [b - along * a for a, b in zip(w, g, strict=True)]
    size = math.sqrt(math.fsum(t * t for t in tangent))
    moved = [a - distance * t / (eps + size) for a, t in zip(w, tangent, strict=True)]
    factor = math.sqrt(square / math.fsum(m * m for m in moved))
    return [factor * m for m in moved]


@PATHS
@pytest.mark.parametrize(
    ("eps", "expected"),
    [(0.0, [[0.88, 2], [3, 3.84]]), (0.1, [[0.8823529411764706, 2], [3, 3.843137254901961]])],
)
def test_reference_case_003_g(foreach: bool | None, eps: float, expected: list[list[float]]):
    p = parameter([[1, 2], [3, 4]], [[3, 0], [0, 4]])
    SLO([{"params": [p], "speed": 2.0}], 0.1, eps=eps, foreach=foreach).step()
    torch.testing.assert_close(p.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


SHAPES = [(), (1,), (7,), (3, 5), (4, 2, 3, 3), (2, 3, 2, 2, 2)]


@PATHS
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_every_tensor_is_divided_by_its_own_norm(foreach: bool | None, eps: float):
    parameters = [
        parameter(drawn(*shape, seed=i), 10.0 ** (i - 3) * drawn(*shape, seed=i + 50)) for i, shape in enumerate(SHAPES)
    ]
    start = [p.detach().clone() for p in parameters]
    groups: list[dict[str, Any]] = [{"params": parameters[:4], "speed": 3.0}, {"params": parameters[4:], "lr": 0.5}]
    SLO(groups, 0.2, eps=eps, foreach=foreach).step()
    for number, (p, before) in enumerate(zip(parameters, start, strict=True)):
        assert p.grad is not None
        distance = 0.6 if number < 4 else 0.5
        assert entries(p.detach()) == pytest.approx(plain_step(before, p.grad, distance, eps), rel=1e-13, abs=1e-15)
        if eps == 0:
            assert (p.detach() - before).norm() == pytest.approx(distance, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_two_paths_agree_bit_for_bit_on_the_cpu(dtype: torch.dtype):
    values = [(drawn(*shape, seed=i), drawn(*shape, seed=i + 50)) for i, shape in enumerate(SHAPES)]
    parameters = [[parameter(weight, gradient, dtype) for weight, gradient in values] for _ in range(2)]
    parameters = [[*some, parameter([1.0, 2.0], [3.0, 4.0], torch.float32)] for some in parameters]
    for some, foreach in zip(parameters, (False, True), strict=True):
        SLO(some, 0.2, eps=0.01, foreach=foreach).step()
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


@PATHS
@pytest.mark.parametrize("keep", [False, True])
def test_no_gradient_and_zero_gradients_move_nothing(foreach: bool | None, keep: bool):
    weight = drawn(3, 2)
    still, zero, moving = (
        parameter(weight),
        parameter(weight, torch.zeros(3, 2)),
        parameter(weight, drawn(3, 2, seed=1)),
    )
    SLO([still, zero, moving], 0.1, foreach=foreach, keep_output_scale=keep).step()
    assert torch.equal(still, weight)
    assert torch.equal(zero, weight)
    assert not torch.equal(moving, weight)


@PATHS
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e22, 1e30])
def test_the_size_of_a_gradient_does_not_matter(foreach: bool | None, keep: bool, scale: float):
    """Its square is far out of the range of float32."""
    weight, gradient = drawn(4, 3), drawn(4, 3, seed=1)
    expected = stepped(parameter(weight, gradient), 0.1, keep_output_scale=keep)
    p = parameter(weight, scale * gradient, torch.float32)
    found = stepped(p, 0.1, foreach=foreach, keep_output_scale=keep)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)


@PATHS
@pytest.mark.parametrize("scale", [1e-5, 300.0])
def test_half_precision_is_stepped_in_single(foreach: bool | None, scale: float):
    """|g| rounds to zero or infinity in float16."""
    weight, gradient = drawn(300, 300), (scale * drawn(300, 300, seed=1)).half()
    p = parameter(weight, gradient.double(), torch.float16)
    before = p.detach().double()
    expected = torch.tensor(plain_step(before, gradient.double(), 9.0, 0.0)).view(300, 300)
    torch.testing.assert_close(stepped(p, 9.0, foreach=foreach).double(), expected.double(), rtol=1e-3, atol=1e-6)


def test_gradients_that_are_not_finite_show():
    assert stepped(parameter([1.0, 2.0], [math.nan, 1.0]), 0.1).isnan().all()


@PATHS
@pytest.mark.parametrize("keep", [False, True])
def test_sparse_gradients_are_those_of_a_dense_embedding(foreach: bool | None, keep: bool):
    weight = drawn(9, 4)
    tables = [nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=sparse) for sparse in (True, False)]
    for table in tables:
        optimizer = SLO(table.parameters(), 0.1, foreach=foreach, keep_output_scale=keep)
        (table(torch.tensor([1, 3, 3, 8])) * drawn(4, 4, seed=2)).sum().backward()
        optimizer.step()
    assert tables[0].weight.grad is not None
    assert tables[0].weight.grad.is_sparse
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (1, 6), (4, 2, 3, 3)])
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("distance", [0.05, 40.0])
def test_a_kept_scale_turns_the_weight_on_its_sphere(shape: tuple[int, ...], eps: float, distance: float):
    weight, gradient = 3 * drawn(*shape), drawn(*shape, seed=1)
    found = stepped(parameter(weight, gradient), distance, eps=eps, keep_output_scale=True)
    assert entries(found) == pytest.approx(plain_turn(weight, gradient, distance, eps), rel=1e-12, abs=1e-14)
    assert found.norm() == pytest.approx(float(weight.norm()), rel=1e-14)
    turned = torch.arccos((found * weight).sum() / weight.square().sum())
    if eps == 0:
        assert turned == pytest.approx(math.atan(distance / float(weight.norm())), rel=1e-10)


def test_a_gradient_along_the_weight_leaves_a_kept_scale_where_it_is():
    """What is left of it is rounding, which would be blown up to a full step."""
    for seed in range(20):
        weight = drawn(5, 4, seed=seed).float()
        found = stepped(parameter(weight, -3.7 * weight, torch.float32), 0.5, keep_output_scale=True)
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=0)
    assert stepped(parameter([[2.0]], [[5.0]]), 0.5, keep_output_scale=True) == 2.0


def test_biases_and_gains_take_the_plain_step():
    bias, gradient = drawn(5), drawn(5, seed=1)
    kept, free = (stepped(parameter(bias, gradient), 0.1, keep_output_scale=keep) for keep in (True, False))
    assert torch.equal(kept, free)
    unborn = stepped(parameter(torch.zeros(2), [3, 4]), 0.1, keep_output_scale=True)
    torch.testing.assert_close(unborn, torch.tensor([-0.06, -0.08]).double(), rtol=1e-7, atol=0)


def relu_network(seed: int = 0, biased: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 7, bias=biased),
            nn.ReLU(),
            nn.Linear(7, 5, bias=biased),
            nn.ReLU(),
            nn.Linear(5, 2, bias=biased),
        ).to(dtype)


Batch = tuple[Tensor, Tensor]


def batch() -> Batch:
    return drawn(11, 4, seed=3), drawn(11, 2, seed=4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 4e-3)])
def test_norms_are_conserved_over_a_run_and_the_loss_falls(dtype: torch.dtype, slack: float):
    model = relu_network(dtype=dtype)
    x, y = (part.to(dtype) for part in batch())
    before = [float(p.detach().double().norm()) for p in model.parameters()]
    optimizer = SLO(model.parameters(), 0.03, keep_output_scale=True)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert [float(p.detach().double().norm()) for p in model.parameters()] == pytest.approx(before, rel=slack)
    assert losses[-1] < 0.9 * losses[0]


def test_the_output_is_the_product_of_kept_norms_times_a_function_of_directions():
    """What keep_output_scale relies on: ReLU networks without biases are homogeneous in each weight."""
    model, (x, _) = relu_network(), batch()
    unit = copy.deepcopy(model)
    product = 1.0
    with torch.no_grad():
        for p in unit.parameters():
            product *= float(p.norm())
            p /= p.norm()
        torch.testing.assert_close(model(x), product * unit(x), rtol=1e-12, atol=0)


def test_without_kept_scale_norms_move():
    model = relu_network()
    before = [float(p.detach().norm()) for p in model.parameters()]
    train(model, SLO(model.parameters(), 0.03), 50)
    assert max(abs(float(p.detach().norm()) / b - 1) for p, b in zip(model.parameters(), before, strict=True)) > 0.1


def test_groups_keep_their_own_options():
    model = relu_network(biased=True)
    groups = [
        {"params": model[0].parameters(), "speed": 5.0, "keep_output_scale": True},
        {"params": [model[2].weight], "lr": 0.4, "eps": 0.2},
    ]
    optimizer = SLO(groups, 0.1, foreach=False)
    optimizer.add_param_group({"params": model[4].weight, "speed": 0.0})
    shown = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert shown == [
        {"lr": 0.1, "eps": 0.0, "speed": 5.0, "keep_output_scale": True, "foreach": False},
        {"lr": 0.4, "eps": 0.2, "speed": 1.0, "keep_output_scale": False, "foreach": False},
        {"lr": 0.1, "eps": 0.0, "speed": 0.0, "keep_output_scale": False, "foreach": False},
    ]
    start = copy.deepcopy(model)
    train(model, optimizer, 1)
    assert torch.equal(model[4].weight, start[4].weight)
    assert torch.equal(model[2].bias, start[2].bias)  # in no group
    assert (model[2].weight - start[2].weight).norm() < 0.4
    assert (model[0].bias - start[0].bias).detach().norm() == pytest.approx(0.5, rel=1e-12)
    assert model[0].weight.detach().norm() == pytest.approx(float(start[0].weight.detach().norm()), rel=1e-14)


def test_named_parameters_are_taken():
    model = relu_network()
    optimizer = SLO(model.named_parameters(), 0.1)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight", "4.weight"]
    train(model, optimizer, 1)


def test_a_scheduler_sets_the_distance():
    p = parameter(drawn(3, 2))
    optimizer = SLO([{"params": [p], "speed": 2.0}], 0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    moved = []
    for seed in range(5):
        before = p.detach().clone()
        p.grad = drawn(3, 2, seed=seed)
        optimizer.step()
        scheduler.step()
        moved.append(float((p.detach() - before).norm()))
    assert moved == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2], rel=1e-12)


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned():
    model, twin = relu_network(), relu_network()
    x, y = batch()
    optimizer = SLO(model.parameters(), 0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [True]
    torch.testing.assert_close(loss, (twin(x) - y).square().mean())
    train(twin, SLO(twin.parameters(), 0.1), 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert SLO(model.parameters(), 0.1).step() is None


@pytest.mark.parametrize("keep", [False, True])
def test_resuming_from_a_state_dict_goes_on_bit_for_bit(keep: bool):
    def built() -> tuple[nn.Module, SLO, Any]:
        model = relu_network(biased=True, dtype=torch.float32).double()
        groups = [{"params": model[0].parameters(), "speed": 3.0}, {"params": model[2:].parameters()}]
        optimizer = SLO(groups, 0.05, eps=0.01, keep_output_scale=keep)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    model, optimizer, scheduler = built()
    train(model, optimizer, 7, scheduler)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    train(model, optimizer, 7, scheduler)
    again, resumed, later = built()
    for group in resumed.param_groups:
        group["speed"] = 77.0  # to be overwritten
    for part, state in zip((again, resumed, later), saved, strict=True):
        part.load_state_dict(state)
    train(again, resumed, 7, later)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_copied_optimizer_works():
    model, optimizer = copy.deepcopy((m := relu_network(), SLO(m.parameters(), 0.1)))
    train(model, optimizer, 2)
    assert all(p.grad is not None for p in model.parameters())


def test_a_grad_scaler_changes_nothing():
    plain, scaled = relu_network(dtype=torch.float32), relu_network(dtype=torch.float32)
    x, y = (part.float() for part in batch())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [SLO(model.parameters(), 0.1, eps=0.01) for model in (plain, scaled)]
    for _ in range(3):
        for model, optimizer in zip((plain, scaled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss if model is plain else scaler.scale(loss)).backward()
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_step_hooks_are_called():
    model = relu_network()
    seen = []
    optimizer = SLO(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(model, optimizer, 2)
    assert len(seen) == 2


REFUSED: list[tuple[Callable[[], Any], type, str]] = [
    (lambda: SLO([parameter([1.0])], -0.1), ValueError, "lr is -0.1, expected a finite number >= 0"),
    (lambda: SLO([parameter([1.0])], math.nan), ValueError, "lr is nan"),
    (lambda: SLO([parameter([1.0])], math.inf), ValueError, "lr is inf"),
    (lambda: SLO([parameter([1.0])], "0.1"), TypeError, "lr is '0.1', expected a number"),
    (lambda: SLO([parameter([1.0])], torch.tensor(0.1)), TypeError, "pass a float, also for a tensor"),
    (lambda: SLO([parameter([1.0])], True), TypeError, "lr is True"),
    (lambda: SLO([parameter([1.0])], 0.1, eps=-1e-3), ValueError, "eps is -0.001"),
    (lambda: SLO([parameter([1.0])], 0.1, speed=-1.0), ValueError, "speed is -1.0"),
    (lambda: SLO([{"params": [parameter([1.0])], "speed": -2}], 0.1), ValueError, "speed is -2"),
    (lambda: SLO([{"params": [parameter([1.0])], "lr": None}], 0.1), TypeError, "lr is None"),
    (lambda: SLO([parameter([1.0])], 0.1, keep_output_scale=1), TypeError, "keep_output_scale is 1"),
    (lambda: SLO([parameter([1.0])], 0.1, foreach=1), TypeError, "foreach is 1"),
    (lambda: SLO([], 0.1), ValueError, "params is empty"),
    (lambda: SLO([{"params": []}], 0.1), ValueError, "params is empty"),
    (lambda: SLO(relu_network(), 0.1), TypeError, "a parameter is Linear.*pass model.parameters"),
    (lambda: SLO({"params": [parameter([1.0])]}, 0.1), TypeError, "params is dict"),
    (lambda: SLO(3, 0.1), TypeError, "params is int"),
    (lambda: SLO([3.0], 0.1), TypeError, "a parameter is float"),
    (lambda: SLO([{"speed": 1.0}], 0.1), TypeError, "expected a dictionary with 'params'"),
    (lambda: SLO([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1), TypeError, "complex64.*expected real"),
    (lambda: SLO(2 * [parameter([1.0])], 0.1), ValueError, "twice in a group"),
    (lambda: SLO([parameter(torch.zeros(2, 3))], 0.1, keep_output_scale=True), ValueError, r"\(2, 3\).*is zero"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_wrong_input_is_refused(call: Callable[[], Any], kind: type, words: str):
    with pytest.raises(fl.FeatlearnError, match=words) as failure:
        call()
    assert isinstance(failure.value, kind)


def test_a_refused_group_is_not_added():
    optimizer = SLO([parameter([1.0])], 0.1)
    with pytest.raises(fl.FeatlearnError):
        optimizer.add_param_group({"params": [parameter([2.0])], "speed": -1.0})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})


@pytest.mark.gpu
def test_the_two_paths_agree_on_a_gpu():
    values = [(drawn(*shape, seed=i), drawn(*shape, seed=i + 50)) for i, shape in enumerate(SHAPES)]
    for keep in (False, True):
        found = []
        for foreach, device in ((False, "cpu"), (False, "cuda"), (True, "cuda"), (None, "cuda")):
            parameters = [nn.Parameter(w.float().to(device)) for w, _ in values]
            for p, (_, g) in zip(parameters, values, strict=True):
                p.grad = g.float().to(device)
            SLO(parameters, 0.3, eps=0.01, foreach=foreach, keep_output_scale=keep).step()
            found.append([p.detach().cpu() for p in parameters])
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-7)
