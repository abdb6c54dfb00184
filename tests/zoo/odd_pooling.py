"""Samples of unequal length, packed into one list of rows, and pooled back in many ways.

The inputs stay batch first: padded nodes (P, 4, d) and a count for each sample. Most graphs have 3 nodes, one has 2 and
the next has 4. The number of rows is then 3 P, so that the rows look like P samples with 3 positions each.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []

Pool = Callable[[Net, Tensor, Tensor], Tensor]


def counts_of(samples: int, short: int) -> Tensor:
    """3 nodes each, but 2 for one sample and 4 for the next."""
    counts = torch.full((samples,), 3)
    counts[short], counts[short + 1] = 2, 4
    return counts


def graphs(d: int, P: int = 24, P2: int = 7) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, x2 = gaussian(4, d, P=P, P2=P2)
    return (x, counts_of(P, (P - 1) // 2 - 1)), (x2, counts_of(P2, 0))


def packed(x: Tensor, counts: Tensor) -> Tensor:
    """The rows that are no padding, sample after sample."""
    return x[torch.arange(x.shape[1], device=x.device) < counts[:, None]]


def owners(counts: Tensor) -> Tensor:
    """The sample of each row."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def membership(counts: Tensor, like: Tensor) -> Tensor:
    """(P, rows): 1 where the row belongs to the sample."""
    return F.one_hot(owners(counts), len(counts)).T.to(like.dtype)


def bounds(counts: Tensor) -> Tensor:
    """Where each sample starts, and the number of rows at the end."""
    return F.pad(counts.cumsum(0), (1, 0))


def pooling(pool: Pool, P: int = 24, **parts: Any) -> Built:
    """A layer on packed rows, a pooling over the rows of each sample, a layer on samples."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        return self.head(pool(self, torch.tanh(self.body(packed(x, counts))), counts))

    model = Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2), **parts)
    return model, *graphs(3, P=P, P2=7 if P > 7 else 4), None


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_segment_reduce() -> Built:
    """Packed rows are summed by torch.segment_reduce, whose lengths only the counts tell."""
    return pooling(lambda self, rows, counts: torch.segment_reduce(rows, "sum", lengths=counts))


@case(CASES, flags=("odd",))
def five_graphs_pooled_by_segment_reduce() -> Built:
    """The maximum over each of 5 segments."""
    return pooling(lambda self, rows, counts: torch.segment_reduce(rows, "max", lengths=counts), P=5)


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_sparse_mm() -> Built:
    """A sparse COO matrix of zeros and ones adds the rows of each sample."""
    return pooling(lambda self, rows, counts: torch.sparse.mm(membership(counts, rows).to_sparse(), rows))


@case(CASES, flags=("odd", "refusable"))
def graphs_pooled_by_sparse_csr() -> Built:
    """The pooling matrix is stored as compressed rows."""

    def pool(self: Net, rows: Tensor, counts: Tensor) -> Tensor:
        ones = rows.new_ones(len(rows))
        matrix = torch.sparse_csr_tensor(
            bounds(counts), torch.arange(len(rows), device=rows.device), ones, (len(counts), len(rows))
        )
        return torch.sparse.mm(matrix, rows)

    return pooling(pool)


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_addmm() -> Built:
    """A constant matrix stands left of the rows in addmm, where a layer has its rows; a learned shift is added."""
    return pooling(
        lambda self, rows, counts: torch.addmm(self.shift, membership(counts, rows), rows), shift=parameter(5)
    )


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_einsum() -> Built:
    """Rows and their membership are contracted by einsum."""
    return pooling(lambda self, rows, counts: torch.einsum("nd,pn->pd", rows, membership(counts, rows)))


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_index_add() -> Built:
    """Rows are added to the row of their sample."""
    return pooling(
        lambda self, rows, counts: rows.new_zeros(len(counts), 5).index_add(0, owners(counts), rows),
    )


@case(CASES, flags=("odd",))
def five_graphs_pooled_by_index_add() -> Built:
    """15 rows of 5 samples are added to the row of their sample."""
    return pooling(
        lambda self, rows, counts: rows.new_zeros(len(counts), 5).index_add(0, owners(counts), rows),
        P=5,
    )


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_scatter_add() -> Built:
    """Rows are added by scatter_add, with an index for each number."""

    def pool(self: Net, rows: Tensor, counts: Tensor) -> Tensor:
        index = owners(counts)[:, None].expand_as(rows)
        return rows.new_zeros(len(counts), 5).scatter_add(0, index, rows)

    return pooling(pool)


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_scatter_reduce() -> Built:
    """The largest number of each sample and column, by scatter_reduce."""

    def pool(self: Net, rows: Tensor, counts: Tensor) -> Tensor:
        index = owners(counts)[:, None].expand_as(rows)
        return rows.new_zeros(len(counts), 5).scatter_reduce(0, index, rows, "amax", include_self=False)

    return pooling(pool)


@case(CASES, flags=("odd", "ragged"))
def graphs_pooled_by_differences_of_cumsum() -> Built:
    """A running sum over the rows of all samples; differences take out one sample's, but for rounding."""

    def pool(self: Net, rows: Tensor, counts: Tensor) -> Tensor:
        sums = F.pad(rows.cumsum(0), (0, 0, 1, 0))
        ends = bounds(counts)
        return sums[ends[1:]] - sums[ends[:-1]]

    return pooling(pool)


@case(CASES, flags=("odd", "ragged"))
def graphs_split_and_padded() -> Built:
    """Rows are split by counts into a list, padded again and averaged."""

    def pool(self: Net, rows: Tensor, counts: Tensor) -> Tensor:
        padded = pad_sequence(list(rows.split(counts.tolist())), batch_first=True)
        return padded.sum(1) / counts[:, None]

    return pooling(pool)


@case(CASES, flags=("odd", "ragged"))
def nodes_of_all_graphs_sorted() -> Built:
    """The rows of all samples are sorted by a number they hold before the layer; index_add brings them home."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        rows = packed(x, counts)
        order = rows[:, 0].argsort()
        hidden = torch.tanh(self.body(rows[order]))
        return self.head(hidden.new_zeros(len(x), 5).index_add(0, owners(counts)[order], hidden))

    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *graphs(3), None


@case(CASES, flags=("odd", "ragged"))
def messages_along_packed_edges() -> Built:
    """Each node but a sample's last sends a message to the next: as many edges as nodes less samples, by index_add."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        rows, owner = packed(x, counts), owners(counts)
        source = (owner[:-1] == owner[1:]).nonzero()[:, 0]
        messages = torch.relu(self.edge(torch.cat([rows[source], rows[source + 1]], dim=1)))
        hidden = torch.tanh(self.node(rows).index_add(0, source + 1, messages))
        return self.head(hidden.new_zeros(len(x), 5).index_add(0, owner, hidden))

    model = Net(forward, edge=nn.Linear(6, 5), node=nn.Linear(3, 5), head=nn.Linear(5, 2))
    return model, *graphs(3), None


@case(CASES, flags=("odd", "ragged"))
def graph_convolution_by_a_block_diagonal_matrix() -> Built:
    """One sparse adjacency matrix for the nodes of all samples, block diagonal, applied between two layers."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        rows, member = packed(x, counts), membership(counts, x)
        adjacency = (member.T @ member / counts[owners(counts), None]).to_sparse()
        hidden = torch.tanh(torch.sparse.mm(adjacency, self.first(rows)) + rows[:, :1])
        hidden = torch.tanh(torch.sparse.mm(adjacency, self.second(hidden)))
        return self.head(member @ hidden)

    model = Net(forward, first=nn.Linear(3, 5), second=nn.Linear(5, 4), head=nn.Linear(4, 2))
    return model, *graphs(3), None


@case(CASES, flags=("odd", "ragged"))
def ragged_attention_in_a_loop() -> Built:
    """Packed rows with cumulative lengths: queries and keys in one call, a softmax for each slice in a loop."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        queries, keys = self.both(packed(x, counts)).chunk(2, dim=1)
        pooled = []
        for start, end in pairwise(bounds(counts).tolist()):
            scores = queries[start:end] @ keys[start:end].T
            pooled.append((scores.softmax(1) @ keys[start:end]).mean(0))
        return self.head(torch.stack(pooled))

    return Net(forward, both=nn.Linear(3, 10), head=nn.Linear(5, 2)), *graphs(3), None


@case(CASES, flags=("odd",))
def ragged_layers_in_a_loop() -> Built:
    """The layer itself is called on one slice of the packed rows after the other, backwards."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        rows = packed(x, counts)
        slices = list(pairwise(bounds(counts).tolist()))
        pooled = [torch.tanh(self.body(rows[start:end])).mean(0) for start, end in reversed(slices)]
        return self.head(torch.stack(pooled[::-1]))

    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *graphs(3, P=5, P2=4), None


@case(CASES, flags=("odd", "refusable"))
def jagged_nested_tensor() -> Built:
    """The rows become a nested tensor with jagged layout; the layer is applied to it; its values are pooled."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(packed(x, counts), bounds(counts))
        rows = torch.tanh(self.body(jagged)).values()
        return self.head(rows.new_zeros(len(x), 5).index_add(0, owners(counts), rows))

    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *graphs(3), None


@case(CASES, flags=("odd", "refusable"))
def jagged_nested_tensor_padded_again() -> Built:
    """Two layers on a jagged nested tensor, which then becomes a padded one."""

    def forward(self: Net, x: Tensor, counts: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(packed(x, counts), bounds(counts))
        hidden = torch.relu(self.second(torch.tanh(self.first(jagged))))
        return self.head(torch.nested.to_padded_tensor(hidden, 0.0, (len(x), 4, 4)).flatten(1))

    model = Net(forward, first=nn.Linear(3, 5), second=nn.Linear(5, 4), head=nn.Linear(16, 2))
    return model, *graphs(3, P=5, P2=4), None


@case(CASES, flags=("odd",))
def bags_of_packed_tokens() -> Built:
    """embedding_bag of all samples' tokens in one list, with offsets."""

    def forward(self: Net, ids: Tensor, counts: Tensor) -> Tensor:
        bags = F.embedding_bag(packed(ids, counts), self.table, bounds(counts)[:-1], mode="mean")
        return self.head(torch.tanh(bags))

    ids, ids2 = tokens(9, 4, P=24, P2=7)
    model = Net(forward, table=parameter(9, 5), head=nn.Linear(5, 2))
    return model, (ids, counts_of(24, 10)), (ids2, counts_of(7, 0)), None
