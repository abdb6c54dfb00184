"""Models and inputs for which there is no kernel of independent samples: the library must raise FeatlearnError."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Built, Case, Net, case, gaussian, parameter, tokens

REFUSED: list[Case] = []


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def around_mlp(forward: Callable[..., Any]) -> Net:
    return Net(forward, body=mlp())


@case(REFUSED, flags=("coupled",))
def batch_norm_without_running_statistics() -> Built:
    """Coupled in eval mode too: it normalizes by the statistics of the batch."""
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 2)]
    return nn.Sequential(*layers), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def centered_over_the_batch() -> Built:
    """The mean over samples is subtracted."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return hidden - hidden.mean(0)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def inputs_centered_over_the_batch() -> Built:
    """The samples are coupled before any parameter: gradients of later operations show nothing."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x - x.mean(0))

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def centered_by_a_detached_mean() -> Built:
    """The mean over samples is subtracted without a gradient: only values tell."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return hidden - hidden.mean(0).detach()

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def scaled_by_a_detached_batch_statistic() -> Built:
    """Divided by the largest norm in the batch, without a gradient."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden / hidden.detach().norm(dim=1).max())

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def softmax_over_the_batch() -> Built:
    """The softmax runs over the wrong axis."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).softmax(dim=0)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def attention_over_the_batch() -> Built:
    """A batch-first input in a sequence-first layer: samples attend to each other."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(1)

    return Net(forward, attention=nn.MultiheadAttention(4, 2)), *gaussian(3, 4), None


@case(REFUSED, flags=("coupled",))
def contrastive_similarities() -> Built:
    """The output is the similarity of each sample with all others, (P, P)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        embedded = F.normalize(self.body(x), dim=1)
        return embedded @ embedded.T

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def neighbors_mixed() -> Built:
    """Each sample is mixed with the one before it."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(0.7 * hidden + 0.3 * hidden.roll(1, dims=0))

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def weakly_coupled() -> Built:
    """A ten-thousandth of the batch mean."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return hidden + 1e-4 * hidden.mean(0)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def divided_by_the_batch_size() -> Built:
    """Depends on how many samples there are, not on which: a comparison at equal batch size cannot tell."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x) / len(x)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def row_number_as_feature() -> Built:
    """Samples do not influence each other, but a sample's output depends on its place in the batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        places = torch.arange(len(x), dtype=x.dtype)[:, None]
        return self.body(x + 0.1 * places)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def parameter_per_row_of_the_batch() -> Built:
    """A table with one row per place in the batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x) + self.rows[: len(x)]

    return Net(forward, body=mlp(), rows=parameter(5, 2)), *gaussian(4), None


@case(REFUSED, flags=("coupled",))
def permuted_outputs() -> Built:
    """The outputs come back in another order than the inputs."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).flip(0)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def checkpoint_reentrant() -> Built:
    """A reentrant checkpoint hides its graph: torch.autograd.grad raises when it comes to it."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))

    return Net(forward, first=nn.Linear(4, 3), middle=nn.Linear(3, 6), last=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED)
def checkpoint_reentrant_on_the_first_layer() -> Built:
    """No parameter lies before it, so torch.autograd.grad never runs it: its parameters only seem to be unused."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x.detach().requires_grad_(), use_reentrant=True))

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED)
def embedding_with_max_norm() -> Built:
    """A lookup rewrites the weight."""
    return nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2)), *tokens(6), None


@case(REFUSED)
def embedding_bag_with_max_norm() -> Built:
    """A lookup rewrites the weight."""
    return nn.Sequential(nn.EmbeddingBag(6, 4, max_norm=0.5), nn.Linear(4, 2)), *tokens(6, 3), None


@case(REFUSED)
def embedding_scaled_by_frequency() -> Built:
    """The gradient is divided by how often a token occurs in the batch."""
    return nn.Sequential(nn.Embedding(3, 4, scale_grad_by_freq=True), nn.Linear(4, 2)), *tokens(3, P=6), None


@case(REFUSED)
def dropout_always_on() -> Built:
    """F.dropout with its default training=True: random in eval mode."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5))

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED)
def noise_in_the_forward_pass() -> Built:
    """Gaussian noise on the hidden layer in every mode."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(torch.tanh(hidden + 0.1 * torch.randn_like(hidden)))

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None


@case(REFUSED)
def lazy_module() -> Built:
    """Uninitialized parameters: the first call would create them."""
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2)), *gaussian(4), None


@case(REFUSED)
def everything_frozen() -> Built:
    """No trainable parameter."""
    return mlp().requires_grad_(False), *gaussian(4), None


@case(REFUSED)
def no_parameters() -> Built:
    """No parameter at all."""
    return nn.Sequential(nn.Flatten(), nn.Tanh()), *gaussian(4), None


@case(REFUSED)
def detached_output() -> Built:
    """Trainable parameters, but the output has no graph."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).detach()

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def complex_output() -> Built:
    """The output is complex."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.fft.fft(self.body(x), dim=1)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def three_axes_without_readout() -> Built:
    """(P, T, C) and no readout."""
    return mlp(), *gaussian(3, 4), None


@case(REFUSED)
def tuple_without_a_tensor() -> Built:
    """A tuple of tuples and no readout."""

    def forward(self: Net, x: Tensor) -> tuple[tuple[Tensor]]:
        return ((self.body(x),),)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def scalar_loss_output() -> Built:
    """A 0-d output: the mean loss of the batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).square().mean()

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def integer_output() -> Built:
    """The predicted class."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).argmax(1)

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def nan_output() -> Built:
    """A logarithm of negative numbers."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).log()

    return around_mlp(forward), *gaussian(4), None


@case(REFUSED)
def infinite_output() -> Built:
    """A division by zero for one sample."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x) / x[:, :1]

    x, x2 = gaussian(4)
    x[1, 0] = 0.0
    return around_mlp(forward), x, x2, None


@case(REFUSED)
def fewer_outputs_than_samples() -> Built:
    """Pairs of samples give one output each."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).reshape(len(x) // 2, 2, -1).mean(1)

    return around_mlp(forward), *gaussian(4, P=6, P2=4), None


@case(REFUSED)
def more_outputs_than_samples() -> Built:
    """Tokens are flattened into the batch axis of the output."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).flatten(0, 1)

    return around_mlp(forward), *gaussian(3, 4), None


@case(REFUSED)
def inputs_that_differ_by_one_sample() -> Built:
    """Two inputs that disagree about the number of samples: P and P - 1."""

    def forward(self: Net, x: Tensor, offset: Tensor) -> Tensor:
        return self.body(x) + offset.mean()

    x, x2 = gaussian(4)
    return around_mlp(forward), (x, torch.randn(4, 4)), (x2, torch.randn(2, 4)), None


@case(REFUSED)
def empty_batch() -> Built:
    """No sample."""
    return mlp(), torch.randn(0, 4), torch.randn(3, 4), None
