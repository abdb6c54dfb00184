"""Audits that were made: kept while their network lives, and used again where its graph is the same.

The audit asks whether the graph is read rightly, which follows from its nodes and shapes. What may change with the
weights or with the samples is asked again of every chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn

from featlearn.capture.graph import Graph, Signature
from featlearn.capture.uses import Pattern
from featlearn.ops import is_built_in


@dataclass(frozen=True)
class Remembered:
    """What the audit of a graph has found."""

    pattern: Pattern | None
    distrusted: Mapping[str, str]
    rounding: float = 0.0
    """How large the terms of the outputs were, which is not taken over: the weights may have become smaller."""


# Probes of a few shapes, in a few precisions.
_MOST = 8
_audits: WeakKeyDictionary[nn.Module, dict[Signature, Remembered]] = WeakKeyDictionary()


def recalled(model: nn.Module, graph: Graph) -> Remembered | None:
    """The audit of a graph like this one, if there was one."""
    return _audits.get(model, {}).get(graph.signature) if _lasting(graph) else None


def remember(model: nn.Module, graph: Graph, audit: Remembered) -> None:
    """Keep what was found."""
    if _lasting(graph):
        kept = _audits.setdefault(model, {})
        kept[graph.signature] = replace(audit, rounding=0.0)
        while len(kept) > _MOST:
            del kept[next(iter(kept))]


def _lasting(graph: Graph) -> bool:
    """Rules of the user's own may be replaced at any time."""
    return all(map(is_built_in, graph.node_names))
