"""Models in which a sample meets the others only now and then, or only in the backward pass: all must be refused."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, default_dtype, gaussian

COUPLED_ORDERS: list[Case] = []
# name -> the same case with other weights, inputs and places, by seed
DRAWN: dict[str, Callable[[int], Built]] = {}


def drawn(make: Callable[[], Built]) -> Callable[[], Built]:
    """Keep the builder of a random case, so that it can be built at other seeds."""

    def at(seed: int) -> Built:
        with torch.random.fork_rng(devices=[]), default_dtype(torch.float64):
            torch.manual_seed(seed)
            return make()

    DRAWN[make.__name__] = at
    return make


def two_layers(forward: Callable[..., Tensor], P: int = 24, P2: int = 7) -> tuple[Net, Tensor, Tensor, None]:
    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *gaussian(3, P=P, P2=P2), None


def within_capacity(chosen: Tensor, experts: int, factor: float) -> Tensor:
    """True for the samples that come first to their expert, as many as it takes."""
    capacity = int(factor * len(chosen) / experts) + 1
    places = F.one_hot(chosen, experts).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return places <= capacity


def experts_with_capacity(P: int) -> Built:
    """Four experts; the first is preferred just so much that at least 3 samples are dropped."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).max(1)
        kept = within_capacity(chosen, 4, 1.5)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            mask = kept & (chosen == number)
            out[mask] = gates[mask, None] * torch.tanh(expert(x[mask]))
        return self.head(out)

    parts = {"router": nn.Linear(3, 4), "experts": nn.ModuleList(nn.Linear(3, 5) for _ in range(4))}
    model = Net(forward, **parts, head=nn.Linear(5, 2))
    x, x2 = gaussian(3, P=P, P2=7)
    with torch.no_grad():
        while within_capacity(model.router(x).argmax(1), 4, 1.5).sum() > P - 3:
            model.router.bias[0] += 0.02
    return model, x, x2, None


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def experts_of_limited_capacity() -> Built:
    """60 samples, experts that take 1.5 times their share: late samples are dropped because of earlier ones."""
    return experts_with_capacity(60)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def experts_of_limited_capacity_for_many_samples() -> Built:
    """150 samples, of which a few are dropped."""
    return experts_with_capacity(150)


def with_an_equal_pair(forward: Callable[..., Tensor]) -> Built:
    """24 samples, two of which are equal, at random places."""
    model, x, x2, readout = two_layers(forward)
    first, second = torch.randperm(len(x))[:2].tolist()
    x[first] = x[second].clone()
    return model, x, x2, readout


def equal_rows(x: Tensor) -> Tensor:
    """(P, P): True where two different samples are equal."""
    return (x[:, None] == x).all(2) & ~torch.eye(len(x), dtype=torch.bool, device=x.device)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def second_of_two_equal_rows_zeroed() -> Built:
    """A sample that occurred before gives zeros: 23 of 24 samples notice nothing."""

    def forward(self: Net, x: Tensor) -> Tensor:
        again = equal_rows(x).tril().any(1)
        return self.head(torch.tanh(self.body(x)) * ~again[:, None])

    return with_an_equal_pair(forward)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def both_of_two_equal_rows_zeroed() -> Built:
    """Samples that occur twice give zeros, so that the kernel stays symmetric between them."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) * ~equal_rows(x).any(1)[:, None])

    return with_an_equal_pair(forward)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def decision_for_the_whole_batch() -> Built:
    """If any sample has a large feature, all samples are treated otherwise; 3 of 60 have one."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(torch.relu(hidden) if (x[:, 0] > 3).any() else torch.tanh(hidden))

    model, x, x2, readout = two_layers(forward, P=60)
    x.clamp_(-2.5, 2.5)
    x[torch.randperm(60)[:3], 0] = 3.5
    return model, x, x2, readout


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def clipping_chosen_for_the_whole_batch() -> Built:
    """If any of 60 samples has a large feature, all are clipped, which changes the few that a clip meets."""

    def forward(self: Net, x: Tensor) -> Tensor:
        clipped = x.clamp(-2, 2) if (x[:, 0] > 3).any() else x
        return self.head(torch.tanh(self.body(clipped)))

    model, x, x2, readout = two_layers(forward, P=60)
    x.clamp_(-1.5, 1.5)
    places = torch.randperm(60)
    x[places[:3], 0], x[places[3:7], 1] = 3.5, 2.5
    return model, x, x2, readout


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def rank_as_feature() -> Built:
    """The rank of a sample among the batch is added to its features."""

    def forward(self: Net, x: Tensor) -> Tensor:
        ranks = x[:, 0].argsort().argsort().to(x.dtype) / 24
        return self.head(torch.tanh(self.body(x + ranks[:, None])))

    return two_layers(forward)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def sorted_with_a_table_of_ranks() -> Built:
    """Sorted and put back as in an independent model, but a table of places is added in between."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        rows = self.body(x[order]) + self.places[: len(x)]
        return self.head(torch.tanh(rows)[order.argsort()])

    model, x, x2, readout = two_layers(forward)
    model.places = nn.Parameter(0.1 * torch.randn(60, 5))
    return model, x, x2, readout


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def nearest_neighbor_in_the_batch() -> Built:
    """Each sample is given the features of its nearest neighbor."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if len(x) > 1:
            distances = torch.cdist(x, x) + 1e9 * torch.eye(len(x), dtype=x.dtype, device=x.device)
            hidden = hidden + 0.3 * hidden[distances.argmin(1)]
        return self.head(hidden)

    return two_layers(forward)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def best_half_of_the_batch() -> Built:
    """Only the half of the batch with the largest scores keeps its features."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        kept = hidden[:, 0].topk((len(x) + 1) // 2).indices
        return self.head(torch.zeros_like(hidden).index_copy(0, kept, hidden[kept]))

    return two_layers(forward)


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def tokens_pruned_over_the_batch() -> Built:
    """Of the 240 tokens of 60 samples the three with the least weight are left out."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x)).flatten(0, 1)
        weakest = hidden.square().sum(1).topk(3, largest=False).indices
        kept = torch.ones_like(hidden[:, :1]).index_fill(0, weakest, 0.0)
        return self.head((hidden * kept).view(len(x), 4, 5).sum(1))

    return Net(forward, body=nn.Linear(3, 5), head=nn.Linear(5, 2)), *gaussian(4, 3, P=60, P2=7), None


@case(COUPLED_ORDERS, flags=("coupled",))
@drawn
def rare_tokens_of_the_batch() -> Built:
    """Tokens deduplicated over the batch, as in an independent model, but those that occur once are weighted less."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        distinct, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        rows = torch.tanh(self.table(distinct)) * torch.where(counts > 1, 1.0, 0.5)[:, None]
        return self.head(rows[inverse].sum(1))

    ids, ids2 = torch.randint(1, 9, (24, 4)), torch.randint(1, 9, (7, 4))
    ids[torch.randint(24, ()), 0] = 0
    return Net(forward, table=nn.Embedding(9, 5), head=nn.Linear(5, 2)), ids, ids2, None


class MixedGradient(torch.autograd.Function):
    """The identity, whose gradient is mixed with that of the next sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.9 * gradient + 0.1 * gradient.roll(1, 0)


class AveragedGradient(torch.autograd.Function):
    """The identity, whose gradient is divided by the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / len(gradient)


class MeanGradient(torch.autograd.Function):
    """x @ w.T; the gradient of the weight is averaged over the samples, that of x is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x / len(x)


@case(COUPLED_ORDERS, flags=("coupled", "gradient"))
@drawn
def gradient_mixed_between_samples() -> Built:
    """Outputs are independent; a custom backward pass mixes the gradients of neighbors."""
    return two_layers(lambda self, x: self.head(MixedGradient.apply(torch.tanh(self.body(x)))))


@case(COUPLED_ORDERS, flags=("coupled", "gradient"))
@drawn
def gradient_divided_by_the_batch_size() -> Built:
    """Outputs are independent; a custom backward pass divides by the number of samples."""
    return two_layers(lambda self, x: self.head(AveragedGradient.apply(torch.tanh(self.body(x)))))


@case(COUPLED_ORDERS, flags=("coupled", "gradient"))
@drawn
def weight_gradient_divided_by_the_batch_size() -> Built:
    """As before, but only the gradient of one weight: those that go on through the network are exact."""
    return two_layers(
        lambda self, x: self.head(torch.tanh(MeanGradient.apply(x, self.body.weight) + self.body.bias)),
    )


@case(COUPLED_ORDERS, flags=("coupled", "gradient"))
@drawn
def gradient_stopped_below_the_median() -> Built:
    """Outputs are independent; samples below the median of the batch are detached from the body."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        above = x[:, :1] >= x[:, :1].median()
        return self.head(torch.where(above, hidden, hidden.detach()))

    return two_layers(forward)
