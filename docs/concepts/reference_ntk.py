"""Compute the tangent kernel of a network in four steps, as featlearn does. Read this file first.

featlearn adds rules for more ops, chunks of samples, checks and precision; the steps are the same.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


def reference_ntk(model: nn.Module, x: Tensor) -> Tensor:
    """Return K (P, P): K[i, j] = 1/C sum_c <df_c(x_i)/dtheta, df_c(x_j)/dtheta>."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outputs = model(x)  # 1. Run the model unchanged: (P, C).
    uses = uses_of_parameters(outputs.grad_fn, parameters)  # 2. Find the ops that use each parameter.
    kernel = outputs.new_zeros(len(x), len(x))
    for c in range(outputs.shape[1]):
        # 3. One backward pass per output, to the ops and not to the weights: no weight gradient is summed over samples.
        nodes = list(dict.fromkeys(node for places in uses.values() for node, _ in places))
        edges = [GradientEdge(node, 0) for node in nodes]
        at_ops = dict(zip(nodes, torch.autograd.grad(outputs[:, c].sum(), edges, retain_graph=True), strict=True))
        for name, p in parameters.items():
            kernel += contracted(p, uses[name], at_ops) if can_read(uses[name]) else fallback(model, x, c, p)
    return kernel / outputs.shape[1]


def uses_of_parameters(root: Node, parameters: dict[str, Tensor]) -> dict[str, list[tuple[Node, int]]]:
    """Walk the autograd graph; return each parameter's uses as (op, which of the op's inputs it is)."""
    names = {id(p): name for name, p in parameters.items()}
    uses, waiting, visited = defaultdict(list), [root], {root}
    while waiting:
        node = waiting.pop()
        for position, (below, _) in enumerate(node.next_functions):
            while below is not None and below.name() == "TBackward0":  # a transpose: the weight of nn.Linear
                below = below.next_functions[0][0]
            if below is None:
                continue
            if hasattr(below, "variable") and id(below.variable) in names:  # a leaf of the graph
                uses[names[id(below.variable)]].append((node, position))
            elif below not in visited:
                visited.add(below)
                waiting.append(below)
    return uses


def can_read(uses: list[tuple[Node, int]]) -> bool:
    """Return whether there is a rule: one use, in bias + rows @ weight (the node of nn.Linear on (P, features))."""
    return len(uses) == 1 and uses[0][0].name() == "AddmmBackward0"


def contracted(parameter: Tensor, uses: list[tuple[Node, int]], at_ops: dict[Node, Tensor]) -> Tensor:
    """4. Contract. The gradient of sample i is rows_i (x) grads_i, and is never formed."""
    (node, position), grads = uses[0], at_ops[uses[0][0]]
    if position == 0:  # the bias: its gradient is that of the op's output
        return grads @ grads.T
    rows = node._saved_mat1  # the op keeps its input for its own backward pass
    return (rows @ rows.T) * (grads @ grads.T)


def fallback(model: nn.Module, x: Tensor, c: int, parameter: Tensor) -> Tensor:
    """Return the kernel of any other parameter: one sample at a time, slow and always right."""
    grads = [torch.autograd.grad(model(x[i : i + 1])[0, c], parameter)[0].flatten() for i in range(len(x))]
    return torch.stack(grads) @ torch.stack(grads).T
