"""Networks whose verdict was once wrong, each trained as its owner would.

python -m benchmarks.verdict.cases difficult
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import featlearn as fl
from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.cases import Case, Trained, adam, collector, gap_of, sgd, trained
from benchmarks.verdict.constructions import Samples
from benchmarks.verdict.reference import linearization_gap
from benchmarks.verdict.training import copied

CASES: dict[str, Case] = {}
case = collector(CASES)

# Linear up to a fixed output function.


@case(
    "log-softmax after a linear model",
    expected=("lazy",),
    before="rich",
    reason="a generalized linear model: the part before the link is linear in its weights",
)
def log_softmax(path: Path) -> Trained:
    train, test = tasks.digits(2001, 100, targets="labels")
    model = nn.Sequential(nn.Linear(64, 10), nn.LogSoftmax(1))
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.NLLLoss(), optimizer=sgd(model, 0.1), steps=300)
    return Trained(run=run, reference=gap_of(model, model[0], initial, test.x))


@case(
    "frozen body, trained head, sigmoid",
    expected=("lazy",),
    before="rich",
    reason="linear in the trained weights before the link",
)
def frozen_body(path: Path) -> Trained:
    train, test = tasks.digits(2002, 200, targets="odd")
    train, test = (Samples(part.x, (part.y + 1) / 2) for part in (train, test))
    body = net.frozen(net.mlp([64, 200, 1]))
    model = nn.Sequential(body, nn.Sigmoid())
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.BCELoss(), optimizer=adam(model, 1e-2), steps=300, batch=64)
    return Trained(run=run, reference=gap_of(model, body, initial, test.x))


class Exponential(nn.Module):
    """exp(h)"""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


@case("Poisson regression", expected=("lazy",), before="rich", reason="linear in the weights before the exponential")
def poisson(path: Path) -> Trained:
    generator = tasks.generator(2003)
    x = torch.randn(300, 12, generator=generator)
    y = torch.poisson((x @ torch.randn(12, 1, generator=generator) / 3).exp(), generator=generator)
    train, test = tasks.split(x, y, 200, 100, 2003)
    model = nn.Sequential(nn.Linear(12, 1), Exponential())
    initial = copied(model)
    loss = nn.PoissonNLLLoss(log_input=False)
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, 2e-2), steps=300)
    return Trained(run=run, reference=gap_of(model, model[0], initial, test.x))


@case(
    "readout behind frozen BatchNorm", expected=("lazy",), before="cannot tell", reason="linear in the trained weights"
)
def batch_norm_readout(path: Path) -> Trained:
    train, test = tasks.digits(2004, 300)
    body = [nn.Linear(64, 150), nn.ReLU(), nn.BatchNorm1d(150)]
    model = net.frozen(nn.Sequential(*body, nn.Linear(150, 10)))
    model[2].eval()
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 0.02), steps=200, batch=50)
    return Trained(run=run, reference=0.0)


@case(
    "head under BatchNorm that is not frozen",
    expected=("lazy",),
    before="lazy",
    reason="linear in the trained weights; statistics move",
)
def head_under_batch_norm(path: Path) -> Trained:
    train, test = tasks.digits(2005, 300, raw=True)
    body = [nn.Linear(64, 150), nn.ReLU(), nn.BatchNorm1d(150)]
    model = net.frozen(nn.Sequential(*body, nn.Linear(150, 10)))
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 0.02), steps=300, batch=50)
    return Trained(run=run, reference=0.0)


# Lazy by an output that is multiplied, or by width.


@case(
    "bfloat16, output x 100",
    expected=("lazy", "cannot tell"),
    before="rich",
    reason="lazy in exact arithmetic; rounding may cover it",
)
def low_precision(path: Path) -> Trained:
    train, test = tasks.digits(2006, 100)
    torch.manual_seed(2006)
    model = fl.steer.scale_output(net.mlp([64, 100, 10]), 100).to(torch.bfloat16)
    train, test = (Samples(part.x.bfloat16(), part.y.bfloat16()) for part in (train, test))
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 1e-4, 0.0), steps=300)
    return Trained(run=run)


@case(
    "distillation, output x 100",
    expected=("lazy",),
    before="cannot tell",
    reason="lazy; the entropy of the targets stays",
)
def distillation(path: Path) -> Trained:
    train, test = tasks.digits(2007, 200, targets="labels")
    teacher = net.mlp([64, 64, 10])
    optimizer = adam(teacher, 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(teacher(train.x), train.y).backward()
        optimizer.step()
    with torch.no_grad():
        train, test = (Samples(part.x, (teacher(part.x) / 8).softmax(1)) for part in (train, test))
    model = fl.steer.scale_output(net.mlp([64, 120, 10], nn.Tanh), 100)
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=sgd(model, 5e-5), steps=400)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case(
    "parity, wide network", expected=("lazy",), before="cannot tell", reason="a wide network in the NTK parametrization"
)
def parity(path: Path) -> Trained:
    x = torch.randn(260, 16, generator=tasks.generator(2008)).sign()
    train, test = tasks.split(x, x[:, :1] * x[:, 1:2], 200, 60, 2008)
    model = net.Difference(net.scaled_mlp([16, 1024, 1], 1024**-0.5, gain=2**0.5))
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, 0.2), steps=200)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("log-softmax, output x 100", expected=("lazy",), before="rich", reason="lazy before the link")
def lazy_softmax(path: Path) -> Trained:
    train, test = tasks.digits(2009, 100, targets="labels")
    body = fl.steer.scale_output(net.mlp([64, 100, 10]), 100)
    model = nn.Sequential(body, nn.LogSoftmax(1))
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.NLLLoss(), optimizer=sgd(model, 2e-5), steps=300)
    return Trained(run=run, reference=gap_of(model, body, initial, test.x))


# Beginnings, adapters, thrown weights, unfreezing, noise.


@case("ten steps of Adam", expected=("cannot tell",), before="rich", reason="almost nothing is learned")
def beginning(path: Path) -> Trained:
    train, test = tasks.digits(2010, 400, targets="labels")
    model = net.mlp([64, 128, 128, 10])
    run = trained(path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=adam(model, 1e-4), steps=10)
    return Trained(run=run)


class Adapted(nn.Module):
    """A frozen map with a trained update of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapters(path: Path, rate: float, steps: int) -> Trained:
    train, test = tasks.digits(2011, 300, targets="labels")
    body = net.mlp([64, 256, 256, 10])
    optimizer = adam(body, 1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(body(train.x), train.y % 5).backward()
        optimizer.step()
    plain, first = copy.deepcopy(body), copied(body)
    for i in (0, 2):
        body[i] = Adapted(body[i], 4)
    body[4].requires_grad_(False)
    some = Samples(train.x, train.y % 5), Samples(test.x, test.y % 5)
    mixed = [(part.y + (part.x[:, 20] > 0).long()) % 5 for part in some]  # a task near the first
    train, test = (Samples(part.x, y) for part, y in zip(some, mixed, strict=True))
    run = trained(path, body, train, test, loss=nn.CrossEntropyLoss(), optimizer=adam(body, rate), steps=steps)
    merged = dict(first)
    for i in (0, 2):
        merged[f"{i}.weight"] = first[f"{i}.weight"] + (body[i].up.weight @ body[i].down.weight).detach()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in ("0.weight", "2.weight"))
    return Trained(run=run, reference=linearization_gap(plain, first, merged, test.x))


@case("adapters, gentle", expected=("lazy", "mixed"), before="rich", reason="the merged weights move by little")
def gentle_adapters(path: Path) -> Trained:
    return adapters(path, 2e-4, 150)


@case("adapters, strong", expected=("rich",), before="rich", reason="the merged gap is above 0.25")
def strong_adapters(path: Path) -> Trained:
    return adapters(path, 5e-3, 300)


@case("catapult", expected=("rich", "mixed"), before="mixed", reason="the rate is above the stable one")
def catapult(path: Path) -> Trained:
    train, test = tasks.digits(2012, 80, targets="odd")
    model = net.scaled_mlp([64, 512, 1], 512**-0.5, gain=2**0.5, bias=False)
    kernel = fl.ntk(model, train.x)
    rate = 3.0 * len(train.x) / (2 * float(torch.linalg.eigvalsh(kernel.double())[-1]))
    initial = copied(model)
    run = trained(path, model, train, test, loss=nn.MSELoss(), optimizer=sgd(model, rate, 0.0), steps=400)
    return Trained(run=run, reference=linearization_gap(model, initial, copied(model), test.x))


@case("gradual unfreezing", expected=("rich",), before="KeyError", reason="hidden layers train from step 200 on")
def unfreezing(path: Path) -> Trained:
    train, test = tasks.digits(2013, 200, targets="labels")
    model = net.frozen(net.mlp([64, 100, 100, 10]))
    optimizer = sgd(model, 0.02)

    def unfreeze() -> None:
        body = [p.requires_grad_(True) for p in model.parameters() if not p.requires_grad]
        optimizer.add_param_group({"params": body, "lr": 0.05})

    run = trained(
        path,
        model,
        train,
        test,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        steps=500,
        at={200: unfreeze},
    )
    return Trained(run=run)


@case("labels that are noise", expected=("rich",), before="rich", reason="fits noise; it must not be told to help")
def noise_labels(path: Path) -> Trained:
    train, test = tasks.digits(2014, 120, targets="labels")
    generator = tasks.generator(2014)
    train, test = (Samples(p.x, torch.randint(0, 10, (len(p.x),), generator=generator)) for p in (train, test))
    model = net.mlp([64, 128, 128, 10])
    run = trained(path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=adam(model, 3e-3), steps=300)
    return Trained(run=run)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unflatten(1, (8, 8)))[0][:, -1])


@case("LSTM from scratch", expected=("rich",), before="rich", reason="Adam at a usual rate")
def recurrent(path: Path) -> Trained:
    train, test = tasks.digits(2015, 300, targets="labels")
    model = Recurrent()
    run = trained(
        path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=adam(model, 1e-2), steps=200, batch=64
    )
    return Trained(run=run)


class Autoencoder(nn.Module):
    """A variational autoencoder, which draws in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net.mlp([64, 64, 8]), net.mlp([4, 64, 64])

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        draw = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        self.divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        return self.decoder(mean + draw * (spread / 2).exp())


@case("variational autoencoder", expected=("rich",), before="rich", reason="Adam at a usual rate, no classes")
def variational(path: Path) -> Trained:
    data = tasks.digits(2016, 400)
    train, test = (Samples(part.x, part.x) for part in data)
    model = Autoencoder()

    def bound(f: Tensor, x: Tensor) -> Tensor:
        return (f - x).square().sum(1).mean() + model.divergence

    optimizer = adam(model, 3e-3)
    run = trained(path, model, train, test, loss=bound, optimizer=optimizer, steps=300, batch=64, declared=False)
    return Trained(run=run)
