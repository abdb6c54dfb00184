"""One direction for the sum of all: taken where directions are proportional in every unit, and never elsewhere."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.contraction import proportional_outputs
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Factor, Factors
from featlearn.contraction.gram import add_gram, mirror
from featlearn.contraction.proportional_outputs import ProportionalOutputs, UnequalChunksError
from tests.references.jacobian import dense_jacobian, dense_ntk, kernel_of

DIRECTIONS, SAMPLES, POSITIONS, ROWS, UNITS = 4, 23, 3, 5, 7


@pytest.fixture(autouse=True, params=[0, 2**24], ids=["one by one", "together"])
def always(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small cases are not worth it; directions are compared in both ways."""
    torch.manual_seed(0)
    monkeypatch.setattr(proportional_outputs, "TOGETHER", (request.param, request.param))
    wanted = lambda factors: factors.directions > 1 and len(factors.parts) == 1  # noqa: E731
    monkeypatch.setattr(proportional_outputs, "worthwhile", wanted)


def factors(grads: Tensor) -> Factors:
    rows = torch.randn(grads.shape[1], grads.shape[2], 1, ROWS, dtype=grads.dtype)
    return Factors((Factor(rows, grads, True, ROWS),), 1, ROWS, grads.shape[-1])


def proportional(dtype: torch.dtype = torch.float64) -> Tensor:
    """(K, P, T, 1, m) with factors of both signs, silent units and units that wake up late."""
    ratio = torch.randn(DIRECTIONS, 1, 1, 1, UNITS, dtype=dtype)
    base = torch.randn(SAMPLES, POSITIONS, 1, UNITS, dtype=dtype)
    ratio[1:, ..., 0] = 0.0  # one direction alone
    ratio[0, ..., 1] = 0.0  # all but the first
    base[..., 2] = 0.0  # silent
    base[: proportional_outputs.FEW + 2, ..., 3] = 0.0  # silent in those that are looked at first
    return ratio * base


def gram(one: Factors) -> Tensor:
    out = torch.zeros(one.samples, one.samples, dtype=torch.float64)
    add_gram(out, one, one, "sum", symmetric=True, scratch=2**30)
    mirror(out, "sum")
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sum_of_all_directions_from_one(dtype: torch.dtype):
    all_of_them = factors(proportional(dtype))
    one = ProportionalOutputs().apply("w", all_of_them)
    assert one.directions == 1
    if dtype == torch.float64:
        torch.testing.assert_close(gram(one), gram(all_of_them), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sample", [0, SAMPLES - 1])
def test_one_number_that_does_not_fit_keeps_them_apart(sample: int):
    grads = proportional()
    grads[2, sample, 1, 0, 4] += 1e-13
    assert ProportionalOutputs().apply("w", factors(grads)).directions == DIRECTIONS


def test_small_samples_are_judged_by_their_own_size():
    grads = proportional()
    grads[:, 5] *= 1e-20
    grads[1, 5, 0, 0, 4] *= 1.5
    assert ProportionalOutputs().apply("w", factors(grads)).directions == DIRECTIONS


@pytest.mark.parametrize("cut", [1, 7, 18])
def test_chunks_agree_on_the_sign(cut: int):
    """A chunk's own largest direction may be another one, with another sign."""
    grads = proportional()
    grads[0], grads[1] = grads[2], -grads[2]  # equally large, so that rounding decides which is the largest
    whole, together = factors(grads), ProportionalOutputs()
    pieces = [together.apply("w", whole.take(part)) for part in (slice(0, cut), slice(cut, SAMPLES))]
    joined = Factors(
        (
            Factor(
                torch.cat([piece.parts[0].rows for piece in pieces]),
                torch.cat([piece.parts[0].grads for piece in pieces], 1),
                True,
                ROWS,
            ),
        ),
        1,
        ROWS,
        UNITS,
    )
    torch.testing.assert_close(gram(joined), gram(whole), rtol=1e-13, atol=1e-13)


def test_a_later_chunk_that_does_not_fit_is_said():
    grads, together = proportional(), ProportionalOutputs()
    grads[2, -1] += 1.0
    whole = factors(grads)
    assert together.apply("w", whole.take(slice(0, 9))).directions == 1
    with pytest.raises(UnequalChunksError):
        together.apply("w", whole.take(slice(9, SAMPLES)))


def test_chunks_that_are_proportional_in_different_ways_are_told_apart():
    grads, together = proportional(), ProportionalOutputs()
    grads[:, 9:] = grads[[1, 2, 3, 0], 9:]
    whole = factors(grads)
    assert together.apply("w", whole.take(slice(0, 9))).directions == 1
    with pytest.raises(UnequalChunksError):
        together.apply("w", whole.take(slice(9, SAMPLES)))


@pytest.mark.parametrize("size", [1e-170, 1e-22, 1e22, 1e170])
def test_sizes_whose_squares_cannot_be_held_prove_nothing(size: float):
    other = torch.randn(DIRECTIONS, SAMPLES, POSITIONS, 1, UNITS, dtype=torch.float64)
    for grads in (other * size, (other * size).float()):
        if bool(torch.isfinite(grads).all()) and bool(grads.any()):
            assert ProportionalOutputs().apply("w", factors(grads)).directions == DIRECTIONS


def test_what_is_known_is_still_asked():
    fits, other = proportional(), torch.randn(DIRECTIONS, SAMPLES, POSITIONS, 1, UNITS, dtype=torch.float64)
    for grads, expected in ((fits, 1), (other, DIRECTIONS)):
        deferred = DeferredChecks()
        assert ProportionalOutputs(frozenset({"w"}), deferred).apply("w", factors(grads)).directions == expected
        assert deferred.hold()
    assert ProportionalOutputs(frozenset(), DeferredChecks()).apply("w", factors(fits)).directions == DIRECTIONS


class Shared(nn.Module):
    """The last hidden layer twice: two uses of one weight have factors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.hidden(torch.relu(self.hidden(h)))))


NETWORKS = {
    "perceptron": (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 4)), (6,)),
    "images": (
        nn.Sequential(
            nn.Conv2d(2, 5, 3),
            nn.ReLU(),
            nn.Conv2d(5, 6, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 4),
        ),
        (2, 7, 6),
    ),
    "flattened": (nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 20, 4)), (2, 7, 6)),
    "shared": (Shared(), (6,)),
    "bent outputs": (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4), nn.Tanh()), (6,)),
    "grouped": (
        nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3)),
        (4, 8),
    ),
}


@cache
def network_and_jacobian(name: str, samples: int) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Also of the samples that are drawn: one Jacobian for all modes."""
    model, shape = NETWORKS[name]
    x = torch.randn(samples, *shape, dtype=torch.float64)
    return model, x, dense_jacobian(model.double(), x)


@pytest.mark.parametrize("samples", [1, 2, 25, 40])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("outputs", ["mean", "sum", "each", "full"])
def test_kernels_stay_exact_call_after_call(name: str, outputs: str, samples: int):
    model, x, jacobian = network_and_jacobian(name, samples)
    expected = kernel_of(jacobian, jacobian, outputs)
    for _ in range(3):
        found = fl.ntk(model, x, outputs=outputs)
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("memory", ["60kB", "300kB"])
def test_kernels_in_chunks_and_of_two_probes_stay_exact(name: str, memory: str):
    model, shape = NETWORKS[name]
    model = model.double()
    x, x2 = (torch.randn(samples, *shape, dtype=torch.float64) for samples in (21, 13))
    for other in (None, x2):
        expected = dense_ntk(model, x, other, outputs="mean")
        found = fl.ntk(model, x, x2=other, memory=memory)
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_it_is_done_where_it_should_be(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, int] = {}
    plain = ProportionalOutputs.apply

    def noted(self: ProportionalOutputs, name: str, one: Factors) -> Factors:
        found = plain(self, name, one)
        seen[name] = found.directions
        return found

    monkeypatch.setattr(ProportionalOutputs, "apply", noted)
    model, shape = NETWORKS["images"]
    fl.ntk(model.double(), torch.randn(20, *shape, dtype=torch.float64))
    assert seen == {"0.weight": 4, "2.weight": 1, "6.weight": 1}


class Heads(nn.Module):
    """Two heads, one for each kind of sample: proportional in every chunk of one kind, in two different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, kind = torch.tanh(self.first(x)), (x[:, :1] > 0).to(x)
        return kind * self.one(h) + (1 - kind) * self.other(h)


class Twice(nn.Module):
    """A weight that some samples meet from the other side as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, rare = x @ self.weight.T, (x[:, :1] > 1).to(x)
        if bool(rare.any()):
            h = h + (rare * x) @ self.weight
        return self.last(torch.tanh(h))


class Experts(nn.Module):
    """Rows of a batch picked by routing go to the fallback, where both experts are met."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0).long() == number).nonzero().flatten()
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]))
        return out


@cache
def changing_batch(kind: type[nn.Module], late: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, a batch that is of another kind from one sample on, and their kernel."""
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(31, 6, dtype=torch.float64)
    x[:, 0] = -x[:, 0].abs() / 10
    x[late:, 0] = x[late:, 0].abs() * 30
    return model, x, dense_ntk(model, x)


@pytest.mark.parametrize("kind", [Heads, Twice, Experts])
@pytest.mark.parametrize("memory", ["20kB", "40kB", "60kB"])
@pytest.mark.parametrize("late", [3, 17, 29])
def test_chunks_of_different_kinds(kind: type[nn.Module], memory: str, late: int):
    model, x, expected = changing_batch(kind, late)
    found = fl.ntk(model, x, memory=memory)
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("kind", [Heads, Twice, Experts])
@pytest.mark.parametrize("memory", ["40kB", None])
def test_probes_of_different_kinds(kind: type[nn.Module], memory: str | None):
    """Outputs are proportional in each probe alone, by other shares."""
    model, x, expected = changing_batch(kind, 17)
    for rows, columns in ((slice(17), slice(17, 31)), (slice(3, 31), slice(0, 20))):
        found = fl.ntk(model, x[rows], x2=x[columns], memory=memory)
        assert float((found - expected[rows, columns]).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("small", [1e-20, 1e-16, 3e-15])
@pytest.mark.parametrize("chunks", [1, 2])
def test_units_that_are_tiny_at_first_and_large_later_count_once(small: float, chunks: int):
    late = proportional()
    late[:, : proportional_outputs.FEW + 2, ..., 4] *= small
    kept = ProportionalOutputs()
    for grads in late.split(-(-SAMPLES // chunks), dim=1):
        all_of_them = factors(grads)
        try:
            one = kept.apply("w", all_of_them)
        except UnequalChunksError:  # what was summed before stays so: the caller begins again, with all directions
            assert chunks == 2
            return
        torch.testing.assert_close(gram(one), gram(all_of_them), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Softplus, nn.SiLU])
@pytest.mark.parametrize("top", [60.0, 255.0])
def test_units_that_saturate_in_the_first_samples(activation: type[nn.Module], top: float):
    model = nn.Sequential(nn.Linear(20, 90), activation(), nn.Linear(90, 10)).double()
    x = torch.rand(40, 20, dtype=torch.float64) * torch.linspace(top, 1, 40, dtype=torch.float64)[:, None]
    kernel = fl.ntk(model, x, verify=True)
    torch.testing.assert_close(kernel, dense_ntk(model, x), rtol=1e-10, atol=1e-10)


def test_verification_sees_a_kernel_whose_squares_overflow(monkeypatch: pytest.MonkeyPatch):
    def too_short(grads: Tensor, known: Tensor | None = None) -> Tensor:
        largest = grads.flatten(1, 2)[:, 0]
        return largest / largest.norm(dim=0) * 1e-130

    model = nn.Sequential(nn.Linear(20, 90), nn.Softplus(), nn.Linear(90, 10)).double()
    x = torch.rand(40, 20, dtype=torch.float64)
    monkeypatch.setattr(proportional_outputs, "_shares", too_short)
    monkeypatch.setattr(proportional_outputs, "_fits", lambda excess, largest: True)
    with pytest.raises(fl.FeatlearnError, match="fails its check"):
        fl.ntk(model, x, verify=True)
