"""What a kernel costs when its samples are divided among several devices: a model, from shapes and rates alone.

P samples on R ranks. Per parameter the ranks exchange one of two things, chosen by the function that chooses when the
kernel is measured (`SharedKernel.sliced`):

- *ring*: factors of f numbers a sample travel to half of the ranks, P f / 2 numbers sent by each; a rank multiplies
  its own samples with those that visit it;
- *slices*: each rank gets 1 / R of the gradients' N entries of all samples, P N / R numbers sent by each, and one P x P
  kernel is summed over ranks at the end, P^2 numbers; each rank holds one meanwhile.

Forward and backward passes are divided. What a rank holds of all samples (factors, twice for the ring, or slices) must
fit into half of its memory; where it does not, parameters are taken in several groups, and the passes are made anew for
each. Nothing overlaps (a first exchange does, with the products of a rank's own samples). The rates are what large
products reach, not those of data sheets. None of this was run on several GPUs: take it for the order of magnitude, and
for which part is largest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from featlearn.errors import InputValueError
from featlearn.planning.exchange import SharedKernel, SharedParameter
from featlearn.planning.memory import readable_bytes, readable_seconds
from featlearn.planning.plan import ParameterGroup


@dataclass(frozen=True)
class Device:
    """What a device does in a second, and holds."""

    name: str
    float32: float
    """Operations (an addition or a multiplication) of large products, TF32 off."""
    bfloat16: float
    memory: float
    """Bytes."""
    near: float
    """Bytes a second that one device sends to others of its node."""
    far: float = 50e9
    """The same to other nodes."""
    node: int = 8
    """Devices in a node."""

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second in this precision; double precision at half the rate of single."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.bfloat16
        return self.float32 / 2 if dtype == torch.float64 else self.float32


DEVICES = {
    one.name: one
    for one in (
        Device("V100", 12e12, 60e12, 32e9, 150e9, 12.5e9),
        Device("A100", 15e12, 200e12, 80e9, 300e9, 25e9),
        Device("H100", 50e12, 400e12, 80e9, 450e9),
        Device("H200", 50e12, 400e12, 141e9, 450e9),
        Device("B200", 60e12, 900e12, 180e9, 900e9),
    )
}
"""Devices that are known by name."""


@dataclass(frozen=True)
class RankShare:
    """What one rank does for a parameter."""

    name: str
    exchange: str
    """`ring` or `slices`."""
    operations: float
    """Multiply-adds."""
    sent: float
    """Numbers."""
    held: float
    """Numbers."""


@dataclass(frozen=True, repr=False)
class RankCosts:
    """Compute, bytes moved and memory of one rank, and where the time goes; `str()` says it."""

    device: Device
    kernel: SharedKernel
    parameters: tuple[RankShare, ...]
    dtype: torch.dtype
    """Of the contraction."""
    network_dtype: torch.dtype
    sample_operations: float
    """Additions and multiplications of one sample's forward and backward passes."""
    weight_bytes: float

    @property
    def ranks(self) -> int:
        """R"""
        return self.kernel.ranks

    @property
    def samples(self) -> int:
        """P"""
        return self.kernel.samples[0]

    @property
    def summed_bytes(self) -> float:
        """Bytes of the kernels of all pairs of samples that are added up over ranks, where there are slices."""
        return self.kernel.held if any(p.exchange == "slices" for p in self.parameters) else 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends."""
        return sum(p.sent for p in self.parameters) * self.dtype.itemsize + self.summed_bytes

    @property
    def held_bytes(self) -> float:
        """Bytes that a rank would hold if all parameters were taken at once."""
        return sum(p.held for p in self.parameters) * self.dtype.itemsize

    @property
    def groups(self) -> int:
        """Groups of parameters, each with passes of its own, for what is held to fit into half of the memory."""
        return max(1, math.ceil(self.held_bytes / (self.device.memory / 2)))

    @property
    def memory(self) -> float:
        """Bytes of a rank: what is held of a group, its rows of the kernels, those that are added up, and the weights
        with copies of them."""
        rows = self.kernel.held / self.ranks
        return self.held_bytes / self.groups + rows + self.summed_bytes + self.weight_bytes

    @property
    def pass_seconds(self) -> float:
        """Forward and backward passes of all groups."""
        each = self.sample_operations * self.samples / self.ranks / self.device.rate(self.network_dtype)
        return self.groups * each

    @property
    def contraction_seconds(self) -> float:
        """Forming gradients and multiplying them."""
        return 2 * sum(p.operations for p in self.parameters) / self.device.rate(self.dtype)

    @property
    def exchange_seconds(self) -> float:
        """Sending to other ranks."""
        speed = self.device.near if self.ranks <= self.device.node else self.device.far
        return self.sent_bytes / speed

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.pass_seconds + self.contraction_seconds + self.exchange_seconds

    @property
    def fits(self) -> bool:
        """Whether the memory of a rank is enough."""
        return self.memory <= self.device.memory

    def __str__(self) -> str:
        ring = sum(p.exchange == "ring" for p in self.parameters)
        times = {
            "passes": self.pass_seconds,
            "contraction": self.contraction_seconds,
            "exchange": self.exchange_seconds,
        }
        share = ", ".join(f"{name} {readable_seconds(value)}" for name, value in times.items())
        room = "" if self.fits else f", more than the {readable_bytes(self.device.memory)} it has"
        return "\n".join(
            [
                f"on {self.ranks} {self.device.name} (a model that was not run on several GPUs): about "
                f"{readable_seconds(self.seconds)}: {share}",
                f"per rank: {-(-self.samples // self.ranks)} samples, {self.groups} sweep{'s' * (self.groups > 1)} "
                f"over them, {readable_bytes(self.sent_bytes)} sent, {readable_bytes(self.memory)} of memory{room}",
                f"exchange: factors around a ring for {ring} of {len(self.parameters)} parameters, slices of gradients "
                f"for {len(self.parameters) - ring}",
            ]
        )

    __repr__ = __str__


def rank_costs(
    parameters: Sequence[SharedParameter],
    kernel: SharedKernel,
    device: str | Device,
    *,
    sample_operations: float,
    weight_bytes: float = 0.0,
    dtype: torch.dtype = torch.float32,
    network_dtype: torch.dtype = torch.float32,
    groups: Sequence[ParameterGroup] = (),
) -> RankCosts:
    """The costs of a symmetric kernel; `groups`: of the plan of a rank, if there is one."""
    sliced = kernel.sliced(parameters, groups)
    shares = tuple(_share(one, kernel, one.name in sliced) for one in parameters)
    return RankCosts(checked_device(device), kernel, shares, dtype, network_dtype, sample_operations, weight_bytes)


def checked_ranks(ranks: int) -> int:
    """A number of devices."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputValueError(f"ranks={ranks!r}, expected a number of devices >= 1")
    return ranks


def checked_device(device: str | Device) -> Device:
    """A device, or that of a name."""
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise InputValueError(f"device={device!r}, expected one of {', '.join(DEVICES)}, or a Device with its rates")
    return DEVICES[device]


def _share(one: SharedParameter, kernel: SharedKernel, sliced: bool) -> RankShare:
    samples, _ = kernel.samples
    own = samples / kernel.ranks
    pairs = samples**2 / 2 / kernel.ranks  # of a symmetric kernel
    formed = one.positions * one.size
    if sliced:
        sent = samples * one.size / kernel.ranks
        return RankShare(one.name, "slices", own * formed + pairs * one.size, sent, sent)
    visiting = own * kernel.turns
    forming = own * formed + (0 if one.early else visiting * formed)
    operations = pairs * one.pair if one.pair is not None else forming + pairs * one.size
    return RankShare(one.name, "ring", operations, visiting * one.kept, 2 * own * one.kept)
