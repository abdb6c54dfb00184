"""Small runs in the format of `fl.watch`, written without it: the diagnosis is tested on its own."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import metrics
from featlearn.audited_model import AuditedModel
from featlearn.linearization.two_states import GapMemory, TwoStates
from featlearn.record import Run, RunWriter, open_run


def log_steps(steps: int, growth: float = 1.2) -> list[int]:
    """0, 1, 2, ... each later than the one before by a factor, and the last."""
    found, step = [0], 1
    while step < steps:
        found.append(step)
        step = max(step + 1, math.ceil(step * growth))
    return [*found, steps]


def record(
    path: Path,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    lr: float,
    steps: int,
    test: tuple[Tensor, Tensor] | None = None,
    loss: str | None = "mean",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: Mapping[str, Any] | None = None,
    until: float = 0.0,
    layers: bool = True,
    train: tuple[Tensor, Tensor, int] | None = None,
    scale_lr: Callable[[int], float] | None = None,
    full: bool = True,
    gap: bool = True,
    growth: float = 1.2,
) -> Run:
    """Full-batch training on squared error (or cross-entropy), watched by hand, until a share of the loss is left.

    `train` is another training set (x, y, batch size) than the probe.
    """
    chosen = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr, **(options or {}))
    group = chosen.param_groups[0]
    writer = RunWriter(
        path,
        {
            "name": path.name,
            "model": {"class": type(model).__name__},
            "optimizer": {
                "class": type(chosen).__name__,
                "groups": [{key: group.get(key, 0.0) for key in ("lr", "momentum", "weight_decay")}],
            },
            "loss_convention": loss,
            "seed": torch.initial_seed(),
            "finished": False,
            "probe": {
                "sha256": hashlib.sha256(x.numpy().tobytes()).hexdigest(),
                "samples": len(x),
                "outputs": y.shape[1],
                "classification": y.shape[1] > 1,
            },
        },
    )
    writer.array("targets", 0, y=y.numpy())
    recorder = _Recorder(writer, model, x, y, test, layers, loss == "cross-entropy", full, gap)
    recorder.measure(0, chosen, last=False)
    first = recorder.loss
    due = set(log_steps(steps, growth))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        if scale_lr is not None:
            group["lr"] = lr * scale_lr(step)
        chosen.zero_grad()
        a, b = x, y
        if train is not None:
            picked = torch.randint(len(train[0]), (train[2],), generator=generator)
            a, b = train[0][picked], train[1][picked]
        f = model(a)
        value = _objective(f, b, loss)
        value.backward()
        chosen.step()
        if step in due or not torch.isfinite(value):
            done = step == steps or not math.isfinite(recorder.loss) or recorder.loss < until * first
            recorder.measure(step, chosen, last=done)
            if done:
                break
    writer.event("finished", step)
    writer.describe(finished=True)
    writer.close()
    return open_run(path)


def _objective(f: Tensor, y: Tensor, loss: str | None) -> Tensor:
    if loss == "cross-entropy":
        return nn.functional.cross_entropy(f, y + 1 / y.shape[1])
    square = (f - y).square().sum(1)
    return {
        "sum-half": square.sum() / 2,
        "mean-half": square.mean() / 2,
        "mean-over-outputs": square.mean() / y.shape[1],
    }.get(loss or "mean", square.mean())


class _Recorder:
    def __init__(self, writer, model, x, y, test, layers, entropy, full, gap):
        self.writer, self.model, self.x, self.y, self.test, self.layers = writer, model, x, y, test, layers
        self.entropy, self.full, self.gap = entropy, full, gap and len(x) > 1
        self.first: Tensor | None = None
        self.gap_memory = GapMemory()
        self.initial = {name: value.clone() for name, value in model.state_dict().items()}
        self.start: dict[str, Tensor] = {}
        self.loss = math.inf

    def measure(self, step: int, optimizer: torch.optim.Optimizer, *, last: bool) -> None:
        with torch.no_grad():
            f = self.model(self.x).reshape(self.y.shape)
        self.loss = float((f - self.y).square().sum(1).mean())
        values = {"probe/loss": self.loss, "lr": optimizer.param_groups[0]["lr"]}
        if self.entropy:
            values["probe/cross_entropy"] = float(nn.functional.cross_entropy(f, self.y + 1 / self.y.shape[1]))
        if math.isfinite(self.loss):
            values |= self._kernels(step, f, step == 0 or last)
            values |= self._gap() if step and self.gap else {}
            if self.layers:
                values |= self._layers()
        self.writer.scalars(step, values)

    def _kernels(self, step: int, f: Tensor, ends: bool) -> dict[str, float]:
        full = fl.ntk(self.model, self.x, outputs="full") if ends and self.full else None
        each = (
            fl.ntk(self.model, self.x, outputs="each")
            if full is None
            else full.diagonal(dim1=2, dim2=3).permute(2, 0, 1)
        )
        mean = each.mean(0)
        if self.first is None:
            self.first = mean
        if ends:
            whole = {} if full is None else {"full": full.float().numpy()}
            self.writer.array("kernel", step, mean=mean.float().numpy(), each=each.float().numpy(), **whole)
        else:
            self.writer.array("kernel", step, mean=mean.float().numpy())
        self.writer.array("outputs", step, f=f.numpy())
        if self.test is not None:
            self._test(step, ends)
        values = self._values(mean)
        if len(each) > 1:
            ksm = metrics.specialization(each, self.y)
            self.writer.array("specialization", step, ksm=ksm.numpy())
            values["ntk/specialization"] = ksm.diagonal().mean()
        return {name: float(value) for name, value in values.items()}

    def _test(self, step: int, ends: bool) -> None:
        x, y = self.test
        with torch.no_grad():
            g = self.model(x).reshape(y.shape)
        if ends:
            cross = fl.ntk(self.model, x, x2=self.x, outputs="full")
            mixed = {"cross_full": cross.float().numpy()} if self.full else {}
            means = cross.diagonal(dim1=2, dim2=3).mean(-1).float().numpy()
            self.writer.array("test", step, cross=means, f=g.numpy(), y=y.numpy(), **mixed)
        else:
            self.writer.array("test", step, f=g.numpy())

    def _values(self, mean: Tensor) -> dict[str, Any]:
        return {
            "ntk/alignment": metrics.alignment(mean, self.y),
            "ntk/norm": mean.norm(),
            "ntk/trace": mean.trace(),
            "ntk/centered_alignment": metrics.centered_alignment(mean, self.y),
            "ntk/distance": metrics.kernel_distance(self.first, mean),
        }

    def _gap(self) -> dict[str, float]:
        states = TwoStates(AuditedModel(self.model), self.initial, memory=self.gap_memory)
        probe = states.gap(self.x)
        values = {
            "gap/probe": probe.value,
            "gap/probe_error": probe.stderr,
            "gap/change": float(probe.change.norm()) / math.sqrt(len(self.x)),
        }
        if self.test is not None:
            test = states.gap(self.test[0])
            values |= {"gap/test": test.value, "gap/test_error": test.stderr}
        return values

    def _layers(self) -> dict[str, float]:
        values = {}
        for (a, b), pair in fl.layer_alignment(self.model, self.x[:4]).items():
            values[f"layers/{a}--{b}/alignment"] = pair.value
            values[f"layers/{a}--{b}/random"] = pair.random
        for name, p in self.model.named_parameters():
            if p.requires_grad and p.dim() > 1:
                layer, weight = name.removesuffix(".weight"), p.detach().clone()
                begun = self.start.setdefault(layer, weight)
                values[f"weights/{layer}/norm"] = float(weight.norm())
                values[f"weights/{layer}/distance"] = float((weight - begun).norm() / begun.norm())
        now = dict(self.model.named_parameters())
        pairs = [(now[f"{layer}.weight"].detach(), begun) for layer, begun in self.start.items()]
        gone, size = (
            torch.stack([v.norm() for v in vs]).norm() for vs in ([a - b for a, b in pairs], [b for _, b in pairs])
        )
        values["weights/distance"] = float(gone / size)
        return values


def written(
    path: Path,
    steps: list[int],
    kernels: Tensor,
    outputs: Tensor,
    y: Tensor,
    *,
    lr: float | None = 1.0,
    loss: str | None = "sum-half",
    optimizer: dict[str, Any] | None = None,
    scalars: Mapping[str, list[float]] | None = None,
) -> Run:
    """A run from kernels (T, P, P), outputs (T, P, C) and targets (P, C) that come from a theory, in double."""
    writer = RunWriter(
        path,
        {
            "name": path.name,
            "loss_convention": loss,
            "optimizer": optimizer or {"class": "SGD", "groups": [{"lr": lr, "momentum": 0.0, "weight_decay": 0.0}]},
        },
    )
    writer.array("targets", 0, y=y.numpy())
    for i, step in enumerate(steps):
        writer.array("kernel", step, mean=kernels[i].numpy())
        writer.array("outputs", step, f=outputs[i].numpy())
        values = {
            "probe/loss": (outputs[i] - y).square().sum(1).mean(),
            "ntk/norm": kernels[i].norm(),
            "ntk/distance": metrics.kernel_distance(kernels[0], kernels[i]),
            "ntk/centered_alignment": metrics.centered_alignment(kernels[i], y),
            "ntk/alignment": metrics.alignment(kernels[i], y),
        }
        values |= {} if lr is None else {"lr": lr}
        values |= {name: numbers[i] for name, numbers in (scalars or {}).items()}
        writer.scalars(step, values)
    writer.close()
    return open_run(path)
