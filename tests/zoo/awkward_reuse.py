"""Weights used more than once, in more than one way, or by a layer that is called several times."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []


class RescaledLinear(nn.Linear):
    """A Linear whose forward is not that of a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


@case(CASES)
def weight_also_used_functionally() -> Built:
    """A layer is called, and its weight is used once more by hand."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        return self.head(hidden + F.linear(hidden, self.layer.weight))

    return Net(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def linear_subclass_rescales_weight() -> Built:
    """NTK parametrization by a subclass of Linear."""
    return nn.Sequential(RescaledLinear(4, 6), nn.ReLU(), RescaledLinear(6, 2, bias=False)), *gaussian(4), None


@case(CASES)
def tied_embedding_and_head() -> Built:
    """One weight as embedding and as output layer."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids))))

    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    model = Net(forward, embedding=embedding, body=nn.Linear(4, 4), head=head)
    return model, *tokens(6, 3), lambda output: output[:, -1, :2]


@case(CASES)
def tied_embedding_used_transposed() -> Built:
    """The embedding's weight multiplied from the right, transposed by hand."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).mean(1)
        return (hidden @ self.embedding.weight.t())[:, :3]

    return Net(forward, embedding=nn.Embedding(6, 4)), *tokens(6, 3), None


@case(CASES)
def autoencoder_with_transpose() -> Built:
    """W going in and W^T coming out."""

    def forward(self: Net, x: Tensor) -> Tensor:
        code = torch.tanh(F.linear(x, self.weight, self.bias))
        return F.linear(code, self.weight.t())

    return Net(forward, weight=parameter(6, 3), bias=parameter(6)), *gaussian(3), None


@case(CASES)
def tied_linear_layers() -> Built:
    """Two layers with one weight and biases of their own."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def tied_convolution_and_linear() -> Built:
    """A 1 x 1 convolution and a linear layer share one weight through a view."""

    def forward(self: Net, x: Tensor) -> Tensor:
        maps = torch.tanh(self.conv(x))
        return F.linear(maps.mean((2, 3)), self.conv.weight[:, :, 0, 0])

    return Net(forward, conv=nn.Conv2d(3, 3, 1)), *gaussian(3, 2, 4), None


@case(CASES)
def layer_called_three_times() -> Built:
    """A layer applied to its own output."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)

    return Net(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, 3)), *gaussian(4), None


@case(CASES)
def layer_called_on_shapes_of_different_rank() -> Built:
    """Called on (P, d), on (P, T, d) and on (T, P, d)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        third = torch.tanh(self.layer(x))
        flat = torch.tanh(self.layer(x.mean(1)))
        swapped = torch.tanh(self.layer(x.transpose(0, 1)))
        return self.head(third.sum(1) * flat + swapped[1])

    return Net(forward, layer=nn.Linear(3, 4), head=nn.Linear(4, 2)), *gaussian(6, 3), None


@case(CASES)
def module_under_two_names() -> Built:
    """The same module registered twice: one name, one count, two uses."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.tanh(self.first(x)))))

    shared = nn.Linear(4, 4)
    return Net(forward, first=shared, second=shared, head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def module_reached_through_two_parents() -> Built:
    """A shared submodule inside two parents, each with parameters of its own."""
    shared = nn.Linear(4, 4, bias=False)
    left, right = nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Tanh(), shared, nn.Linear(4, 2))
    return nn.Sequential(left, right), *gaussian(4), None


@case(CASES)
def siamese_distance() -> Built:
    """Two inputs through one encoder; the output is their squared distance, of shape (P,)."""

    def forward(self: Net, left: Tensor, right: Tensor) -> Tensor:
        return (self.encoder(left) - self.encoder(right)).square().sum(1)

    encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    (a, a2), (b, b2) = gaussian(4), gaussian(4)
    return Net(forward, encoder=encoder), (a, b), (a2, b2), None


@case(CASES)
def two_views_stacked_on_the_batch_axis() -> Built:
    """x and -x concatenated to 2P rows: rows i and P + i belong to one sample."""

    def forward(self: Net, x: Tensor) -> Tensor:
        both = self.encoder(torch.cat([x, -x]))
        return both[: len(x)] * both[len(x) :]

    return Net(forward, encoder=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))), *gaussian(4), None


@case(CASES)
def two_views_interleaved() -> Built:
    """As many views as samples, interleaved: rows (P, views) merged."""

    def forward(self: Net, x: Tensor) -> Tensor:
        views = torch.stack([x, -x, x.flip(1), 2 * x], dim=1).flatten(0, 1)
        return torch.relu(self.encoder(views)).view(len(x), 4, -1).amax(1)

    return Net(forward, encoder=nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))), *gaussian(3, P=4), None


@case(CASES)
def batch_in_two_halves() -> Built:
    """The layer is called on each half of the batch: each call sees some of the samples."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.body(part)) for part in x.chunk(2)]))

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4, P=5, P2=4), None


@case(CASES)
def even_and_odd_samples() -> Built:
    """Two layers, each for every second sample by its own parity input; scattered back into place."""

    def forward(self: Net, x: Tensor, parity: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        out[parity == 0] = self.even(x[parity == 0])
        out[parity == 1] = self.odd(x[parity == 1])
        return torch.tanh(out)

    x, x2 = gaussian(4, P=6)
    model = Net(forward, even=nn.Linear(4, 3), odd=nn.Linear(4, 3))
    return model, (x, torch.tensor([0, 1, 0, 0, 1, 0])), (x2, torch.tensor([1, 0, 1])), None


@case(CASES, fallback=True)
def samples_sorted_inside() -> Built:
    """Samples are permuted by their norm before the layers and put back afterwards."""

    def forward(self: Net, x: Tensor) -> Tensor:
        order = x.norm(dim=1).argsort()
        back = order.argsort()
        return self.head(torch.tanh(self.body(x[order])))[back]

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES, fallback=True)
def samples_reversed_inside() -> Built:
    """The batch is flipped and flipped back: subsets that are symmetric cannot tell."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.flip(0))).flip(0))

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES, fallback=True)
def samples_rolled_inside() -> Built:
    """The layer sees the batch rolled by one, and its output is rolled back."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x.roll(1, dims=0)) + self.shift).roll(-1, dims=0)

    return Net(forward, body=nn.Linear(4, 2), shift=parameter(2)), *gaussian(4), None


@case(CASES)
def loop_over_samples() -> Built:
    """Samples one at a time, without a batch axis, then stacked."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.stack([self.head(torch.tanh(self.body(sample))) for sample in x])

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def loop_over_samples_of_unequal_length() -> Built:
    """Each sample is cut to its own length before the layer."""

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        cut = [sample[:length] for sample, length in zip(x, lengths.tolist(), strict=True)]
        return torch.stack([torch.tanh(self.body(sample)).mean(0) for sample in cut])

    x, x2 = gaussian(5, 3, P=4)
    return Net(forward, body=nn.Linear(3, 2)), (x, torch.tensor([4, 1, 5, 2])), (x2, torch.tensor([2, 3, 5])), None


@case(CASES)
def euler_integration() -> Built:
    """A neural differential equation: twelve steps with the same weights, time as an extra input."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for step in range(12):
            time = torch.full_like(x[:, :1], step / 12)
            x = x + self.field(torch.cat([x, time], dim=1)) / 12
        return x[:, :2]

    return Net(forward, field=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))), *gaussian(3), None


@case(CASES)
def fixed_point_iteration() -> Built:
    """A deep equilibrium model: the equilibrium without a graph, then two steps with one."""

    def forward(self: Net, x: Tensor) -> Tensor:
        drive = self.drive(x)
        with torch.no_grad():
            state = torch.zeros_like(drive)
            for _ in range(60):
                state = torch.tanh(0.5 * self.recurrent(state) + drive)
        for _ in range(2):
            state = torch.tanh(0.5 * self.recurrent(state) + drive)
        return self.head(state)

    parts = {"drive": nn.Linear(3, 4), "recurrent": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 2)}
    return Net(forward, **parts), *gaussian(3), None


@case(CASES)
def newton_iteration() -> Built:
    """Newton steps for z + exp(z) = a(x): parameters enter each step, with divisions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        target = self.target(x)
        z = self.start.expand_as(target)
        for _ in range(4):
            z = z - (z + torch.exp(z) - target) / (1 + torch.exp(z))
        return z * self.scale

    return Net(forward, target=nn.Linear(4, 3), start=parameter(3), scale=parameter(3)), *gaussian(4), None


@case(CASES)
def output_is_an_input_gradient() -> Built:
    """The output is the gradient of an energy in its input: the graph is made of double-backward nodes."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    energy = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, 1))
    return Net(forward, energy=energy), *gaussian(3), None
