"""The ranks that measure together: who has which samples, what all of them know, and what they add up."""

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
# Tensors are summed over ranks in buffers of up to this many bytes: many small messages take longer than one.
BUFFER = 8 * 2**20


class Expectation(NamedTuple):
    """Something that must be the same on every rank."""

    own: Callable[[], Any]
    """What this rank has: a tensor, or something that `repr` tells in full."""
    refuse: Callable[[list[Any]], None]
    """Raises where what all ranks have is not the same; not asked where it is equal to the bit."""


class RankGroup:
    """The ranks of a process group; without a group this process alone, for which nothing is divided or sent."""

    def __init__(self, group: Any = None) -> None:
        self.given = group is not None
        """Whether the caller has asked for a group; it may have one rank."""
        self.process_group = _process_group(group)
        self.size = 1 if self.process_group is None else dist.get_world_size(self.process_group)
        self.rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        if self.rank < 0:
            raise InputValueError("this rank is not in the group, expected calls from its members alone")
        self.settle: Callable[[], None] = lambda: None
        """What a rank does before it sends anything: passes of others may need weights that are spread over ranks."""

    def holds(self, other: "RankGroup") -> bool:
        """Whether all ranks of another group are in this one."""
        ranks = [set(dist.get_process_group_ranks(group.process_group)) for group in (self, other)]
        return ranks[1] <= ranks[0]

    def share(self, samples: int, rank: int | None = None) -> slice:
        """The samples of a rank, this one by default, divided as torch.chunk and DTensor divide them."""
        step = -(-samples // self.size)
        number = self.rank if rank is None else rank
        return slice(min(number * step, samples), min((number + 1) * step, samples))

    def shares(self, samples: int) -> list[slice]:
        """The samples of all ranks."""
        return [self.share(samples, rank) for rank in range(self.size)]

    def together(self) -> "Together":
        """A block that every rank runs for itself, without sending anything; what one raises, all raise.

        No rank waits for one that is gone, and the next call finds all of them.
        """
        return Together(self)

    @contextmanager
    def entered(
        self, context: AbstractContextManager[T], expected: Callable[[T], Iterable[Expectation]] = lambda _: ()
    ) -> Iterator[T]:
        """A context that every rank enters and leaves, or none; `expected`: what must be the same in it everywhere."""
        stack = ExitStack()
        try:
            with self.together() as block:
                found = stack.enter_context(context)
                if self.size > 1:
                    block.expect(*expected(found))
            yield found
        except BaseException as error:
            stack.__exit__(*sys.exc_info())
            if isinstance(error, Exception) and not _is_told(error):
                with self.together():  # the others learn of it at the end of their next block
                    raise
            raise
        with self.together():
            stack.close()

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        if self.size == 1:
            return flag
        self.settle()
        found = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(found, group=self.process_group)
        return bool(found.item())

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum over all ranks, in place; the same bits on every rank."""
        self._reduce(tensors, dist.ReduceOp.SUM)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number on any rank."""
        found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._reduce([found], dist.ReduceOp.MAX)
        return found.tolist()

    def gathered(self, thing: Any) -> list[Any]:
        """What every rank has, of small things that can be pickled."""
        if self.size == 1:
            return [thing]
        self.settle()
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, group=self.process_group)
        return found

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Some numbers of every rank; quicker than `gathered`."""
        if self.size == 1:
            return [list(numbers)]
        self.settle()
        own = torch.tensor(numbers, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.process_group)
        said: list[list[int]] = torch.stack(found).tolist()
        return said

    def from_first(self, thing: Any) -> Any:
        """What rank 0 of the group has."""
        return self.gathered(thing if self.rank == 0 else None)[0]

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent."""
        assert self.process_group is not None
        if "cpu" in str(dist.get_backend_config(self.process_group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _reduce(self, tensors: Iterable[Tensor], operation: Any) -> None:
        if self.size == 1:
            return
        self.settle()
        for some in _buffers([torch.view_as_real(one) if one.is_complex() else one for one in tensors]):
            sent = some[0] if len(some) == 1 else torch.cat([one.reshape(-1) for one in some])
            if not (sent.is_contiguous() and self.sends_from(sent.device)):
                sent = sent.to(self.device).contiguous()
            dist.all_reduce(sent, operation, group=self.process_group)
            if sent is not some[0]:
                parts = sent.reshape(-1).split([one.numel() for one in some])
                for tensor, part in zip(some, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def sends_from(self, device: torch.device) -> bool:
        """Whether tensors on this device can be sent as they are; gloo sends from main memory alone, or crashes."""
        return sendable(device.type, str(dist.get_backend_config(self.process_group)))


def _buffers(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that are sent together: one after the other, of one type and device, up to `BUFFER` bytes."""
    found: list[list[Tensor]] = []
    for tensor in tensors:
        last = found[-1] if found else []
        alike = all((one.dtype, one.device) == (tensor.dtype, tensor.device) for one in last)
        if last and alike and sum(one.nbytes for one in last) + tensor.nbytes <= BUFFER:
            last.append(tensor)
        else:
            found.append([tensor])
    return found


def digest(thing: Any) -> int:
    """A number that is the same where `repr` says the same, or a tensor has the same bits; 64 bits with their sign."""
    if isinstance(thing, Tensor):
        thing = (tuple(thing.shape), str(thing.dtype), int(fingerprint(thing)))
    return int.from_bytes(blake2b(repr(thing).encode(), digest_size=8).digest(), "big", signed=True)


def sendable(kind: str, backends: str) -> bool:
    """Whether tensors of this kind of device can be sent by backends such as "cpu:gloo,cuda:nccl"."""
    named = dict(one.split(":") for one in backends.split(",") if ":" in one)
    return kind in named and (kind == "cpu" or named[kind] != "gloo")


class Together:
    """A block of local work with one end on all ranks: see `RankGroup.together`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._expected: list[tuple[Any, Expectation]] = []

    def __enter__(self) -> "Together":
        return self

    def expect(self, *expected: Expectation) -> None:
        """What must be the same on every rank: compared at the end of the block, in one exchange with its errors."""
        if self._group.size > 1:
            self._expected += [(one.own(), one) for one in expected]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._group.size > 1:
            own = [thing for thing, _ in self._expected]
            told = self._group.numbers([int(error is not None), digest([digest(thing) for thing in own])])
            if any(failed for failed, _ in told):
                self._raise_together(error)
            elif any(number != told[0][1] for _, number in told):
                self._compare(own)
        return False

    def _compare(self, own: list[Any]) -> None:
        """Refuse what differs, on every rank."""
        said = self._group.gathered(own)
        try:
            if any(len(theirs) != len(own) for theirs in said):
                raise InputValueError(
                    "ranks of the group make different calls, expected the same calls in the same order on every rank"
                )
            for place, (_, one) in enumerate(self._expected):
                one.refuse([theirs[place] for theirs in said])
        except Exception as error:
            _tell(error)
            raise

    def _raise_together(self, error: BaseException | None) -> None:
        """What some rank has raised, unless this one is raising already."""
        if error is not None:
            _tell(error)
        said = self._group.gathered(None if error is None else (type(error).__name__, str(error)))
        rank, (name, text) = next((rank, told) for rank, told in enumerate(said) if told is not None)
        short = name == MemoryBudgetError.__name__  # the budget is everybody's, and so is the message
        if short and rank != self._group.rank and (error is None or isinstance(error, MemoryBudgetError)):
            raise _tell(MemoryBudgetError(text)) from error
        if error is None:
            raise _tell(RankError(f"rank {rank} of the group could not measure its samples: {name}: {text}"))


def _tell(error: Error) -> Error:
    """Mark an error that all ranks know of."""
    error.__dict__["known_to_all_ranks"] = True
    return error


def _is_told(error: BaseException | None) -> bool:
    """Whether all ranks know of an error, or of one that led to it."""
    while error is not None:
        if error.__dict__.get("known_to_all_ranks"):
            return True
        error = error.__context__
    return False


def _process_group(group: Any) -> Any:
    """The process group that was asked for."""
    if group is None:
        return None
    if not dist.is_available():
        raise InputValueError("group= needs torch.distributed, which this build of torch lacks; leave group= out")
    if isinstance(group, str):
        if group != "world":
            raise InputValueError(f"group={group!r}, expected 'world', a torch.distributed.ProcessGroup or None")
        if not dist.is_initialized():
            raise InputValueError(
                "group='world' and no process group is initialized, expected one; start with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputValueError("this rank is not in the group, expected calls from its members alone")
    if not isinstance(group, dist.ProcessGroup):
        raise InputTypeError(
            f"group is {type(group).__name__}, expected 'world', a torch.distributed.ProcessGroup or None; "
            "of a DeviceMesh pass mesh.get_group()"
        )
    return group
