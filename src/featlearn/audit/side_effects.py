"""Refuse models that draw random numbers or rewrite weights in a forward pass, and copies that reach other weights.

Every pass of a measurement starts from the same state of the random generators. A model that draws weights or masks in
eval mode would be measured for one draw, silently.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from featlearn.audit.audit import AUDITED
from featlearn.errors import UnsupportedModelError
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import backward_to, build_graph
from featlearn.network.inputs import ModelWithInputs
from featlearn.network.isolation import RandomState
from featlearn.network.state import KeptState

if TYPE_CHECKING:
    from featlearn.network.copies import StoredResult

SEEDS = range(1, 9)
"""Other states of the generators. A layer that is dropped now and then may stay in many of them."""

Groups = Sequence[Sequence[Tensor]]
"""Tensors by groups. A change counts relative to the largest entry of its group."""


def refuse_random_outputs(
    batches: Sequence[ModelWithInputs], random_state: RandomState, measure: Callable[[ModelWithInputs], Groups]
) -> None:
    """Raise if what is measured on a few samples changes with the random numbers that the model draws."""
    for batch in batches:
        few = min(AUDITED, batch.samples)
        sample = replace(batch, x=batch.take(slice(0, few)), samples=few, waiting=True)
        expected = measure(sample)
        for seed in SEEDS:
            changed = _change(measure(replace(sample, rewind=partial(_reseed, batch, random_state, seed))), expected)
            # The same random numbers may give other rounding on a GPU.
            if changed > 0.0 and changed > _precision(expected) + 10 * _change(measure(sample), expected):
                by = "altogether" if changed == math.inf else f"by {changed:.1e} of their largest value"
                from featlearn.audit.coupling_cause import random_advice  # late: few models need it

                raise UnsupportedModelError(
                    f"the model draws random numbers in eval mode: other ones change its outputs or gradients {by}, "
                    f"expected outputs that x and the weights determine. {random_advice(sample, slice(0, few))}. "
                    "Switch dropout off in eval mode: F.dropout(..., training=self.training). To measure one draw, "
                    "draw it once into a buffer, or call torch.manual_seed(0) at the beginning of forward"
                )


def outputs_and_gradients(batch: ModelWithInputs, parameters: Mapping[str, Tensor]) -> Groups:
    """Return outputs, and the gradients of a fixed sum of them: the outputs may be zero whatever is drawn."""
    outputs = batch.outputs(slice(0, batch.samples))
    if not outputs.requires_grad:
        return [[outputs]]
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    gradients = backward_to(outputs, [], parameters, weights)[1].values()
    return [[outputs.detach()], [gradient.detach() for gradient in gradients if gradient is not None]]


def _reseed(batch: ModelWithInputs, random_state: RandomState, seed: int) -> None:
    batch.rewind()
    random_state.seed(seed)


def _change(groups: Groups, expected: Groups) -> float:
    if [[a.shape for a in group] for group in groups] != [[b.shape for b in group] for group in expected]:
        return math.inf
    return max(_relative_gap(group, reference) for group, reference in zip(groups, expected, strict=True))


def _relative_gap(group: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(group, reference, strict=True) if a.numel()]
    gap = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return gap / (max((float(b.abs().max()) for _, b in pairs), default=0.0) or 1.0)


def _precision(expected: Groups) -> float:
    return 64 * max(torch.finfo(tensor.dtype).eps for group in expected for tensor in group)


def refuse_rewriting(model: nn.Module, before: Mapping[str, Tensor], state: KeptState) -> None:
    """Raise if a forward pass has set weights (max_norm, initialization from data) or made new ones."""
    after, rewritten = dict(model.named_parameters()), state.rewritten()
    changed = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    changed = changed or [name for name, parameter in before.items() if id(parameter) in rewritten]
    if changed:
        raise UnsupportedModelError(
            f"a forward pass in eval mode rewrites {', '.join(changed[:5])}, expected a model that only reads its "
            "weights; run it once on a batch of your own if it initializes itself from data"
        )


def refuse_foreign_weights(originals: Mapping[str, Tensor], results: Sequence["StoredResult"], example: Chunk) -> None:
    """Raise if a copy of a model depends on the weights of the original: by stored results, or by a closure."""
    reached = example.graph.variables if example.graph is not None else frozenset()
    for result in results:
        names = list(build_graph(result.original, originals).leaves) if id(result.leaf) in reached else []
        if names:
            raise UnsupportedModelError(
                f"{', '.join(names[:5])} act through a tensor that the model computed once and keeps, which a copy in "
                "another precision cannot follow; reset the model's state, or convert the model itself, "
                "model.double(), and measure that"
            )
    copied = {id(p) for p in example.parameters.values()}
    if reached & ({id(p) for p in originals.values()} - copied):
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be measured in another precision; convert the model itself, model.double(), and measure that"
        )
