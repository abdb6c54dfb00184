"""Sweeps over a stream of samples: what products and columns of a kernel are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.distributed.group import RankGroup
from featlearn.kernel.jacobian_products import JvpMethod, add_pulled_back, inner_products, no_tangents
from featlearn.kernel.stream import SampleStream
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs, ModelWithInputs
from featlearn.planning.memory import byte_budget
from featlearn.planning.plan import ProgressLine, Rate


@dataclass(frozen=True)
class Sweeps:
    """A measurement under way over a stream of samples."""

    measurement: Measurement
    stream: SampleStream
    rates: dict[str, Rate]
    audited: AuditedModel

    @property
    def ranks(self) -> RankGroup:
        """Ranks that have a share of every chunk of samples."""
        return self.audited.request.group

    @property
    def budget(self) -> int:
        """Byte budget of the measurement."""
        return byte_budget(self.audited.request.memory, self.measurement.device)

    def batches(self, size: int, wanted: Tensor | None = None) -> Iterator[tuple[ModelWithInputs, Tensor]]:
        """The network on this rank's share of chunk after chunk, up to `size` samples, and the places of these."""
        for x, places in self.stream.chunks(size * self.ranks.size, wanted, self.ranks.share):
            yield self.batch(x, len(places)), places

    def batch(self, x: Inputs, samples: int) -> ModelWithInputs:
        """The network on these inputs."""
        return replace(self.measurement.batches[0], x=self.audited.paired(x), samples=samples, name="data")

    def chunk(self, graphs: float, held: int = 0) -> int:
        """Return how many samples fit, each with this many graphs of a forward pass, beside vectors of parameters."""
        example = self.measurement.example()
        graph = example.graph.structure.output_bytes / len(example.indices) if example.graph else 1.0
        weights = sum(p.numel() * p.element_size() for p in self.measurement.parameters.values())
        fitting = (self.budget - (held + 3) * weights) / (graphs * graph + 1)
        # On a CPU larger chunks are no faster, on a GPU small ones leave it idle.
        most = 1024 if self.measurement.device.type == "cuda" else 128
        return int(max(1, min(most, fitting)))

    def block(self, count: int) -> int:
        """Return how many of `count` vectors of parameters are held at a time, in a quarter of the memory."""
        size = sum(p.numel() * max(p.element_size(), 4) for p in self.measurement.parameters.values())
        return int(max(1, min(count, self.budget // (4 * size))))

    def pulled_back(self, v: Tensor, progress: ProgressLine | None = None) -> dict[str, Tensor]:
        """J^T v for v of shape (m, P, C); samples whose rows are zero are passed over."""
        with self.ranks.together():
            totals = no_tangents(self.measurement, len(v))
            used = (v != 0).any(2).any(0).cpu().nonzero().flatten()
            for batch, places in self.batches(self.chunk(3.0, 2 * len(v)), used):
                add_pulled_back(totals, self.measurement, batch, v[:, places.to(v.device)])
                if progress is not None:
                    progress.advance()
        self.ranks.add_up(totals.values())
        return totals

    def weighted(self, tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the optimizer's rates."""
        rates = {name: self.rates.get(name, 1.0) for name in tangents}
        return {
            name: u * (rate.to(u) if isinstance(rate, Tensor) else rate)
            for (name, u), rate in zip(tangents.items(), rates.values(), strict=True)
        }

    def quadratic(self, v: Tensor, progress: ProgressLine | None = None) -> Tensor:
        """(m,) v^T K v = |J^T v|^2 with the rates inside, float64."""
        pulled = self.pulled_back(v, progress)
        total = torch.zeros(len(v), dtype=torch.float64, device=v.device)
        for u, weighted in zip(pulled.values(), self.weighted(pulled).values(), strict=True):
            total += inner_products(u, weighted).to(total.device)
        return total

    def product(self, v: Tensor, method: JvpMethod) -> Tensor:
        """K v for v of shape (m, P, C)."""
        count, dtype = len(v), self.measurement.dtype
        result = torch.zeros(v.shape, dtype=dtype, device=self.measurement.device)
        step = self.block(count)
        size = self.chunk(10.0, 3 * step)
        own = -(-self.stream.samples // self.ranks.size)
        with ProgressLine("kernel products", -(-count // step) * -(-own // size)) as progress:
            for begin in range(0, count, step):
                block = slice(begin, begin + step)
                tangents = self.weighted(self.pulled_back(v[block]))
                with self.ranks.together():
                    for batch, places in self.batches(size):
                        pushed = method(self.measurement, batch, tangents)
                        result[block, places.to(result.device)] = pushed.detach().to(dtype)
                        progress.advance()
        self.ranks.add_up([result])  # every rank has filled its own rows
        return result
