"""Twenty more held-out trainings, written before any of them was diagnosed: ten lazy by theory, ten rich.

    python -m benchmarks.verdict.cases unseen

None has set a threshold or a rule. A reference gap stands beside each where forward mode can differentiate the model.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import featlearn as fl
from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.cases import Case, Trained, adam, collector, gap_of, sgd, trained, watched
from benchmarks.verdict.constructions import Samples
from benchmarks.verdict.reference import linearization_gap
from benchmarks.verdict.training import copied

CASES: dict[str, Case] = {}
case = collector(CASES)

# Linear in the trained weights, up to a fixed output function.


class Fourier(nn.Module):
    """Random Fourier features, which are not trained."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(features, inputs) / 4)
        self.register_buffer("phases", 2 * math.pi * torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        return (2 / len(self.phases)) ** 0.5 * (x @ self.directions.T + self.phases).cos()


class Softplus(nn.Module):
    """A positive mean."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.softplus(x)


class Temperature(nn.Module):
    """Probabilities at a fixed temperature."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 3).softmax(1)


class Experts(nn.Module):
    """Frozen gates over linear experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        return sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@case("Fourier features, sigmoid, BCELoss", before="rich", expected=("lazy",), reason="a generalized linear model")
def fourier(path: Path) -> Trained:
    train, test = tasks.cancer(4001, 300, targets="labels")
    train, test = (Samples(p.x, p.y.float()[:, None]) for p in (train, test))
    model = nn.Sequential(Fourier(30, 300), nn.Linear(300, 1), nn.Sigmoid())
    return Trained(
        run=trained(path, model, train, test, loss=nn.BCELoss(), optimizer=adam(model, 3e-2), steps=400, batch=32),
        reference=0.0,
    )


@case("gamma regression with a softplus mean", before="rich", expected=("lazy",), reason="a generalized linear model")
def gamma(path: Path) -> Trained:
    generator = tasks.generator(4002)
    x = torch.randn(400, 10, generator=generator)
    mean = functional.softplus(x @ torch.randn(10, 1, generator=generator) / 2 + 1)
    y = mean * (0.5 + torch.rand(mean.shape, generator=generator))
    train, test = tasks.split(x, y, 300, 100, 4002)
    model = nn.Sequential(nn.Linear(10, 1), Softplus())

    def deviance(f: Tensor, y: Tensor) -> Tensor:
        return (y / f + f.log()).mean()

    return Trained(
        run=trained(path, model, train, test, loss=deviance, optimizer=adam(model, 2e-2), steps=300), reference=0.0
    )


@case("linear experts behind frozen gates", before="lazy", expected=("lazy",), reason="linear in the trained weights")
def experts(path: Path) -> Trained:
    train, test = tasks.digits(4003, 300, targets="labels")
    model = Experts()
    loss = nn.CrossEntropyLoss()
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, 1e-2), steps=250, batch=64)
    return Trained(run=run, reference=0.0)


@case(
    "head of a residual network with GroupNorm",
    before="lazy",
    expected=("lazy",),
    reason="linear in the trained weights",
)
def group_norm_head(path: Path) -> Trained:
    train, test = tasks.digits(4004, 400, targets="labels")
    body = net.cnn((16, 24), 10, norm=lambda channels: nn.GroupNorm(4, channels))
    model = net.frozen(body)
    loss = nn.CrossEntropyLoss()
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, 1e-2), steps=300, batch=64)
    return Trained(run=run, reference=0.0)


@case(
    "softmax at a temperature, squared error",
    before="rich",
    expected=("lazy",),
    reason="a linear model behind a fixed function",
)
def temperature(path: Path) -> Trained:
    train, test = tasks.few_digits(4005, 150, targets="labels")
    train, test = (Samples(p.x, functional.one_hot(p.y, 5).float()) for p in (train, test))
    model = nn.Sequential(nn.Linear(train.x.shape[1], 5), Temperature())
    loss = nn.MSELoss()
    return Trained(run=trained(path, model, train, test, loss=loss, optimizer=sgd(model, 2.0), steps=400), reference=0)


# Lazy by width or by a multiplied output.


@case(
    "wide CNN in NTK parametrization",
    before="mixed",
    expected=("lazy",),
    reason="width 768 and a readout of its square root",
)
def wide_cnn(path: Path) -> Trained:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(768, 1, 3, 3))
            self.readout = nn.Parameter(torch.randn(768, 1))

        def forward(self, x: Tensor) -> Tensor:
            h = functional.conv2d(x.unflatten(1, (1, 8, 8)), self.first * (2 / 9) ** 0.5, stride=2, padding=1).relu()
            return h.mean((2, 3)) @ self.readout * 768**-0.5

    train, test = tasks.digits(4006, 100, targets="odd")
    model = net.Difference(Convolution())
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 1.0), steps=300)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("transformer x 200 behind log-softmax", before="rich", expected=("lazy",), reason="lazy before the link")
def lazy_transformer(path: Path) -> Trained:
    train, test = tasks.digits(4007, 100, targets="labels")
    body = fl.steer.scale_output(net.Transformer(10, 24, 2, 3), 200)
    model = nn.Sequential(body, nn.LogSoftmax(1))
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.NLLLoss(), optimizer=sgd(model, 2e-6), steps=300)
    return Trained(run=run, reference=gap_of(model, body, initial, test.x))


@case(
    "RMSNorm network x 100, Nesterov and decay",
    before="lazy",
    expected=("lazy",),
    reason="a multiplied output; little decay",
)
def lazy_rms(path: Path) -> Trained:
    train, test = tasks.digits(4008, 100)
    model = fl.steer.scale_output(net.mlp([64, 96, 96, 10], nn.SiLU, norm=nn.RMSNorm), 100)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-8, momentum=0.9, nesterov=True, weight_decay=1e-2)
    initial = copied(model)
    loss = nn.MSELoss(reduction="sum")
    run = trained(path, model, train, test, loss=loss, optimizer=optimizer, steps=300)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case(
    "distillation of a wide network by KL", before="lazy", expected=("lazy",), reason="NTK parametrization, width 1024"
)
def distilled(path: Path) -> Trained:
    train, test = tasks.digits(4009, 150, targets="labels")
    teacher = nn.Linear(64, 10)
    optimizer = adam(teacher, 3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        functional.cross_entropy(teacher(train.x), train.y).backward()
        optimizer.step()
    with torch.no_grad():
        train, test = (Samples(p.x, (teacher(p.x) / 4).softmax(1)) for p in (train, test))
    model = net.Difference(net.scaled_mlp([64, 1024, 10], 1024**-0.5, nn.Tanh))
    initial = copied(model)

    def divergence(f: Tensor, y: Tensor) -> Tensor:
        return functional.kl_div(f.log_softmax(1), y, reduction="batchmean")

    run = trained(path, model, train, test, loss=divergence, optimizer=sgd(model, 0.3), steps=250)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("GRU x 100", before="lazy", expected=("lazy",), reason="a multiplied output")
def lazy_gru(path: Path) -> Trained:
    train, test = tasks.digits(4010, 100, targets="odd")
    model = fl.steer.scale_output(Rows(nn.GRU(8, 48, batch_first=True), 1), 100)
    return Trained(run=trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 1e-5), steps=300))


class Rows(nn.Module):
    """A recurrent network over the rows of an image of 8 x 8."""

    def __init__(self, cell: nn.Module, outputs: int) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(48, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unflatten(1, (8, 8)))[0][:, -1])


# Rich by parametrization, by small weights, or by training from scratch at usual rates.


@case(
    "mean field, one direction",
    before="rich",
    expected=("rich",),
    reason="mean-field parametrization, trained to a small loss",
)
def mean_field(path: Path) -> Trained:
    train, test = tasks.index(4011, 200)
    model = net.scaled_mlp([15, 512, 1], 1 / 512, nn.Tanh)
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 60.0), steps=600)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("CNN from weights a tenth as large", before="rich", expected=("rich",), reason="small first weights")
def small_cnn(path: Path) -> Trained:
    train, test = tasks.digits(4012, 300, targets="labels")
    model = net.small(net.cnn((12, 16), 10), 0.1)
    initial, loss = copied(model), nn.CrossEntropyLoss()
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, 2e-3), steps=300, batch=64)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case(
    "deep linear network from small weights",
    before="rich",
    expected=("rich",),
    reason="small first weights; a chain is not merged",
)
def deep_linear(path: Path) -> Trained:
    train, test = tasks.low_rank_linear(4013, 200)
    model = net.small(nn.Sequential(*(nn.Linear(n, m, False) for n, m in ((20, 30), (30, 30), (30, 6)))), 0.3)
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 0.1), steps=800)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("weight norm, output / 50", before="rich", expected=("rich",), reason="a divided output")
def weight_norm(path: Path) -> Trained:
    train, test = tasks.digits(4014, 150)
    body = net.mlp([64, 80, 80, 10])
    for i in (0, 2, 4):
        body[i] = nn.utils.parametrizations.weight_norm(body[i])
    model = net.Multiplied(body, 0.02)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 30.0), steps=500)
    return Trained(run=run)


@case(
    "GPT on letters", before="failed", expected=("rich",), reason="AdamW at a usual rate from scratch; (P, T, V) logits"
)
def letters(path: Path) -> Trained:
    text = "the quick brown fox jumps over the lazy dog and then the dog sleeps while the fox runs far away " * 8
    ids = torch.tensor([ord(letter) - 97 if letter != " " else 26 for letter in text])
    windows = ids.unfold(0, 17, 1)
    model = fl.models.GPT(27, context=16, width=48, blocks=2, heads=4)
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    generator, optimizer = tasks.generator(4015), torch.optim.AdamW(model.parameters(), 3e-3)
    with watched(model, (x[:64], y[:64]), path, (x[100:132], y[100:132]), optimizer) as watch:
        for _ in range(200):
            rows = torch.randint(len(x), (16,), generator=generator)
            loss = functional.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return Trained(run=watch.run)


@case(
    "GRU, adding problem",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate from scratch, until it is solved",
)
def adding(path: Path) -> Trained:
    class Adder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    generator = tasks.generator(4016)
    values = torch.rand(700, 12, generator=generator)
    marks = torch.zeros_like(values).scatter(1, torch.rand(values.shape, generator=generator).topk(2).indices, 1.0)
    x, y = torch.stack([values, marks], 2), (values * marks).sum(1, keepdim=True)
    train, test = tasks.split(x, y, 600, 100, 4016)
    model = Adder()
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=adam(model, 1e-2), steps=600, batch=64)
    return Trained(run=run)


@case(
    "triplet embedding",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate from scratch; a loss without targets",
)
def triplets(path: Path) -> Trained:
    train, test = tasks.digits(4017, 600, targets="labels")
    model = net.mlp([64, 128, 16])
    optimizer, generator, initial = adam(model, 2e-3), tasks.generator(4017), copied(model)
    by_class = [(train.y == label).nonzero()[:, 0] for label in range(10)]

    def drawn(label: int) -> Tensor:
        return by_class[label][torch.randint(len(by_class[label]), (6,), generator=generator)]

    with watched(model, (train.x[:100], None), path, (test.x, None), optimizer) as watch:
        for _ in range(300):
            pairs = torch.stack([torch.randperm(10, generator=generator)[:2] for _ in range(10)]).tolist()
            anchor, near = (torch.cat([drawn(same) for same, _ in pairs]) for _ in "ab")
            far = torch.cat([drawn(other) for _, other in pairs])
            loss = functional.triplet_margin_loss(*(model(train.x[rows]) for rows in (anchor, near, far)), margin=2.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return Trained(run=watch.run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("autoencoder, sigmoid and BCELoss", before="rich", expected=("rich",), reason="Adam at a usual rate from scratch")
def autoencoder(path: Path) -> Trained:
    data = tasks.digits(4018, 500, raw=True)
    train, test = (Samples(p.x / data[0].x.max(), (p.x / data[0].x.max()).clamp(0, 1)) for p in data)
    model = nn.Sequential(net.mlp([64, 96, 10, 96, 64]), nn.Sigmoid())
    initial = copied(model)
    run = trained(
        path, model, train, test, loss=nn.BCELoss(), optimizer=adam(model, 3e-3), steps=400, batch=50, declared=False
    )
    return Trained(run=run, reference=gap_of(model, model[0], initial, test.x))


@case(
    "differential equation by a network",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate from scratch; no targets",
)
def equation(path: Path) -> Trained:
    model = net.mlp([1, 48, 48, 1], nn.Tanh)
    optimizer, x = adam(model, 5e-3), torch.linspace(0, 6, 80)[:, None]
    initial = copied(model)
    with watched(model, (x, None), path, None, optimizer) as watch:
        for _ in range(500):
            points = x.clone().requires_grad_(True)
            u = model(points)
            (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
            loss = (slope + u - (2 * points).sin()).square().mean() + (model(x[:1]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return Trained(run=watch.run, reference=linearization_gap(model, initial, copied(model), x))


@case(
    "two-layer squares from small weights",
    before="rich",
    expected=("rich",),
    reason="small first weights; a low-rank teacher",
)
def squares(path: Path) -> Trained:
    task = tasks.quadratic(4020, 300)
    unit = float(task[0].y.std())
    train, test = (Samples(p.x, p.y / unit) for p in task)
    model = net.small(nn.Sequential(nn.Linear(10, 60, False), net.Square(), nn.Linear(60, 1)), 0.1)
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=adam(model, 3e-3), steps=800)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))
