"""The model of kernels on several devices for networks that are too large to be run here, from their shapes.

    python benchmarks/rank_costs.py

Four cases that were estimated on paper before, beside the model: H100s at 50 TFLOP/s in float32 and 400 in bfloat16,
450 GB/s within a node of 8 and 50 across. Nothing is run. The model is within a factor of 1.7 of the paper: lower for
GPT-2, where the paper has passes of 22 s each and this 12.6 (no gradients of weights are computed), higher for 7B,
where the paper multiplies in bfloat16.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from featlearn.planning.exchange import SharedKernel, SharedParameter
from featlearn.planning.rank_costs import DEVICES, RankCosts, rank_costs


@dataclass(frozen=True)
class Case:
    name: str
    matrices: tuple[tuple[int, int, int], ...]
    """(positions, n, m) of every weight; a sample's forward pass takes 2 positions n m operations in each."""
    samples: int
    ranks: int
    paper: float
    """Seconds on paper."""
    dtype: torch.dtype = torch.float32


def transformer(layers: int, width: int, hidden: int, vocabulary: int, tokens: int, gates: int = 1):
    """Attention and feed-forward matrices, and a readout; the embedding's own use is left out."""
    block = [
        (tokens, width, 3 * width),
        (tokens, width, width),
        *[(tokens, width, hidden)] * gates,
        (tokens, hidden, width),
    ]
    return tuple(block * layers + [(tokens, width, vocabulary)])


def resnet50() -> Iterator[tuple[int, int, int]]:
    """Convolutions as (positions, channels times area of the kernel, output channels), 224 pixels."""
    yield 112**2, 3 * 49, 64
    before = 64
    for count, middle, side in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for number in range(count):
            yield side**2, before, middle
            yield side**2, middle * 9, middle
            yield side**2, middle, 4 * middle
            if number == 0:
                yield side**2, before, 4 * middle
            before = 4 * middle
    yield 1, 2048, 1000


CASES = (
    Case("GPT-2, 10,000 x 1024 tokens", transformer(12, 768, 3072, 50257, 1024), 10_000, 8, 383),
    Case("7B, 256 x 2048 tokens, bfloat16", transformer(32, 4096, 11008, 32000, 2048, 2), 256, 64, 5, torch.bfloat16),
    Case("ResNet-50, 50,000 images", tuple(resnet50()), 50_000, 16, 97),
    Case("1B, 10,000 x 1024 tokens", transformer(24, 1792, 7168, 50257, 1024), 10_000, 64, 297),
)


def costs(case: Case) -> RankCosts:
    """The model of a case."""
    parameters = [SharedParameter(f"weight {i}", n * m, t * (n + m), t) for i, (t, n, m) in enumerate(case.matrices)]
    forward = sum(2 * math.prod(one) for one in case.matrices)
    # Gradients are sent and multiplied in float32, whatever the precision of the network.
    samples, device = case.samples, DEVICES["H100"]
    kernel = SharedKernel(case.ranks, (samples, samples), True, samples**2, 1, 4, device.memory / 2)
    return rank_costs(
        parameters,
        kernel,
        device,
        sample_operations=2 * forward,
        weight_bytes=sum(n * m for _, n, m in case.matrices) * case.dtype.itemsize,
        network_dtype=case.dtype,
    )


def main() -> None:
    """Print the table."""
    for case in CASES:
        found = costs(case)
        size = sum(n * m for _, n, m in case.matrices)
        print(f"{case.name} ({size / 1e6:.0f} M parameters): {found.seconds:.1f} s, on paper {case.paper} s")
        print(f"  {found}".replace("\n", "\n  "))


if __name__ == "__main__":
    main()
