"""Does a kernel say the test error of its regression? Predictions from training samples against held-out images.

    FEATLEARN_DATA=DIR python benchmarks/test_error.py [--seeds 5] [--data mnist cifar10]
                                                  [--kernels infinite mlp trained leaked]

Ten centered one-hot targets, squared error averaged over outputs. Each seed draws 2000 training and 2000 test images of
the training files (another 5000 train the network of the kernel `trained`), and a network. The measured error at n is
that of up to ten disjoint training sets of n of the 2000, solved directly. Columns, in percent above the measured
error, mean over seeds (worst seed):

- curve: `fl.metrics.learning_curve` of the kernel of all 2000;
- from 500: the same from the kernel of the first 500, continued beyond n = 500;
- left out, gcv: `fl.metrics.predicted_risk` of the kernel of the first n, against the error of these n;
- theory: `theory.transfer.learning_curve_general` with the spectrum of all 2000 in place of the true one.
"""

import argparse
import time
from collections import defaultdict

import torch
from torch import Tensor, nn

import featlearn as fl

SAMPLES, PART, TEST, OTHERS = 2000, 500, 2000, 5000
SIZES = [100, 200, 500, 1000, 2000]
COLUMNS = ["curve", "from 500", "left out", "gcv", "theory"]


def network(inputs: int, seed: int, width: int = 256) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 500) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model


def kernels(name: str, data: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of the training images, of test with training images, and the targets of both."""
    drawn = torch.Generator().manual_seed(seed)
    images = getattr(fl.data, data)(samples=SAMPLES + TEST + OTHERS, generator=drawn, flatten=True)
    x, y = images.x - images.x.mean(0), images.one_hot(centered=True, dtype=torch.float64)
    new, seen = slice(SAMPLES, SAMPLES + TEST), slice(SAMPLES + TEST, None)
    if name == "infinite":
        wide = {"hidden_layers": 2}
        K, cross = (
            fl.theory.infinite_width.ntk(x[:SAMPLES], **wide),
            fl.theory.infinite_width.ntk(x[new], x[:SAMPLES], **wide),
        )
    else:
        model = network(x.shape[1], seed)
        if name != "mlp":  # `leaked`: trained on the very samples of the kernel, which the estimates do not allow
            rows = seen if name == "trained" else slice(SAMPLES)
            model = trained(model, x[rows], y[rows].float())
        K, cross = (
            fl.ntk(model, x[:SAMPLES], dtype=torch.float64),
            fl.ntk(model, x[new], x2=x[:SAMPLES], dtype=torch.float64),
        )
    return K, cross, y[:SAMPLES], y[new]


def measured(K: Tensor, cross: Tensor, y: Tensor, y_test: Tensor, ridge: float, n: int) -> list[float]:
    """Test errors of disjoint training sets of n."""
    errors = []
    for begin in range(0, min(10, SAMPLES // n) * n, n):
        part = slice(begin, begin + n)
        weights = torch.linalg.solve(K[part, part] + ridge * torch.eye(n, dtype=K.dtype), y[part])
        errors.append(float((cross[:, part] @ weights - y_test).square().mean()))
    return errors


def predictions(K: Tensor, y: Tensor, ridge: float) -> dict[str, list[float]]:
    """Errors at each of SIZES."""
    spectrum = fl.metrics.spectrum(K, y)
    values, power = spectrum.eigenvalues.clamp_min(0) / SAMPLES, spectrum.task_power / SAMPLES / y.shape[1]
    theory = fl.theory.transfer.learning_curve_general(torch.tensor(SIZES), values, power.sqrt(), ridge)
    risks = [fl.metrics.predicted_risk(K[:n, :n], y[:n], ridge) for n in SIZES]
    return {
        "curve": fl.metrics.learning_curve(K, y, SIZES, ridge).error.tolist(),
        "from 500": fl.metrics.learning_curve(K[:PART, :PART], y[:PART], SIZES, ridge).error.tolist(),
        "left out": [float(risk.leave_one_out) for risk in risks],
        "gcv": [float(risk.gcv) for risk in risks],
        "theory": theory.error.tolist(),
    }


def table(data: str, name: str, seeds: int) -> None:
    rows: dict[tuple[bool, int, str], list[float]] = defaultdict(list)
    begun = time.perf_counter()
    for seed in range(seeds):
        K, cross, y, y_test = kernels(name, data, seed)
        suggested = float(fl.metrics.condition(K, y).suggested_ridge)
        for ridge in (0.0, suggested):
            found = predictions(K, y, ridge)
            for i, n in enumerate(SIZES):
                errors = measured(K, cross, y, y_test, ridge, n)
                mean = sum(errors) / len(errors)
                rows[ridge > 0, n, "measured"].append(mean)
                for column in COLUMNS:
                    truth = errors[0] if column in ("left out", "gcv") else mean
                    rows[ridge > 0, n, column].append(100 * (found[column][i] / truth - 1))
        rows[True, 0, "ridge"].append(suggested / float(torch.linalg.eigvalsh(K)[-1]))
    relative = rows[True, 0, "ridge"]
    print(
        f"\n{data}, {name}: {seeds} seeds, {time.perf_counter() - begun:.0f} s; suggested ridge "
        f"{min(relative):.1e} to {max(relative):.1e} of the largest eigenvalue\n"
    )
    print(f"| ridge | n | measured | {' | '.join(COLUMNS)} |")
    print("| --- | --- | --- |" + " --- |" * len(COLUMNS))
    for some, n in [(some, n) for some in (False, True) for n in SIZES]:
        cells = [said(rows[some, n, column]) for column in COLUMNS]
        error = sum(rows[some, n, "measured"]) / seeds
        print(f"| {'suggested' if some else '0'} | {n} | {error:.4f} | {' | '.join(cells)} |", flush=True)


def said(percent: list[float]) -> str:
    worst = max(percent, key=abs)
    return f"{sum(percent) / len(percent):+.1f} ({worst:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--kernels", nargs="+", default=["infinite", "mlp", "trained"])
    options = parser.parse_args()
    for data in options.data:
        for name in options.kernels:
            table(data, name, options.seeds)


if __name__ == "__main__":
    main()
