"""Ten planted errors as `mup.coord_check` and torch-module-monitor show them, beside `fl.scale_check`.

    pip install mup torch-module-monitor pandas h5py
    python -m benchmarks.widths.rivals

Both rivals measure modules and leave the reading to the user. Here a module counts as named if the size of its output
(coordinate check, after three steps), or of its effective update (refined coordinate check), has a power of the width
beyond +-1/4. All ten networks are in muP, mean field or NTK parametrization but for the planted error.
"""

import copy
import logging
import math
from collections.abc import Callable

import torch
from mup import coord_check
from torch import Tensor, nn
from torch_module_monitor import ModuleMonitor, RefinedCoordinateCheck

from benchmarks.widths import held_out_networks as networks
from benchmarks.widths.held_out import CASES, Case, checked
from featlearn import losses

STEPS, SEEDS, BOUND = 3, 3, 0.25
NAMES = (
    "bare mean field, rate of B",
    "bare mean field, A",
    "perceptron mup, readout",
    "perceptron mup, rate of one",
    "perceptron mup, rate of a bias",
    "gpt mup, rate of down",
    "gpt mup, embedding",
    "gpt mup, places",
    "gated mup, query",
    "resnet mup, stem",
)


class WithLoss(nn.Module):
    """A network that returns its loss, as the coordinate check takes it."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (self.loss(self.model(x), y),)


def slopes(sizes: dict[str, dict[int, list[float]]]) -> dict[str, float]:
    """Power of the width of each module's size."""
    powers = {}
    for name, by_width in sizes.items():
        points = [(math.log(n), math.log(v)) for n, values in by_width.items() for v in values if v > 0]
        if len({x for x, _ in points}) > 1:
            x, y = (torch.tensor(column) for column in zip(*points, strict=True))
            powers[name] = float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())
    return powers


def coordinates(case: Case) -> dict[str, float]:
    """Powers of the outputs of all modules by `mup.coord_check`."""
    x, y = networks.batch(case.data)
    loss, optimizers = losses.function(case.loss), {}

    def lazy(n: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model, optimizer = case.make(n)
            whole = WithLoss(model, loss)
            optimizers[whole] = optimizer
            return whole

        return make

    frame = coord_check._get_coord_data(
        {n: lazy(n) for n in case.sizes},
        [{"x": x, "y": y}],
        lambda model: optimizers[model],
        nsteps=STEPS,
        nseeds=SEEDS,
        dict_in_out=True,
        cuda=False,
        show_progress=False,
    )
    sizes: dict[str, dict[int, list[float]]] = {}
    for row in frame[frame["t"] == STEPS].to_dict("records"):
        if row["module"].startswith("model."):
            sizes.setdefault(row["module"].removeprefix("model."), {}).setdefault(row["width"], []).append(row["l1"])
    return slopes(sizes)


def effective_updates(case: Case) -> dict[str, float]:
    """Powers of the effective updates of all modules by torch-module-monitor."""
    x, y = networks.batch(case.data)
    loss = losses.function(case.loss)
    sizes: dict[str, dict[int, list[float]]] = {}
    for n in case.sizes:
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            model, optimizer = case.make(n)
            reference = copy.deepcopy(model)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
            monitor.logger.setLevel(logging.ERROR)
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            check = RefinedCoordinateCheck(monitor)
            monitor.begin_step(0)
            outputs: dict[str, int] = {}
            handles = [
                module.register_forward_hook(
                    lambda m, i, o, name=name, sizes=outputs: sizes.__setitem__(name, o[0].numel())
                )
                for name, module in model.named_modules()
                if name
            ]
            reference(x), model(x)
            for handle in handles:
                handle.remove()
            check.refined_coordinate_check()
            monitor.end_step()
            for key, value in monitor.get_step_metrics().items():
                parts = key.split("/")
                if parts[0] == "RCC (W_t-W_0)x_t" and parts[-1] == "l2norm" and parts[1] in outputs:
                    number = float(value) / outputs[parts[1]] ** 0.5
                    sizes.setdefault(parts[1], {}).setdefault(n, []).append(number)
    return slopes(sizes)


def main() -> None:
    right = {"mup.coord_check": 0, "torch-module-monitor": 0, "featlearn": 0}
    for name in NAMES:
        case = next(case for case in CASES if case.name == name)
        assert case.parameter is not None
        where = case.parameter.rpartition(".")[0]
        print(f"{name}: {case.parameter} {case.power:+g}")
        for rival, measure in (("mup.coord_check", coordinates), ("torch-module-monitor", effective_updates)):
            try:
                powers = measure(case)
            except Exception as error:
                print(f"  {rival}: {type(error).__name__}: {error}")
                continue
            named = {module: round(power, 2) for module, power in powers.items() if abs(power) > BOUND}
            right[rival] += set(named) == {where}
            print(f"  {rival}: {named or 'nothing'} of {len(powers)} modules")
        problems = checked(case).problems
        right["featlearn"] += {problem.parameter for problem in problems} == {case.parameter}
        print("  featlearn: " + "; ".join(f"{p.parameter} {p.quantity} {float(p.power):+.2f}" for p in problems))
    print(f"the planted place and no other, of {len(NAMES)}: {right}")


if __name__ == "__main__":
    main()
