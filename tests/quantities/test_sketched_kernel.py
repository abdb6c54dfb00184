"""Sketched kernels: the gradients that they are made of, no bias, and errors that cover."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from featlearn.audited_model import AuditedModel
from featlearn.contraction.tensor_sketch import Sketch, SketchTables
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, MemoryBudgetError
from featlearn.planning.sketch_plan import sketch_view
from featlearn.quantities.sketched_alignment import jackknifed
from tests.references.jacobian import dense_jacobian
from tests.zoo.awkward import CASES


class Tied(nn.Module):
    """A transformer block whose embedding is its readout, too; the mean log-probability of the next tokens."""

    def __init__(self, vocabulary: int = 13, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.3 * torch.randn(6, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 12, batch_first=True, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        logits = hidden @ self.embedding.weight.T
        return logits[:, :-1].log_softmax(2).gather(2, tokens[:, 1:, None]).mean((1, 2))


class Shared(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        for _ in range(3):
            hidden = self.again(hidden).tanh()
        return self.last(hidden)


def perceptron():
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 11), nn.Tanh(), nn.Linear(11, 3)), (9, 6)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2, groups=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 2),
    ), (7, 2, 8, 8)


MODELS = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "tied": lambda: (Tied(), (8, 6)),
    "shared": lambda: (Shared(), (10, 5)),
}


def built(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    x = torch.randint(13, shape) if name == "tied" else torch.randn(shape)
    return model.to(dtype), x if name == "tied" else x.to(dtype)


# by how much an error with one degree of freedom is widened, for two of them to hold 95.45 of 100
WIDER = float(stats.t.ppf(stats.norm.cdf(2), 1)) / 2


def by_hand(model: nn.Module, x: object, readout: object, sketch: Sketch) -> Tensor:
    """(repeats, P, k) from the dense Jacobian, entry by entry, with the tables of the library."""
    features = None
    with AuditedModel(model, readout=readout).measuring([x]) as measurement:  # type: ignore[arg-type]
        views = {name: sketch_view(measurement, name) for name in measurement.parameters}
    for name, gradient in dense_jacobian(model, x, readout).items():  # type: ignore[arg-type]
        samples, classes, size = gradient.shape
        if features is None:
            features = torch.zeros(sketch.repeats, samples, sketch.k, dtype=torch.float64)
        view = views[name]
        if not size:
            continue
        tables = SketchTables.drawn(view, name, sketch, 0, classes, torch.float64, torch.device("cpu"))
        place = torch.arange(size) if view.order is None else view.order
        for r in range(sketch.repeats):
            for c in range(classes):
                bins, signs = (one.flatten()[place] for one in tables.entries(r, c, slice(None)))
                features[r].index_add_(1, bins, gradient[:, c] * signs)
    assert features is not None
    return features


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (number % 3 > 0))
        for number, case in enumerate(CASES)
    ],
)
def test_the_sketches_are_those_of_the_dense_jacobian(case):
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    model, x, _, readout = case.build()
    sketch = Sketch(32, 2)
    features = by_hand(model, x, readout, sketch)
    found = fl.ntk(model, x, outputs="sum", readout=readout, sketch=sketch)
    products = features @ features.mT
    size = products.abs().max()
    tolerance = max(case.tolerance, 1e-10) * size
    assert (found.value - products.mean(0)).abs().max() <= tolerance
    error = products.std(0) / math.sqrt(2) * WIDER
    assert (found.stderr - error).abs().max() <= 20 * tolerance
    assert (found.samples, found.freedom) == (2, 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_many_sketches_is_the_kernel(name):
    model, x = built(name)
    exact = fl.ntk(model, x)
    found = fl.ntk(model, x, sketch=Sketch(64, 300))
    assert ((found.value - exact).abs() < 4.5 * found.stderr).all()
    scale = exact.diagonal().sqrt()
    relative = (found.stderr / (scale[:, None] * scale)) * math.sqrt(64 * 300)
    assert 0.7 < relative.mean() < 2.5


@pytest.mark.parametrize("name", MODELS)
def test_cross_kernels_layers_and_parameters(name):
    model, x = built(name)
    sketch = Sketch(128, 60)
    x2 = x[[3, 1, 4]]
    found = fl.ntk(model, x, x2=x2, sketch=sketch)
    assert found.value.shape == found.stderr.shape == (len(x), 3)
    whole = fl.ntk(model, x, sketch=sketch)
    # the same samples have the same sketches
    assert torch.allclose(found.value, whole.value[:, [3, 1, 4]], rtol=1e-10, atol=1e-12)
    for by in ("layer", "parameter"):
        exact, parts = fl.ntk(model, x, by=by), fl.ntk(model, x, by=by, sketch=sketch)
        assert list(parts) == list(exact)
        for key, part in parts.items():
            # a parameter with a single large entry has no error at all
            assert ((part.value - exact[key]).abs() <= 5 * part.stderr + 1e-12 * exact[key].abs().max()).all()


@pytest.mark.parametrize("name", MODELS)
def test_neither_chunks_nor_precision_change_the_sketch(name, monkeypatch):
    model, x = built(name)
    sketch = Sketch(64, 3)
    whole = fl.ntk(model, x, sketch=sketch)
    monkeypatch.setattr("featlearn.planning.sketch_plan.samples_within", lambda *_: 2)
    parts = fl.ntk(model, x, sketch=sketch)
    monkeypatch.undo()
    assert torch.allclose(parts.value, whole.value, rtol=1e-11, atol=1e-13)
    assert torch.allclose(parts.stderr, whole.stderr, rtol=1e-9, atol=1e-12)
    assert torch.equal(whole.value, whole.value.T)
    single, x32 = built(name, torch.float32)
    found = fl.ntk(single, x32, sketch=sketch)
    assert found.value.dtype == torch.float32
    again, scale = fl.ntk(single, x32, sketch=sketch, dtype=torch.float64), whole.value.abs().max()
    assert (found.value - again.value).abs().max() < 1e-5 * scale
    assert (found.stderr - again.stderr).abs().max() < 1e-5 * scale


def test_the_same_seed_gives_the_same_bits_and_a_generator_another_draw():
    model, x = built("perceptron")
    first, again = (fl.ntk(model, x, sketch=Sketch(64)) for _ in range(2))
    assert torch.equal(first.value, again.value)
    session = fl.Session(model, x)
    assert torch.equal(session.ntk(sketch=Sketch(64)).value, first.value)
    generator = torch.Generator().manual_seed(1)
    drawn = [fl.ntk(model, x, sketch=Sketch(64, generator=generator)).value for _ in range(2)]
    assert not torch.equal(*drawn)
    generator.manual_seed(1)
    fl.plan(model, x, sketch=Sketch(64, generator=generator))  # draws nothing
    assert torch.equal(fl.ntk(model, x, sketch=Sketch(64, generator=generator)).value, drawn[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_kernel_of_an_optimizer(kind):
    model, x = built("tied")
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    exact = fl.ntk(model, x, optimizer=optimizer)
    found = fl.ntk(model, x, optimizer=optimizer, sketch=Sketch(128, 100))
    assert ((found.value - exact).abs() < 4.5 * found.stderr).all()
    assert float(found.stderr.max()) < 0.1 * float(exact.max())


def test_two_standard_errors_hold_about_95_of_100():
    model, x = built("perceptron")
    exact, generator = fl.ntk(model, x), torch.Generator().manual_seed(2)
    session, held = fl.Session(model, x), []
    for _ in range(150):
        found = session.ntk(sketch=Sketch(64, 4, generator))
        held.append(((found.value - exact).abs() <= 2 * found.stderr).double().mean())
    assert 0.93 < torch.stack(held).mean() < 0.975


# ---- alignment


def alignment_case() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 2)).double()
    x = torch.randn(40, 5, dtype=torch.float64)
    return model, x, x[:, :1] * x[:, 1:3]


@pytest.mark.parametrize("centered", [False, True])
def test_the_alignment_is_covered_by_its_error(centered):
    model, x, y = alignment_case()
    metric = fl.metrics.centered_alignment if centered else fl.metrics.alignment
    exact = float(metric(fl.ntk(model, x), y))
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(60):
        found.append(fl.estimate_alignment(model, x, y, centered=centered, sketch=Sketch(64, 4, generator)))
    held = [abs(float(one) - exact) <= 2 * float(one.stderr) for one in found]
    assert sum(held) >= 52
    values = torch.tensor([float(one) for one in found], dtype=torch.float64)
    assert abs(values.mean() - exact) < 4 * values.std() / 60**0.5
    assert values.std() < 0.1 * exact
    assert {(one.samples, one.freedom) for one in found} == {(4, 3.0)}


def test_a_loader_gives_the_same_alignment_as_its_samples():
    model, x, y = alignment_case()
    whole = fl.estimate_alignment(model, x, y, sketch=Sketch(64, 3))
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    streamed = fl.estimate_alignment(model, loader, sketch=Sketch(64, 3))
    assert float(streamed) == pytest.approx(float(whole), rel=1e-10)
    assert float(streamed.stderr) == pytest.approx(float(whole.stderr), rel=1e-8)


def test_the_jackknife_leaves_one_repeat_out_at_a_time():
    """Three repeats, by hand."""
    overlaps = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    products = torch.tensor([[9.0, 4.0, 1.0], [4.0, 9.0, 9.0], [1.0, 9.0, 9.0]], dtype=torch.float64)
    value, error = jackknifed(overlaps, products)
    assert value == pytest.approx((7 / 3) / math.sqrt(14 / 3))
    without = [6 / 2 / 3, 5 / 2 / 1, 3 / 2 / 2]
    mean = sum(without) / 3
    assert error == pytest.approx(2.263268 * math.sqrt(2 / 3 * sum((one - mean) ** 2 for one in without)), rel=1e-6)


def test_alignments_that_are_not_defined_are_nan():
    model = nn.Sequential(nn.Linear(3, 1, bias=True)).double()
    nn.init.zeros_(model[0].weight)
    x = torch.ones(6, 3, dtype=torch.float64)  # K is constant: nothing is left of it when centered
    y = torch.arange(6.0, dtype=torch.float64)
    assert math.isnan(float(fl.estimate_alignment(model, x, y, centered=True, sketch=Sketch(16, 3))))
    assert math.isnan(float(fl.estimate_alignment(model, x, 0 * y, sketch=Sketch(16, 3))))


# ---- plans and refusals


def test_the_plan_says_what_is_run(monkeypatch):
    model, x = built("tied")
    sketch = Sketch(64, 3)
    monkeypatch.setattr("featlearn.planning.sketch_plan.samples_within", lambda *_: 3)
    planned = fl.plan(model, x, sketch=sketch)
    assert (planned.chunk, planned.passes, planned.backward_passes) == (3, 3, 3)
    assert planned.feature_bytes == 8 * 64 * 3 * 8
    assert planned.kernel_bytes == 2 * 8 * 8 * 8
    assert planned.gram_operations == 8 * 8 * 64 * 3
    assert planned.relative_error == pytest.approx(1 / math.sqrt(64 * 3))
    routes = {p.name: p.route for p in planned.parameters}
    assert "entries" in routes["embedding.weight"]
    assert routes["block.norm1.weight"] == "formed"
    assert "6 positions" in {p.reason for p in planned.parameters}
    said = str(planned)
    assert "3 sketches of 64 numbers a sample (12.0 KiB)" in said
    assert "errors of about 0.072 sqrt(K_ii K_jj)" in said
    calls = []
    handle = model.embedding.register_forward_hook(lambda *_: calls.append(1))
    fl.ntk(model, x, sketch=sketch)
    handle.remove()
    assert len(calls) >= planned.passes  # and a few samples that are audited
    wide = fl.plan(model, x, x2=x[:5], sketch=sketch, by="layer")
    assert wide.kernels == len(fl.ntk(model, x, by="layer"))
    assert wide.passes == 5


def test_what_cannot_be_sketched_is_refused():
    model, x = built("perceptron")
    for outputs in ("each", "full", fl.Directions(2)):
        with pytest.raises(InputValueError, match="with sketch="):
            fl.ntk(model, x, outputs=outputs, sketch=Sketch(64))
    with pytest.raises(InputValueError, match="verify=True with sketch="):
        fl.ntk(model, x, verify=True, sketch=Sketch(64))
    with pytest.raises(InputTypeError, match=r"expected fl.Sketch\(k=4096"):
        fl.ntk(model, x, sketch=64)
    with pytest.raises(MemoryBudgetError, match="4 sketches of 4096 numbers for 9 samples take"):
        fl.ntk(model, x, sketch=Sketch(), memory="1MiB")
    with pytest.raises(FeatlearnError, match="carry no gradient"):
        fl.ntk(model, x, readout=lambda f: f.detach(), sketch=Sketch(64))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(InputValueError, match="not finite"):
        fl.ntk(model, x, sketch=Sketch(64))
    model, x, y = alignment_case()
    with pytest.raises(InputValueError, match="expected at least 3"):
        fl.estimate_alignment(model, x, y, sketch=Sketch(64, 2))
    with pytest.raises(InputValueError, match="sketch= with vectors="):
        fl.estimate_alignment(model, x, y, vectors=8, sketch=Sketch(64))


def test_one_output_is_one_kernel():
    model, x = built("perceptron")
    found = fl.ntk(model, x, outputs=1, sketch=Sketch(64, 200))
    assert ((found.value - fl.ntk(model, x, outputs=1)).abs() < 4.5 * found.stderr).all()
    mean, total = (fl.ntk(model, x, outputs=kind, sketch=Sketch(64, 3)) for kind in ("mean", "sum"))
    assert torch.allclose(total.value, 3 * mean.value)
    assert torch.allclose(total.stderr, 3 * mean.stderr)
