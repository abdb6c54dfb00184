"""Messages along the edges of a graph, in the ways in which libraries write them: exact, and proved by their ops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_ntk


def expanded(index: Tensor, like: Tensor) -> Tensor:
    return index[None, :, None].expand(len(like), -1, like.shape[2])


PassAlong = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of node features (P, nodes, width), and the sources and targets of edges."""

WAYS: dict[str, PassAlong] = {
    "index_add": lambda h, s, t: torch.zeros_like(h).index_add(1, t, h.index_select(1, s)),
    "index_add_": lambda h, s, t: torch.zeros_like(h).index_add_(1, t, h[:, s], alpha=0.5),
    "scatter_add": lambda h, s, t: torch.zeros_like(h).scatter_add(1, expanded(t, h), h.gather(1, expanded(s, h))),
    "new_zeros.scatter_add_": lambda h, s, t: h.new_zeros(h.shape).scatter_add_(1, expanded(t, h), h[:, s]),
    "scatter": lambda h, s, t: h.scatter(1, expanded(t[:4], h), 2 * h[:, :4]),
}


class Messages(nn.Module):
    def __init__(self, pass_along: PassAlong) -> None:
        super().__init__()
        self.pass_along = pass_along
        self.register_buffer("sources", torch.tensor([0, 3, 1, 1, 2, 4, 0]))
        self.register_buffer("targets", torch.tensor([1, 0, 2, 4, 4, 3, 3]))
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h) + self.pass_along(h, self.sources, self.targets))
        return self.head(torch.tanh(self.pass_along(h, self.sources, self.targets))).mean(1)


@pytest.mark.parametrize("way", WAYS)
def test_messages_between_nodes(way: str):
    torch.manual_seed(0)
    model, x = Messages(WAYS[way]).double(), torch.randn(11, 5, 3, dtype=torch.float64)
    session = fl.Session(model, x)
    reference = dense_ntk(model, x)
    for kernel in (session.ntk(verify=True), session.ntk()):
        torch.testing.assert_close(kernel, reference, rtol=1e-12, atol=1e-13)
    plan = str(session.plan())
    assert "1 forward pass of 11 samples" in plan
    assert "checked by its ops" in plan


def test_edges_that_reach_other_samples_are_refused():
    def to_the_next(h: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        nodes = h.flatten(0, 1)
        others = (torch.arange(len(nodes)) + h.shape[1]) % len(nodes)
        return torch.zeros_like(nodes).index_add(0, others, nodes).view_as(h)

    with pytest.raises(fl.FeatlearnError, match="other samples"):
        fl.ntk(Messages(to_the_next).double(), torch.randn(11, 5, 3, dtype=torch.float64))
