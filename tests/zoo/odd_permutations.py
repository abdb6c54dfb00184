"""Samples sorted by a number they hold, put through a layer in that order, and put back in many ways."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian

CASES: list[Case] = []

PutBack = Callable[[Tensor, Tensor], Tensor]


def keys_of(x: Tensor) -> Tensor:
    return x[:, 1]


def inverse(order: Tensor, like: Tensor) -> Tensor:
    """The matrix that undoes the order: row order[i] has its 1 in column i."""
    return F.one_hot(order, len(order)).T.to(like.dtype)


def sorted_and_back(put_back: PutBack, P: int = 24) -> Built:
    """A layer in the order of the batch, one in the order of the keys, one in the order of the batch again.

    `put_back(rows, order)`: row i comes from sample order[i].
    """

    def forward(self: Net, x: Tensor) -> Tensor:
        order = keys_of(x).argsort(stable=True)
        hidden = torch.tanh(self.first(x))
        return self.head(put_back(torch.tanh(self.body(hidden[order])), order))

    model = Net(forward, first=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=P, P2=7 if P > 7 else 3), None


def inputs_sorted_and_back(put_back: PutBack) -> Built:
    """The first layer has the order of the keys. The batch is sorted, but for one swapped pair: few samples move."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = keys_of(x).argsort(stable=True)
        return self.head(put_back(torch.tanh(self.body(x[order])), order))

    x, x2 = gaussian(3, P=24, P2=7)
    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), swapped(x, 10), x2, None


def swapped(x: Tensor, place: int) -> Tensor:
    """The batch in the order of its keys, but for one sample and the next."""
    order = keys_of(x).argsort(stable=True)
    order[[place, place + 1]] = order[[place + 1, place]]
    return x[order]


@case(CASES, flags=("odd", "sorted"))
def put_back_by_index_select() -> Built:
    """Undone by index_select."""
    return sorted_and_back(lambda rows, order: rows.index_select(0, order.argsort()))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_indexing() -> Built:
    """Undone by indexing with the order's own argsort."""
    return sorted_and_back(lambda rows, order: rows[order.argsort()])


@case(CASES, flags=("odd", "sorted"))
def five_put_back_by_indexing() -> Built:
    """Five samples; undone by indexing."""
    return sorted_and_back(lambda rows, order: rows[order.argsort()], P=5)


@case(CASES, flags=("odd", "sorted"))
def put_back_by_gather() -> Built:
    """Undone by gather, with an index for each number."""
    return sorted_and_back(lambda rows, order: rows.gather(0, order.argsort()[:, None].expand_as(rows)))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_scatter() -> Built:
    """Undone by scatter: the order itself is the index."""
    return sorted_and_back(
        lambda rows, order: torch.zeros_like(rows).scatter(0, order[:, None].expand_as(rows), rows),
    )


@case(CASES, flags=("odd", "sorted"))
def put_back_by_index_copy() -> Built:
    """Undone by index_copy into zeros."""
    return sorted_and_back(lambda rows, order: torch.zeros_like(rows).index_copy(0, order, rows))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_index_put() -> Built:
    """Undone by an assignment in place, which is index_put."""

    def put_back(rows: Tensor, order: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        out[order] = rows
        return out

    return sorted_and_back(put_back)


@case(CASES, flags=("odd", "sorted"))
def put_back_by_one_hot() -> Built:
    """Undone by a product with a matrix of zeros and ones."""
    return sorted_and_back(lambda rows, order: inverse(order, rows) @ rows)


@case(CASES, flags=("odd", "sorted"))
def five_put_back_by_one_hot() -> Built:
    """Five samples, as many as columns; undone by a matrix product."""
    return sorted_and_back(lambda rows, order: inverse(order, rows) @ rows, P=5)


@case(CASES, flags=("odd", "sorted"))
def put_back_by_sparse_mm() -> Built:
    """Undone by a sparse permutation matrix."""
    return sorted_and_back(lambda rows, order: torch.sparse.mm(inverse(order, rows).to_sparse(), rows))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_addmm() -> Built:
    """Undone by addmm with the constant on the left, where a layer has its rows."""
    return sorted_and_back(lambda rows, order: torch.addmm(rows.new_ones(5), inverse(order, rows), rows))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_linear() -> Built:
    """Undone by F.linear on the transposed rows: the permutation has the weight's place."""
    return sorted_and_back(lambda rows, order: F.linear(rows.T, inverse(order, rows)).T)


@case(CASES, flags=("odd", "sorted"))
def put_back_by_conv1d() -> Built:
    """Undone by a convolution whose channels are the samples."""
    return sorted_and_back(lambda rows, order: F.conv1d(rows[None], inverse(order, rows)[:, :, None])[0])


@case(CASES, flags=("odd", "sorted"))
def put_back_by_bmm() -> Built:
    """Undone by bmm: one permutation matrix for each half of the columns."""

    def put_back(rows: Tensor, order: Tensor) -> Tensor:
        halves = torch.stack([rows[:, :2], rows[:, 2:4]])
        back = torch.bmm(inverse(order, rows).expand(2, -1, -1), halves)
        return torch.cat([*back, rows[order.argsort(), 4:]], dim=1)

    return sorted_and_back(put_back)


@case(CASES, flags=("odd", "sorted"))
def put_back_by_embedding() -> Built:
    """Undone by an embedding lookup whose table are the activations."""
    return sorted_and_back(lambda rows, order: F.embedding(order.argsort(), rows))


@case(CASES, flags=("odd", "sorted"))
def put_back_by_flip() -> Built:
    """Descending order, flipped to ascending before it is undone: for two samples one flip may undo it all."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = keys_of(x).argsort(stable=True)
        hidden = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.body(hidden[order.flip(0)])).flip(0)[order.argsort()])

    model = Net(forward, first=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def put_back_by_roll() -> Built:
    """The sample with the largest key is rolled to the front, and rolled back: the shift comes from the data."""

    def forward(self: Net, x: Tensor) -> Tensor:
        shift = int(keys_of(x).argmax())
        hidden = torch.tanh(self.first(x)).roll(-shift, 0)
        return self.head(torch.tanh(self.body(hidden)).roll(shift, 0))

    model = Net(forward, first=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def put_back_by_masked_scatter() -> Built:
    """Samples with a positive key go first; two masks put them back, each in the order of its own."""

    def forward(self: Net, x: Tensor) -> Tensor:
        positive = keys_of(x) > 0
        hidden = torch.tanh(self.first(x))
        rows = torch.tanh(self.body(torch.cat([hidden[positive], hidden[~positive]])))
        mask = positive[:, None].expand(-1, 5)
        out = torch.zeros_like(rows).masked_scatter(mask, rows)
        return self.head(out.masked_scatter(~mask, rows[positive.sum() :]))

    model = Net(forward, first=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def put_back_by_sort_values() -> Built:
    """Undone by the values of torch.sort: each row gets 4 times its sample's number, and numbers are below 1."""

    def put_back(rows: Tensor, order: Tensor) -> Tensor:
        places = torch.arange(len(order), device=rows.device).to(rows.dtype)
        return (rows + 4 * order.to(rows.dtype)[:, None]).sort(0).values - 4 * places[:, None]

    return sorted_and_back(put_back)


@case(CASES, flags=("odd", "sorted"))
def sorted_twice_by_two_keys() -> Built:
    """Each of two layers has an order of its own; only the second is undone, by the two orders together."""

    def forward(self: Net, x: Tensor) -> Tensor:
        first = keys_of(x).argsort(stable=True)
        hidden = torch.tanh(self.first(x[first]))
        second = x[first, 0].argsort(stable=True)
        hidden = torch.tanh(self.body(hidden[second]))
        return self.head(hidden)[first[second].argsort()]

    model = Net(forward, first=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def sorted_by_a_learned_score() -> Built:
    """The order comes from the network itself: a score without a gradient of its own."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = self.score(x)[:, 0].argsort(stable=True)
        rows = torch.tanh(self.body(torch.tanh(self.score(x))[order]))
        return self.head(rows)[order.argsort()]

    model = Net(forward, score=nn.Linear(3, 4), body=nn.Linear(4, 5), head=nn.Linear(5, 2))
    return model, *gaussian(3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_index_select() -> Built:
    """One pair of neighbors changes places before the first layer; undone by index_select."""
    return inputs_sorted_and_back(lambda rows, order: rows.index_select(0, order.argsort()))


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_scatter() -> Built:
    """One pair of neighbors changes places; undone by scatter."""
    return inputs_sorted_and_back(
        lambda rows, order: torch.zeros_like(rows).scatter(0, order[:, None].expand_as(rows), rows),
    )


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_one_hot() -> Built:
    """One pair of neighbors changes places; undone by a product with a matrix of zeros and ones."""
    return inputs_sorted_and_back(lambda rows, order: inverse(order, rows) @ rows)


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_sparse_mm() -> Built:
    """One pair of neighbors changes places; undone by a sparse matrix."""
    return inputs_sorted_and_back(lambda rows, order: torch.sparse.mm(inverse(order, rows).to_sparse(), rows))


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_addmm() -> Built:
    """One pair of neighbors changes places; undone by addmm with the constant on the left."""
    return inputs_sorted_and_back(lambda rows, order: torch.addmm(rows.new_ones(5), inverse(order, rows), rows))


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_linear() -> Built:
    """One pair of neighbors changes places; undone by F.linear on the transposed rows."""
    return inputs_sorted_and_back(lambda rows, order: F.linear(rows.T, inverse(order, rows)).T)


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_conv1d() -> Built:
    """One pair of neighbors changes places; undone by a convolution whose channels are the samples."""
    return inputs_sorted_and_back(lambda rows, order: F.conv1d(rows[None], inverse(order, rows)[:, :, None])[0])


@case(CASES, flags=("odd", "sorted", "swapped"))
def inputs_put_back_by_embedding() -> Built:
    """One pair of neighbors changes places; undone by an embedding lookup."""
    return inputs_sorted_and_back(lambda rows, order: F.embedding(order.argsort(), rows))


@case(CASES, flags=("odd",))
def positions_sorted_inside_each_sample() -> Built:
    """Positions are sorted inside each sample, the layer sees sorted ones, gather puts them back."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x[:, :, 0].argsort(1)
        rows = torch.tanh(self.body(x.gather(1, order[:, :, None].expand_as(x)) + self.places))
        back = order.argsort(1)[:, :, None].expand_as(rows)
        return self.head(rows.gather(1, back).flatten(1))

    model = Net(forward, places=nn.Parameter(torch.randn(4, 3)), body=nn.Linear(3, 5), head=nn.Linear(20, 2))
    return model, *gaussian(4, 3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def positions_of_all_samples_sorted() -> Built:
    """The positions of all samples are sorted together, so that samples alternate without a pattern."""

    def forward(self: Net, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort(stable=True)
        rows = torch.tanh(self.body(rows[order]))
        return self.head(rows[order.argsort()].view(len(x), -1))

    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(20, 2)), *gaussian(4, 3, P=24, P2=7), None


@case(CASES, flags=("odd", "sorted"))
def values_of_each_column_sorted_over_samples() -> Built:
    """Each column has an order of its own, from torch.sort over samples; the layer scales; scatter undoes it."""

    def forward(self: Net, x: Tensor) -> Tensor:
        ordered = torch.tanh(self.first(x)).sort(0)
        rows = torch.tanh(self.scale * ordered.values + self.shift)
        return self.head(torch.zeros_like(rows).scatter(0, ordered.indices, rows))

    parts = {"scale": nn.Parameter(torch.randn(())), "shift": nn.Parameter(torch.randn(()))}
    model = Net(forward, first=nn.Linear(3, 4), head=nn.Linear(4, 2), **parts)
    return model, *gaussian(3, P=24, P2=7), None
