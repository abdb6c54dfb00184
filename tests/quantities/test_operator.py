"""fl.NTKOperator against kernels that are formed, on batches and loaders, and what it refuses."""

import copy
import weakref
from typing import Any

import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import featlearn as fl
from featlearn.errors import InputValueError
from featlearn.kernel import jacobian_products
from featlearn.kernel.jacobian_products import jvp_method
from tests.linalg.test_nystrom import assert_covers
from tests.references.jacobian import dense_jacobian, dense_ntk

P, C = 11, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(outputs: int = C, inputs: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def matrix(full: Tensor) -> Tensor:
    """(P, P, C, C) -> (P C, P C)"""
    size = full.shape[0] * full.shape[2]
    return full.permute(0, 2, 1, 3).reshape(size, size)


X = drawn(P, 4)
FULL = matrix(dense_ntk(network(), X, outputs="full"))


def loader(x: Tensor = X, size: int = 4, **options: Any) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=size, **options)


@pytest.mark.parametrize("data", [X, loader(), loader(num_workers=0, size=20), DataLoader(X, batch_size=3)])
def test_products_of_every_shape_equal_the_formed_kernel(data):
    op = fl.NTKOperator(network(), data)
    assert op.shape == (P * C, P * C)
    block = drawn(P, C, 5, seed=1)
    expected = FULL @ block.reshape(P * C, 5)
    torch.testing.assert_close(op @ block, expected.reshape(P, C, 5))
    torch.testing.assert_close(op @ block.reshape(P * C, 5), expected)
    torch.testing.assert_close(op @ block[..., 0], expected[:, 0].reshape(P, C))
    torch.testing.assert_close(op @ block[..., 0].flatten(), expected[:, 0])


def test_one_output_takes_vectors_over_samples():
    model = nn.Sequential(network(1), nn.Flatten(0))
    kernel = fl.ntk(model, X)
    op = fl.NTKOperator(model, X)
    v = drawn(P, 2, seed=2)
    torch.testing.assert_close(op @ v[:, 0], kernel @ v[:, 0])
    torch.testing.assert_close(op @ v, kernel @ v)
    torch.testing.assert_close(op.quadratic(v), (v * (kernel @ v)).sum(0))


@pytest.mark.parametrize("data", [X, loader()])
def test_quadratic_forms_traces_and_norms_are_exact(data):
    op = fl.NTKOperator(network(), data)
    v = drawn(P, C, 4, seed=3)
    expected = torch.einsum("im,ij,jm->m", v.reshape(-1, 4), FULL, v.reshape(-1, 4))
    torch.testing.assert_close(op.quadratic(v), expected)
    torch.testing.assert_close(op.quadratic(v[..., 1]), expected[1])
    jacobian = dense_jacobian(network(), X)
    trace, size = op.trace(), op.frobenius()
    assert float(trace) == pytest.approx(sum(float(j.square().sum()) for j in jacobian.values()), rel=1e-12)
    assert float(size) == pytest.approx(float(FULL.norm()), rel=1e-12)
    assert trace.stderr == size.stderr == 0.0


@pytest.mark.parametrize("k", [1, 4, P * C])
def test_top_eigenvalues_are_those_of_the_formed_kernel(k):
    top = fl.NTKOperator(network(), loader()).top(k)
    values = torch.linalg.eigvalsh(FULL).flip(0)[:k]
    torch.testing.assert_close(top.values, values, rtol=0, atol=1e-8 * float(values[0]))
    assert top.vectors.shape == (P, C, k)
    flat = top.vectors.reshape(P * C, k)
    torch.testing.assert_close((FULL @ flat - flat * top.values).norm(dim=0), top.residuals, rtol=0, atol=1e-10)
    assert float(top.residuals.max()) <= 1e-7 * float(values[0])


def test_equal_eigenvalues_of_a_linear_model_are_all_found():
    """K = X X^T (x) 1: every eigenvalue C times."""
    model = nn.Linear(4, C, bias=False).double()
    top = fl.NTKOperator(model, X).top(2 * C)
    values = torch.linalg.eigvalsh(X @ X.T).flip(0)[:2].repeat_interleave(C)
    torch.testing.assert_close(top.values, values)


def test_scipy_takes_it_as_a_linear_operator():
    linear = fl.NTKOperator(network(), X).to_scipy()
    values = eigsh(linear, k=3, return_eigenvectors=False)[::-1]
    torch.testing.assert_close(torch.as_tensor(values.copy()), torch.linalg.eigvalsh(FULL).flip(0)[:3])
    assert linear.dot(FULL.numpy()).shape == (P * C, P * C)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}]
    return [torch.optim.SGD(groups, lr=0.1), torch.optim.Adam(groups, lr=0.1)]


@pytest.mark.parametrize("kind", [0, 1])
def test_the_kernel_of_an_optimizer_equals_the_formed_one(kind):
    model = network()
    optimizer = optimizers(model)[kind]
    for _ in range(2):
        optimizer.zero_grad()
        (model(X) - 1).square().sum().backward()
        optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters()]
    kernel = matrix(fl.ntk(model, X, outputs="full", optimizer=optimizer))
    op = fl.NTKOperator(model, X, optimizer=optimizer)
    v = drawn(P * C, seed=4)
    torch.testing.assert_close(op @ v, kernel @ v)
    torch.testing.assert_close(op.quadratic(v), v @ kernel @ v)
    assert float(op.trace()) == pytest.approx(float(kernel.trace()), rel=1e-10)
    assert float(op.frobenius()) == pytest.approx(float(kernel.norm()), rel=1e-10)
    for before, p in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(before, p.grad)


def test_parameters_precision_and_readout_are_as_in_ntk():
    model, v = network().float(), drawn(P, seed=5)
    x = X.float()
    options = {"readout": lambda out: out[:, 1], "parameters": "0.*", "dtype": torch.float64}
    op = fl.NTKOperator(model, x, **options)
    assert op.dtype == torch.float64
    torch.testing.assert_close(op @ v, fl.ntk(model, x, **options) @ v)
    torch.testing.assert_close((op @ v.float()).double(), op @ v, rtol=1e-6, atol=1e-6)


def test_the_operator_follows_the_weights():
    model = network()
    op = fl.NTKOperator(model, X)
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    v = drawn(P * C, seed=6)
    torch.testing.assert_close(op @ v, matrix(dense_ntk(model, X, outputs="full")) @ v)


def test_a_small_budget_gives_the_same_products():
    op = fl.NTKOperator(network(), X, memory="12KiB")
    with op.sweeps() as sweeps:
        assert sweeps.chunk(10.0) < P
        assert sweeps.block(50) < 50
    v = drawn(P, C, 50, seed=7)
    torch.testing.assert_close((op @ v).reshape(-1, 50), FULL @ v.reshape(-1, 50))
    assert float(op.trace()) == pytest.approx(float(FULL.trace()), rel=1e-12)


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).double().train()
    model(X).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    source = torch.Generator().manual_seed(3)
    batches = loader(generator=source)
    random, own = torch.get_rng_state(), source.get_state()
    op = fl.NTKOperator(model, batches)
    op @ drawn(P, 2)
    op.trace(), op.frobenius(), op.top(2), fl.estimate_alignment(model, batches, drawn(P))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(source.get_state(), own)
    assert all(part.training for part in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("way", ["forward_mode", "twice_backward", "per_sample"])
def test_every_way_gives_the_same_products(way):
    op = fl.NTKOperator(network(), loader(), memory="1GiB")
    op._method = getattr(jacobian_products, way)
    v = drawn(P * C, seed=8)
    torch.testing.assert_close(op @ v, FULL @ v)


def test_a_way_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    def nearly(measurement, probe, tangents):
        moved = {name: u * (1.001 if name == "0.bias" else 1.0) for name, u in tangents.items()}
        return jacobian_products.twice_backward(measurement, probe, moved)

    monkeypatch.setattr(jacobian_products, "forward_mode", nearly)
    with fl.NTKOperator(network(), X).sweeps() as sweeps:
        assert jvp_method(sweeps.measurement) is jacobian_products.twice_backward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def test_fused_attention_is_taken_apart():
    model, x = Attention().double(), drawn(5, 3, 4)
    op = fl.NTKOperator(model, x)
    assert op._method is jacobian_products.forward_mode
    v = drawn(10, seed=9)
    torch.testing.assert_close(op @ v, matrix(dense_ntk(model, x, outputs="full")) @ v)


class Gated(nn.Module):
    """A gate that begins at zero, as those of LoRA and LayerScale: no gradient reaches the layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(4, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 2)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.outer(self.inner(x))).mean(1))


def test_layers_behind_a_gate_of_zeros_add_nothing():
    model, x = Gated().double(), drawn(5, 6, 4, seed=10)
    diagonal = dense_ntk(model, x, outputs="sum").diagonal()
    torch.testing.assert_close(fl.quantities.ntk_diagonal(model, x, outputs="sum"), diagonal)
    assert float(fl.NTKOperator(model, x).trace()) == pytest.approx(float(diagonal.sum()))


class Counted(IterableDataset):
    """Batches made when they are asked for, and how many of them are alive."""

    def __init__(self, batches: int) -> None:
        self.batches, self.alive, self.most = batches, 0, 0

    def _gone(self) -> None:
        self.alive -= 1

    def __iter__(self):
        for seed in range(self.batches):
            batch = drawn(8, 64, seed=seed)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(batch, self._gone)
            yield batch
            del batch


def test_no_more_batches_are_held_when_there_are_more_samples():
    most = []
    for batches in (40, 80):
        data = Counted(batches)
        op = fl.NTKOperator(network(C, 64), DataLoader(data, batch_size=None), memory="512KiB")
        op @ torch.ones(8 * batches, C, dtype=torch.float64)
        op.trace(), op.frobenius(vectors=8), op.quadratic(torch.ones(8 * batches, C))
        most.append(data.most)
    assert most[0] == most[1] < 30


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Growing(IterableDataset):
    """Other samples at every sweep."""

    sweeps = 0

    def __iter__(self):
        self.sweeps += 1
        return iter(X + self.sweeps)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (network(), loader(shuffle=True), "shuffle=False"),
        (network(), DataLoader(Growing(), batch_size=4), "other samples than in the first sweep"),
        (network(), DataLoader(TensorDataset(X, X, X)), r"\(inputs, targets\)"),
        (network(), DataLoader(TensorDataset(X[:0]), batch_size=2), "no batches"),
        (network(), X.numpy(), "convert arrays"),
        (Noisy(), X, "depend on the other samples"),
        (Noisy(), loader(), "depend on the other samples"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, data, words):
    with pytest.raises(fl.FeatlearnError, match=words):
        fl.NTKOperator(model, data) @ drawn(P, C)


def test_coupling_in_a_late_batch_is_found():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x - x.mean(0) if bool((x[:, 0] > 50).any()) else x)

    x = X.clone()
    x[-1, 0] = 100.0
    with pytest.raises(fl.FeatlearnError, match="depend on the other samples"):
        fl.NTKOperator(Late(), loader(x))


@pytest.mark.parametrize("shape", [(P + 1, C), (P,), (C, P), (P, C, 2, 1)])
def test_vectors_of_another_shape_are_refused(shape):
    with pytest.raises(fl.FeatlearnError, match="expected \\(P, C\\)"):
        fl.NTKOperator(network(), X) @ drawn(*shape)


@pytest.mark.parametrize("arguments", [{"vectors": 3}, {"vectors": 2.5}, {"vectors": 4, "generator": 1}])
def test_arguments_of_the_norm_are_checked(arguments):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        fl.NTKOperator(network(), X).frobenius(**arguments)


def test_batches_padded_to_other_lengths_have_products_but_no_columns():
    """Text comes that way; the columns of samples of several batches cannot stand side by side."""
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Linear(3, 2)).double()
    ids = torch.randint(1, 7, (9, 5), generator=torch.Generator().manual_seed(0))
    ids[:4, 3:] = 0
    batches = [ids[:4, :3], ids[4:8], ids[8:, :4]]

    class Padded(IterableDataset):
        def __iter__(self):
            return iter(batches)

    def total(out: Tensor, x: Tensor) -> Tensor:
        return (out * (x != 0)[..., None]).sum(1)

    data = DataLoader(Padded(), batch_size=None)
    op = fl.NTKOperator(model, data, readout=total)
    pieces = [torch.nn.functional.pad(batch, (0, 5 - batch.shape[1])) for batch in batches]
    kernel = matrix(fl.ntk(model, torch.cat(pieces), outputs="full", readout=total))
    v = drawn(18, seed=10)
    torch.testing.assert_close(op @ v, kernel @ v)
    with pytest.raises(fl.FeatlearnError, match="one length"):
        op.frobenius(vectors=6)


SCALES = {
    "even": lambda sizes: torch.ones_like(sizes),
    "lognormal 1.2": lambda sizes: (1.2 * sizes).exp(),
    "lognormal 2": lambda sizes: (2 * sizes).exp(),
    "five outliers": lambda sizes: torch.where(sizes >= sizes.topk(5).values[-1], 30.0, 1.0).to(sizes),
}


def covered(name: str, trials: int, outputs: int, samples: int, vectors: int) -> None:
    """Two standard errors hold the truth in 90 of 100, and errors are not stated too large."""
    x = (drawn(samples, 12, seed=11) + 1.0) * SCALES[name](drawn(samples, seed=12))[:, None]
    model = network(outputs, 12)
    truth = float(fl.ntk(model, x, outputs="full").norm())
    op, generator = fl.NTKOperator(model, x), torch.Generator().manual_seed(0)
    found = [op.frobenius(vectors=vectors, generator=generator) for _ in range(trials)]
    off = torch.tensor([(float(e) - truth) / float(e.stderr) for e in found])
    assert int((off.abs() <= 2).sum()) >= 0.9 * trials
    assert float(off.square().mean().sqrt()) > 0.5


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.parametrize("name", ["even", "five outliers"])
def test_the_standard_error_of_a_norm_covers_the_truth_in_a_few_trials(name):
    covered(name, 40, 1, 160, 24)


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(("outputs", "samples", "vectors"), [(1, 2200, 64), (3, 700, 32), (40, 60, 32)])
def test_the_standard_error_of_a_norm_covers_the_truth(name, outputs, samples, vectors):
    covered(name, 100, outputs, samples, vectors)


def test_random_output_directions_estimate_the_trace():
    op = fl.NTKOperator(network(), X)
    truth, generator = float(FULL.trace()), torch.Generator().manual_seed(0)
    assert_covers([op.trace(vectors=24, generator=generator) for _ in range(60)], truth)


def test_two_errors_hold_the_trace_also_from_few_directions():
    model, generator = network(outputs=40), torch.Generator().manual_seed(0)
    op = fl.NTKOperator(model, X[:3])
    truth = float(op.trace())
    for k in (3, 8):
        estimates = [op.trace(vectors=k, generator=generator) for _ in range(300)]
        held = sum(abs(float(e) - truth) <= 2 * float(e.stderr) for e in estimates)
        assert held >= 276  # 92 %; the plain error holds it in 80 % and 88 %
        assert all(0 < e.freedom <= k - 1 for e in estimates)


def test_many_outputs_take_random_vectors():
    x, model = drawn(60, 4, seed=12), network(40)
    truth = float(fl.ntk(model, x, outputs="full").norm())
    found = fl.NTKOperator(model, x).frobenius()
    assert float(found) == pytest.approx(truth, rel=0.02)
    assert abs(float(found) - truth) < 4 * float(found.stderr)


def test_a_vector_without_numbers_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    with pytest.raises(InputValueError, match="meta device"):
        fl.NTKOperator(model, x) @ torch.ones(5, 2, device="meta")


def test_one_seed_gives_one_set_of_directions():
    """Of the kernel, of its trace, and of the default; a plan draws none."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double(), torch.randn(7, 3).double()

    def seeded() -> fl.Directions:
        return fl.Directions(3, torch.Generator().manual_seed(0))

    traces = [
        float(fl.ntk(model, x, outputs=seeded()).trace()),
        float(fl.ntk(model, x, outputs=fl.Directions(3)).trace()),
        float(fl.NTKOperator(model, x).trace(vectors=3, generator=torch.Generator().manual_seed(0))),
    ]
    directions = seeded()
    fl.plan(model, x, outputs=directions)
    traces.append(float(fl.ntk(model, x, outputs=directions).trace()))
    assert traces == pytest.approx([traces[0]] * 4, rel=1e-12)
