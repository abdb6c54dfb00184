"""Distributed training: rank 0 decides what is measured, the other ranks follow.

Clocks differ between ranks, and an error on rank 0 must reach the others. Decisions go through the key-value store of
`torch.distributed`. No collective is called, so nothing hangs if only rank 0 has a watch; but a model whose weights are
sharded is gathered by all ranks, each of which needs one.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch.distributed
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from featlearn.distributed.fsdp_internals import sharded_modules
from featlearn.distributed.sharded_model import whole_weights

KEPT = 100
"""Number of decisions kept in the store; no rank lags further behind."""

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
            store = _get_default_store()
            self._store = PrefixStore(f"featlearn/{name}/{_opened[name]}", store)

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
            found: bytes = self._store.get(key)
            return found.decode()
        decision = decide()
        self._store.set(key, decision)
        if self._decisions > KEPT:
            with suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(str(self._decisions - KEPT))
        return decision
