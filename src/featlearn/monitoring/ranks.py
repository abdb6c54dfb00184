"""Distributed training: rank 0 decides what is measured, the other ranks follow.

Clocks differ between ranks, and an error on rank 0 must reach the others. Decisions go through the key-value store of
`torch.distributed`. Ranks measure together only where rank 0 has seen that all of them wait for its decision, so that
nothing hangs if only rank 0 has a watch; but a model whose weights are sharded is gathered by all ranks, each of which
needs one.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import nn

from featlearn.distributed.sharded_model import whole_weights
from featlearn.torch_internals.sharding import collective_timeout, default_store, sharded_modules

KEPT = 100
"""Number of decisions kept in the store; no rank lags further behind."""
PATIENCE = 10.0
"""Seconds for which ranks wait for each other before rank 0 measures alone."""

_opened: Counter[str] = Counter()


@contextmanager
def gathered_weights(model: nn.Module, *, needed: bool = True) -> Iterator[bool]:
    """Weights gathered from all ranks, where they are sharded and it is `needed`; gives whether they are whole."""
    whole = needed or not sharded_modules(model)
    with whole_weights(model) if whole else nullcontext():
        yield whole


class Ranks:
    """The processes of a run; a single one without `torch.distributed`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.size = torch.distributed.get_world_size() if distributed else 1
        self.number = torch.distributed.get_rank() if distributed else 0
        self._decisions = 0
        self._store: Any = None
        if self.size > 1:
            name = os.fspath(path)
            _opened[name] += 1  # a process may watch several runs, one after the other
            self._store = default_store(f"featlearn/{name}/{_opened[name]}")
            if self.number:
                self._store.add("watches", 1)

    @property
    def first(self) -> bool:
        """Whether this process measures and writes."""
        return self.number == 0

    def agreed(self, decide: Callable[[], str]) -> str:
        """The decision of rank 0, for which the others wait."""
        if self._store is None:
            return decide()
        self._decisions += 1
        key = str(self._decisions)
        if not self.first:
            self._store.add(f"{key} here", 1)
            found: bytes = self._store.get(key)
            return found.decode()
        decision = decide()
        self._store.set(key, decision)
        if self._decisions > KEPT:
            with suppress(RuntimeError, NotImplementedError):
                for old in (str(self._decisions - KEPT), f"{self._decisions - KEPT} here"):
                    self._store.delete_key(old)
        return decision

    @property
    def all_watch(self) -> bool:
        """Whether all other ranks have a watch of this run by now."""
        return self._counted("watches")

    def all_here(self) -> bool:
        """On rank 0, while it decides: whether all others wait for this decision, some seconds from now at most."""
        return self._until(lambda: self._counted(f"{self._decisions} here"))

    def all_at_end(self, together: bool) -> bool:
        """Whether all ranks are at the end of the run and wait for each other, for some seconds at most.

        `together`: whether this rank wants it; rank 0 decides for all. They may have made different numbers of steps.
        """
        try:
            if together and not self.first:
                self._store.add("end here", 1)
            if together:
                self._until(lambda: self._store.check(["end"]) or (self.first and self._counted("end here")))
            agrees = self.first and together and self._counted("end here")
            # Whoever comes first is believed by all: one who ends with an error or has waited long enough, or rank 0.
            return bool(self._store.compare_set("end", "", "together" if agrees else "alone") == b"together")
        except RuntimeError:  # the process that held the store is gone
            return False

    @property
    def timeout(self) -> timedelta | None:
        """How long collectives of the default group wait; None where it does not say."""
        for device in ("cuda", "cpu"):
            with suppress(RuntimeError, AttributeError):
                return collective_timeout(device)
        return None

    def _counted(self, key: str) -> bool:
        """Whether all ranks but this one have said so."""
        return bool(self._store.add(key, 0) >= self.size - 1)

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Whether something is so, some seconds from now at most."""
        end = time.monotonic() + PATIENCE
        while not (found := condition()) and time.monotonic() < end:
            time.sleep(0.002)
        return found
