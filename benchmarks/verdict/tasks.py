"""What is learned: real data that comes with scikit-learn, and synthetic teachers; all small, none downloaded."""

import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.verdict.constructions import Samples

Task = tuple[Samples, Samples]
"""training and test samples"""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(x: Tensor, y: Tensor, train: int, test: int, seed: int) -> Task:
    """Training and test samples, in an order of their own for each seed."""
    some = torch.randperm(len(x), generator=generator(seed))[: train + test]
    return Samples(x[some[:train]], y[some[:train]]), Samples(x[some[train:]], y[some[train:]])


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """One-hot rows less their mean."""
    return nn.functional.one_hot(labels, classes).float() - 1 / classes


def standardized(x: Tensor) -> Tensor:
    """Each coordinate less its mean, over one deviation for all of them."""
    return (x - x.mean(0)) / (x - x.mean(0)).std()


ATTRIBUTES = ((1, 3, 5, 7, 9), (5, 6, 7, 8, 9), (2, 3, 5, 7), (0, 6, 8, 9), (1, 4, 7))
"""Classes that are odd, large, prime, have a loop, are drawn by straight lines."""


def digits(seed: int, train: int, test: int = 60, *, targets: str = "one-hot", raw: bool = False) -> Task:
    """Digits with targets `one-hot`, `labels`, `odd` (one output, -1 or 1) or `attributes` (several of five labels)."""
    data = fl.data.digits()
    labels = data.labels
    y = {
        "one-hot": lambda: one_hot(labels, 10),
        "labels": lambda: labels,
        "odd": lambda: (2.0 * (labels % 2) - 1)[:, None],
        "attributes": lambda: torch.stack([torch.isin(labels, torch.tensor(a)) for a in ATTRIBUTES], 1).float(),
    }[targets]()
    return split(data.x if raw else standardized(data.x), y, train, test, seed)


def few_digits(seed: int, train: int, test: int = 60, *, targets: str = "one-hot") -> Task:
    """The digits 0 to 4, coordinates of variance one; `labels`, `one-hot`, or `thresholds` (above 0, above 1 ...)."""
    data = fl.data.digits()
    kept = data.labels < 5
    x, labels = data.x[kept], data.labels[kept]
    x = (x - x.mean(0)) / x.std(0).clamp_min(0.05)
    above = (labels[:, None] > torch.arange(4)).float()
    y = {"one-hot": one_hot(labels, 5), "labels": labels, "thresholds": above}[targets]
    return split(x, y, train, test, seed)


def cancer(seed: int, train: int, test: int = 60, *, targets: str = "signs") -> Task:
    """Breast cancer (30 measurements), with targets `signs` (one output, -1 or 1) or `labels`."""
    from sklearn.datasets import load_breast_cancer

    x, labels = (torch.from_numpy(part) for part in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0)).float()
    return split(x, labels.long() if targets == "labels" else (2.0 * labels - 1).float()[:, None], train, test, seed)


def mixture(seed: int, train: int, test: int = 60, *, classes: int = 4, dimension: int = 40) -> Task:
    """Gaussian clouds that overlap, one-hot targets."""
    data = fl.data.gaussian_mixture(
        train + test - (train + test) % classes + classes, dimension, classes, variance=3.0, generator=generator(seed)
    )
    return split(data.x * (dimension / 4) ** 0.5, one_hot(data.labels, classes), train, test, seed)


def chain(seed: int, train: int, test: int = 60, *, dimension: int = 12, degree: int = 3) -> Task:
    """Products of neighbors among the first coordinates; the others do not matter."""
    data = fl.data.chain_monomial(train + test, dimension, degree, generator=generator(seed))
    return split(data.x, data.y[:, None], train, test, seed)


def quadratic(seed: int, train: int, test: int = 60, *, dimension: int = 10, rank: int = 2) -> Task:
    """A positive quadratic form of low rank."""
    q = torch.randn(rank, dimension, generator=generator(seed), dtype=torch.float64)
    data = fl.data.quadratic_form(train + test, dimension, matrix=q, generator=generator(seed + 1))
    return split(data.x, data.y[:, None], train, test, seed)


def low_rank_linear(
    seed: int, train: int, test: int = 60, *, dimension: int = 20, outputs: int = 6, rank: int = 3
) -> Task:
    """A linear teacher of low rank with several outputs of variance one."""
    left = torch.randn(outputs, rank, generator=generator(seed), dtype=torch.float64)
    right = torch.randn(rank, dimension, generator=generator(seed + 1), dtype=torch.float64)
    weights = left @ right
    data = fl.data.linear_teacher(
        train + test,
        dimension,
        outputs=outputs,
        weights=weights / weights.norm(dim=1, keepdim=True),
        generator=generator(seed + 2),
    )
    return split(data.x, data.y, train, test, seed)


def sparse_linear(seed: int, train: int, test: int = 60, *, dimension: int = 60, nonzero: int = 3) -> Task:
    """A linear teacher of few coordinates."""
    weights = torch.zeros(dimension, dtype=torch.float64)
    weights[torch.randperm(dimension, generator=generator(seed))[:nonzero]] = nonzero**-0.5
    data = fl.data.linear_teacher(train + test, dimension, weights=weights, generator=generator(seed + 1))
    return split(data.x, data.y[:, None], train, test, seed)


def index(seed: int, train: int, test: int = 60, *, dimension: int = 15) -> Task:
    """y = tanh(2 w.x): a teacher of one direction."""
    x = torch.randn(train + test, dimension, generator=generator(seed))
    w = torch.randn(dimension, generator=generator(seed + 1))
    return split(x, (2 * x @ (w / w.norm())).tanh()[:, None], train, test, seed)


def changed(task: Task, *, times: float = 1.0, plus: float = 0.0) -> Task:
    """Targets multiplied, then moved by a constant."""
    return Samples(task[0].x, times * task[0].y + plus), Samples(task[1].x, times * task[1].y + plus)


def unit_targets(task: Task) -> Task:
    """Targets in units of their deviation over samples and outputs."""
    return changed(task, times=1 / float(task[0].y.std()))
