"""Several processes train one network: the first decides what is measured, the others follow.

Clocks differ, and a rank that measures alone may fail alone; the others must know. Decisions go through the key-value
store that `torch.distributed` already has: no collective is called, so nothing hangs where only rank 0 has a watch.
"""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

KEPT = 100
"""Decisions that stay in the store: no rank is further behind."""

_opened: Counter[str] = Counter()


class Ranks:
    """The processes that take part in a run; one, where nothing is distributed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.size = torch.distributed.get_world_size() if distributed else 1
        self.number = torch.distributed.get_rank() if distributed else 0
        self._decisions = 0
        self._store: Any = None
        if self.size > 1:
            name = os.fspath(path)
            _opened[name] += 1  # several runs in one process, one after the other
            store = _get_default_store()
            self._store = PrefixStore(f"featlearn/{name}/{_opened[name]}", store)

    @property
    def first(self) -> bool:
        """Whether this process measures and writes."""
        return self.number == 0

    def agreed(self, decide: Callable[[], str]) -> str:
        """What rank 0 decides; the others wait for it."""
        if self._store is None:
            return decide()
        self._decisions += 1
        key = str(self._decisions)
        if not self.first:
            found: bytes = self._store.get(key)
            return found.decode()
        decision = decide()
        self._store.set(key, decision)
        if self._decisions > KEPT:
            with suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(str(self._decisions - KEPT))
        return decision
