"""Weights that are functions of parameters: parametrizations, hypernetworks, adapters, low-rank and shared factors."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .case import Built, Case, Net, case, gaussian, parameter

CASES: list[Case] = []


@case(CASES)
def weight_norm_parametrization() -> Built:
    """The present weight_norm, on a linear layer and along another axis on a convolution."""
    conv = parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=1)
    return (
        nn.Sequential(conv, nn.Tanh(), nn.Flatten(), parametrizations.weight_norm(nn.Linear(9, 2))),
        *gaussian(2, 4),
        None,
    )


@case(CASES)
def weight_norm_by_hook() -> Built:
    """The former weight_norm: a forward pre-hook computes the weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layers = [nn.utils.weight_norm(nn.Linear(4, 6)), nn.utils.weight_norm(nn.Linear(6, 2), dim=None)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]), *gaussian(4), None


@case(CASES)
def spectral_norm_parametrization() -> Built:
    """In eval mode the power iteration stands still, and its vectors are constants."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 6))
    return nn.Sequential(layer, nn.ReLU(), parametrizations.spectral_norm(nn.Linear(6, 2))), *gaussian(4), None


@case(CASES)
def spectral_norm_by_hook() -> Built:
    """The former spectral_norm: a hook, with buffers that change in training mode only."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    model(torch.randn(1, 4))  # one power iteration: the vectors drawn at random give a norm near zero
    return model, *gaussian(4), None


@case(CASES)
def orthogonal_parametrization() -> Built:
    """The weight is a matrix exponential of a skew matrix; another by Householder reflections."""
    first = parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp")
    second = parametrizations.orthogonal(nn.Linear(4, 3, bias=False), orthogonal_map="householder")
    return nn.Sequential(first, nn.Tanh(), second), *gaussian(4), None


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@case(CASES)
def symmetric_parametrization() -> Built:
    """A chain of two custom parametrizations on one weight."""
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", Masked((torch.rand(4, 4) > 0.3).double()))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def cached_parametrization() -> Built:
    """A parametrized layer called three times with its weight computed once."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(3):
                x = torch.tanh(self.layer(x))
        return x[:, :2]

    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Net(forward, layer=layer), *gaussian(4), None


@case(CASES)
def pruned_layer() -> Built:
    """torch.nn.utils.prune: weight_orig times a mask, set by a hook."""
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    return model, *gaussian(4), None


@case(CASES)
def hypernetwork() -> Built:
    """The weight is produced by a network that sees no sample."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.generator(self.code).view(3, 4)
        return torch.tanh(F.linear(x, weight, self.bias))

    generator = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 12))
    return Net(forward, generator=generator, code=parameter(2), bias=parameter(3)), *gaussian(4), None


@case(CASES)
def hypernetwork_with_as_many_rows_as_samples() -> Built:
    """The sample-free network works on a code of P rows."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.generator(self.codes)
        return x @ weight.T @ self.out

    return Net(forward, generator=nn.Linear(3, 4), codes=parameter(5, 3), out=parameter(5, 2)), *gaussian(4), None


@case(CASES)
def hypernetwork_per_sample() -> Built:
    """Each sample has its own weight matrix, applied by bmm."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weights = self.generator(x).view(-1, 3, 4)
        return torch.bmm(weights, x.unsqueeze(2)).squeeze(2) + self.bias

    generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 12))
    return Net(forward, generator=generator, bias=parameter(3)), *gaussian(4), None


@case(CASES)
def lora_merged() -> Built:
    """W + BA with W frozen."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.layer.weight + 0.5 * self.B @ self.A
        return self.head(torch.tanh(F.linear(x, weight, self.layer.bias)))

    layer = nn.Linear(4, 6).requires_grad_(False)
    return Net(forward, layer=layer, A=parameter(2, 4), B=parameter(6, 2), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def lora_at_initialization() -> Built:
    """Wx + B(Ax) with B = 0: the kernel of A is exactly zero."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.layer(x) + self.B(self.A(x))

    second = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(second.weight)
    layer = nn.Linear(4, 3).requires_grad_(False)
    return Net(forward, layer=layer, A=nn.Linear(4, 2, bias=False), B=second), *gaussian(4), None


@case(CASES)
def kronecker_weight() -> Built:
    """W = A x B."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ torch.kron(self.A, self.B)))

    return Net(forward, A=parameter(2, 3), B=parameter(2, 2), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def low_rank_and_diagonal_weight() -> Built:
    """W = diag(s) + u v^T, with the factors in outer products."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = torch.diag(self.s) + torch.outer(self.u, self.v)
        return torch.tanh(x @ weight)[:, :3]

    return Net(forward, s=parameter(4), u=parameter(4), v=parameter(4)), *gaussian(4), None


@case(CASES)
def tensor_train_weight() -> Built:
    """A weight from three cores by one einsum."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = torch.einsum("ar,rbs,sc->abc", self.first, self.middle, self.last).reshape(4, 3)
        return F.silu(x @ weight)

    return Net(forward, first=parameter(2, 2), middle=parameter(2, 2, 3), last=parameter(3, 3)), *gaussian(4), None


@case(CASES)
def circulant_weight() -> Built:
    """A circulant matrix made of indexed entries: each entry of the parameter appears d times."""

    def forward(self: Net, x: Tensor) -> Tensor:
        index = (torch.arange(4)[:, None] - torch.arange(4)[None, :]) % 4
        return self.head(torch.relu(x @ self.row[index]))

    return Net(forward, row=parameter(4), head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def cholesky_weight() -> Built:
    """W = inverse of a Cholesky factor of a positive matrix made from the parameter."""

    def forward(self: Net, x: Tensor) -> Tensor:
        metric = self.root @ self.root.T + torch.eye(3, dtype=x.dtype, device=x.device)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(metric), x.T, upper=False).T

    return Net(forward, root=parameter(3, 3)), *gaussian(3), None


@case(CASES)
def gated_weights() -> Built:
    """Sigmoid gates on weights, softmax mixture of two weights, exp of a scale."""

    def forward(self: Net, x: Tensor) -> Tensor:
        mixture = torch.einsum("k,kij->ij", self.logits.softmax(0), self.weights)
        return torch.tanh(x @ (mixture * torch.sigmoid(self.gates))) * torch.exp(self.log_scale)

    parts = {"logits": parameter(2), "weights": parameter(2, 4, 3), "gates": parameter(4, 3), "log_scale": parameter()}
    return Net(forward, **parts), *gaussian(4), None


@case(CASES)
def straight_through_binary_weight() -> Built:
    """Binary weights with a straight-through gradient: autograd's derivative is the definition."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.layer.weight
        return F.linear(x, weight + (weight.sign() - weight).detach(), self.layer.bias).tanh()

    return Net(forward, layer=nn.Linear(4, 3)), *gaussian(4), None


@case(CASES)
def bare_scale_and_shift() -> Built:
    """Scalar, vector and column-shaped parameters, added, subtracted, multiplied and divided by broadcasting."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = (x - self.mean) / self.deviation * self.scale
        return self.head(hidden) / self.temperature + self.offset

    parts = {
        "mean": parameter(4),
        "deviation": nn.Parameter(torch.rand(1, 4) + 0.5),
        "scale": parameter(1),
        "temperature": nn.Parameter(torch.tensor(1.7)),
        "offset": parameter(1, 2),
        "head": nn.Linear(4, 2),
    }
    return Net(forward, **parts), *gaussian(4), None


@case(CASES)
def scale_broadcast_over_positions() -> Built:
    """Parameters of shapes (T, 1), (d,), (1, T, d) and (1, 1, 1) with T = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * self.per_position + self.per_channel)
        return self.head((hidden * self.table - self.level).sum(1))

    parts = {
        "per_position": parameter(5, 1),
        "per_channel": parameter(3),
        "table": parameter(1, 5, 3),
        "level": parameter(1, 1, 1),
    }
    return Net(forward, **parts, head=nn.Linear(3, 2)), *gaussian(5, 3), None


@case(CASES)
def weight_times_itself() -> Built:
    """w * w * x and w^2 x: both factors of one product are the same parameter."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.w * self.w * x + torch.tanh(x @ (self.v @ self.v)))

    return Net(forward, w=parameter(4), v=parameter(4, 4), head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def parameter_added_to_itself() -> Built:
    """w + w and w - w^T: one node, two edges from one parameter."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.w + self.w) + x @ (self.v - self.v.T))[:, :2]

    return Net(forward, w=parameter(4, 4), v=parameter(4, 4)), *gaussian(4), None


@case(CASES)
def parameter_list_and_dict() -> Built:
    """ParameterList and ParameterDict."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x * self.named["scale"] + self.named["shift"]

    weights = nn.ParameterList([parameter(4, 6), parameter(6, 5), parameter(5, 2)])
    return (
        Net(forward, weights=weights, named=nn.ParameterDict({"scale": parameter(2), "shift": parameter(2)})),
        *gaussian(4),
        None,
    )


@case(CASES)
def one_flat_parameter() -> Built:
    """All weights are slices of one vector."""

    def forward(self: Net, x: Tensor) -> Tensor:
        first, bias, second = self.theta.split([24, 6, 12])
        return torch.tanh(F.linear(x, first.view(6, 4), bias)) @ second.view(6, 2)

    return Net(forward, theta=parameter(42)), *gaussian(4), None


@case(CASES)
def parameter_repeated() -> Built:
    """repeat, repeat_interleave and tile of parameters; repeated along the sample axis too."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = x * self.a.repeat(2) + self.b.repeat_interleave(2)
        per_sample = self.c.repeat(len(x), 1) * self.d.unsqueeze(0).repeat_interleave(len(x), dim=0)
        return self.head(torch.tanh(hidden * per_sample + torch.tile(self.a, (2,))))

    parts = {"a": parameter(2), "b": parameter(2), "c": parameter(4), "d": parameter(4)}
    return Net(forward, **parts, head=nn.Linear(4, 3)), *gaussian(4), None
