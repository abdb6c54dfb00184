"""Groups of ranks that measure together: division of samples, collective calls, and shared errors."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, RankError
from featlearn.network.fingerprint import fingerprint

T = TypeVar("T")
Error = TypeVar("Error", bound=BaseException)
# Largest buffer in bytes in which tensors are summed over ranks; many small messages are slower.
BUFFER = 8 * 2**20


class Expectation(NamedTuple):
    """Something that must be the same on every rank."""

    own: Callable[[], Any]
    """Value on this rank: a tensor, or an object with a complete `repr`."""
    refuse: Callable[[list[Any]], None]
    """Raise if the values of all ranks differ; not called if they are identical."""


class RankGroup:
    """Ranks of a process group; without a group, a single rank that sends nothing."""

    def __init__(self, group: Any = None) -> None:
        self.given = group is not None
        """Whether the caller passed a group, possibly of a single rank."""
        self.process_group = _process_group(group)
        self.size = 1 if self.process_group is None else dist.get_world_size(self.process_group)
        self.rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        if self.rank < 0:
            raise InputValueError("this rank is not in the group, expected calls from its members alone")
        self.settle: Callable[[], None] = lambda: None
        """Called before sending; other ranks may still need weights sharded over ranks."""

    def holds(self, other: "RankGroup") -> bool:
        """Return whether all ranks of another group are in this group."""
        ranks = [set(dist.get_process_group_ranks(group.process_group)) for group in (self, other)]
        return ranks[1] <= ranks[0]

    def share(self, samples: int, rank: int | None = None) -> slice:
        """Return the samples of a rank (by default this rank), divided as by torch.chunk and DTensor."""
        step = -(-samples // self.size)
        number = self.rank if rank is None else rank
        return slice(min(number * step, samples), min((number + 1) * step, samples))

    def shares(self, samples: int) -> list[slice]:
        """Return the samples of all ranks."""
        return [self.share(samples, rank) for rank in range(self.size)]

    def together(self) -> "Together":
        """Return a block of local work without communication; an error on one rank is raised on all ranks.

        No rank waits for a failed rank, and all ranks take part in the next call.
        """
        return Together(self)

    @contextmanager
    def entered(
        self, context: AbstractContextManager[T], expected: Callable[[T], Iterable[Expectation]] = lambda _: ()
    ) -> Iterator[T]:
        """Enter and leave a context on all ranks or none; `expected` values must agree on all ranks."""
        stack = ExitStack()
        try:
            with self.together() as block:
                value = stack.enter_context(context)
                if self.size > 1:
                    block.expect(*expected(value))
            yield value
        except BaseException as error:
            stack.__exit__(*sys.exc_info())
            if isinstance(error, Exception) and not _is_shared(error):
                with self.together():  # other ranks raise at the end of their next block
                    raise
            raise
        with self.together():
            stack.close()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        self.settle()
        flags = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(flags, group=self.process_group)
        return bool(flags.item())

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over all ranks in place, with identical results on every rank."""
        self._reduce(tensors, dist.ReduceOp.SUM)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number over all ranks."""
        maxima = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._reduce([maxima], dist.ReduceOp.MAX)
        return maxima.tolist()

    def gathered(self, thing: Any) -> list[Any]:
        """Gather small picklable objects from all ranks."""
        if self.size == 1:
            return [thing]
        self.settle()
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, thing, group=self.process_group)
        return objects

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather integers from all ranks, faster than `gathered`."""
        if self.size == 1:
            return [list(numbers)]
        self.settle()
        local = torch.tensor(numbers, device=self.device)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.process_group)
        rows: list[list[int]] = torch.stack(gathered).tolist()
        return rows

    def from_first(self, thing: Any) -> Any:
        """Return the object of rank 0."""
        return self.gathered(thing if self.rank == 0 else None)[0]

    @property
    def device(self) -> torch.device:
        """Device from which tensors can be sent."""
        assert self.process_group is not None
        if "cpu" in str(dist.get_backend_config(self.process_group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _reduce(self, tensors: Iterable[Tensor], operation: Any) -> None:
        if self.size == 1:
            return
        self.settle()
        for batch in _buffers([torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]):
            sent = batch[0] if len(batch) == 1 else torch.cat([tensor.reshape(-1) for tensor in batch])
            if not (sent.is_contiguous() and self.sends_from(sent.device)):
                sent = sent.to(self.device).contiguous()
            dist.all_reduce(sent, operation, group=self.process_group)
            if sent is not batch[0]:
                parts = sent.reshape(-1).split([tensor.numel() for tensor in batch])
                for tensor, part in zip(batch, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def sends_from(self, device: torch.device) -> bool:
        """Return whether tensors can be sent from this device; gloo only sends from main memory, and crashes
        otherwise."""
        return sendable(device.type, str(dist.get_backend_config(self.process_group)))


def _buffers(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group consecutive tensors of equal dtype and device, up to `BUFFER` bytes."""
    batches: list[list[Tensor]] = []
    for tensor in tensors:
        last = batches[-1] if batches else []
        same_kind = all((other.dtype, other.device) == (tensor.dtype, tensor.device) for other in last)
        if last and same_kind and sum(other.nbytes for other in last) + tensor.nbytes <= BUFFER:
            last.append(tensor)
        else:
            batches.append([tensor])
    return batches


def digest(thing: Any) -> int:
    """Return a signed 64-bit hash of the `repr` of an object, or of the bits of a tensor."""
    if isinstance(thing, Tensor):
        thing = (tuple(thing.shape), str(thing.dtype), int(fingerprint(thing)))
    return int.from_bytes(blake2b(repr(thing).encode(), digest_size=8).digest(), "big", signed=True)


def sendable(kind: str, backends: str) -> bool:
    """Return whether tensors on this device type can be sent by backends such as "cpu:gloo,cuda:nccl"."""
    backend_by_device = dict(entry.split(":") for entry in backends.split(",") if ":" in entry)
    return kind in backend_by_device and (kind == "cpu" or backend_by_device[kind] != "gloo")


class Together:
    """Block of local work that ends together on all ranks; see `RankGroup.together`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._expected: list[tuple[Any, Expectation]] = []

    def __enter__(self) -> "Together":
        return self

    def expect(self, *expected: Expectation) -> None:
        """Require values to agree on all ranks, compared at the end of the block together with errors."""
        if self._group.size > 1:
            self._expected += [(expectation.own(), expectation) for expectation in expected]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._group.size > 1:
            values = [thing for thing, _ in self._expected]
            reports = self._group.numbers([int(error is not None), digest([digest(thing) for thing in values])])
            if any(failed for failed, _ in reports):
                self._raise_together(error)
            elif any(value_digest != reports[0][1] for _, value_digest in reports):
                self._compare(values)
        return False

    def _compare(self, values: list[Any]) -> None:
        """Raise on every rank if values differ."""
        reports = self._group.gathered(values)
        try:
            if any(len(report) != len(values) for report in reports):
                raise InputValueError(
                    "ranks of the group make different calls, expected the same calls in the same order on every rank"
                )
            for index, (_, expectation) in enumerate(self._expected):
                expectation.refuse([report[index] for report in reports])
        except Exception as error:
            _mark_shared(error)
            raise

    def _raise_together(self, error: BaseException | None) -> None:
        """Raise the error of another rank, unless this rank is raising."""
        if error is not None:
            _mark_shared(error)
        reports = self._group.gathered(None if error is None else (type(error).__name__, str(error)))
        rank, (name, text) = next((rank, report) for rank, report in enumerate(reports) if report is not None)
        is_memory_error = name == MemoryBudgetError.__name__  # the budget, and so the message, is common to all ranks
        if is_memory_error and rank != self._group.rank and (error is None or isinstance(error, MemoryBudgetError)):
            raise _mark_shared(MemoryBudgetError(text)) from error
        if error is None:
            raise _mark_shared(RankError(f"rank {rank} of the group could not measure its samples: {name}: {text}"))


def _mark_shared(error: Error) -> Error:
    """Mark an error as known to all ranks."""
    error.__dict__["known_to_all_ranks"] = True
    return error


def _is_shared(error: BaseException | None) -> bool:
    """Return whether an error, or one in its context, is known to all ranks."""
    while error is not None:
        if error.__dict__.get("known_to_all_ranks"):
            return True
        error = error.__context__
    return False


def _process_group(group: Any) -> Any:
    """Return the requested process group."""
    if group is None:
        return None
    if not dist.is_available():
        raise InputValueError("group= needs torch.distributed, which this build of torch does not have; omit group=")
    if isinstance(group, str):
        if group != "world":
            raise InputValueError(f"group={group!r}, expected 'world', a torch.distributed.ProcessGroup or None")
        if not dist.is_initialized():
            raise InputValueError(
                "group='world' without an initialized process group; start with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputValueError("this rank is not in the group, expected calls from its members alone")
    if not isinstance(group, dist.ProcessGroup):
        raise InputTypeError(
            f"group is {type(group).__name__}, expected 'world', a torch.distributed.ProcessGroup or None; "
            "for a DeviceMesh, pass mesh.get_group()"
        )
    return group
