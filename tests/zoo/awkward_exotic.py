"""Custom functions, routing, recomputation, compilation, transforms inside forward, complex numbers."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Built, Case, Net, case, gaussian, parameter, tokens

CASES: list[Case] = []


class ScaledProduct(torch.autograd.Function):
    """x @ w.T with a hand-written backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@case(CASES, fallback=True)
def custom_function() -> Built:
    """A custom autograd Function takes the parameter: the node says nothing about what it does with it."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(ScaledProduct.apply(x, self.weight)))

    return Net(forward, weight=parameter(6, 4), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def gradient_reversal() -> Built:
    """A custom Function without parameters, whose gradient is not its derivative; used after and on a weight."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = ReversedGradient.apply(torch.tanh(self.body(x)))
        return F.linear(hidden, ReversedGradient.apply(self.head.weight), self.head.bias)

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES, fallback=True)
def experts_top1() -> Built:
    """Each sample goes to one expert, by a mask and index_add, weighted by its gate."""

    def forward(self: Net, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, gates[rows, None] * torch.tanh(expert(x[rows])))
        return out

    return (
        Net(forward, router=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(3))),
        *gaussian(4, P=6),
        None,
    )


@case(CASES, fallback=True)
def experts_top2_over_tokens() -> Built:
    """Tokens of all samples are flattened and routed to two of four experts; some experts get none of a sample."""

    def forward(self: Net, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(1).topk(2)
        out = torch.zeros_like(rows)
        for number in range(4):
            row, slot = torch.where(chosen == number)
            out = out.index_put(
                (row,), gates[row, slot, None] * F.silu(rows[row] @ self.weights[number]), accumulate=True
            )
        return self.head(out.view_as(x).mean(1))

    return (
        Net(forward, router=nn.Linear(3, 4), weights=parameter(4, 3, 3), head=nn.Linear(3, 2)),
        *gaussian(6, 3, P=4),
        None,
    )


@case(CASES)
def experts_dense() -> Built:
    """All experts at once by einsum, as many experts as samples, weighted by a softmax router."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("pd,edh->peh", x, self.up) + self.bias)
        return torch.einsum("peh,ehc,pe->pc", hidden, self.down, self.router(x).softmax(1))

    parts = {"up": parameter(5, 4, 3), "bias": parameter(5, 3), "down": parameter(5, 3, 2), "router": nn.Linear(4, 5)}
    return Net(forward, **parts), *gaussian(4), None


@case(CASES, fallback=True)
def expert_weights_gathered_per_sample() -> Built:
    """Each sample looks up its own weight matrix by its expert number."""

    def forward(self: Net, x: Tensor, expert: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(1), self.weights[expert]).squeeze(1) + self.biases(expert)

    (x, x2), (expert, expert2) = gaussian(4), tokens(2)
    return Net(forward, weights=parameter(2, 4, 3), biases=nn.Embedding(2, 3)), (x, expert), (x2, expert2), None


@case(CASES)
def checkpoint_non_reentrant() -> Built:
    """Blocks recomputed in the backward pass, with a dropout inside."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
    return Net(forward, blocks=blocks, head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def saved_tensors_packed() -> Built:
    """Saved tensors go through hooks that pack and unpack them, as when they are offloaded."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.clone(),), lambda packed: packed[0]):
            return self.head(torch.tanh(self.body(x)))

    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def compiled_submodule() -> Built:
    """torch.compile on a part: no module hooks, and a name with _orig_mod."""
    body = torch.compile(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), backend="eager")
    return nn.Sequential(body, nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def compiled_model() -> Built:
    """The whole model is compiled."""
    return (
        torch.compile(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), backend="eager"),
        *gaussian(4),
        None,
    )


@case(CASES)
def traced_submodule() -> Built:
    """torch.jit.trace of an MLP, registered as a submodule."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        body = torch.jit.trace(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.randn(2, 4))
    return Net(forward, body=body, head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def vmap_over_samples() -> Built:
    """torch.func.vmap over samples inside forward."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda sample: self.head(torch.tanh(self.weight @ sample)))(x)

    return Net(forward, weight=parameter(6, 4), head=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def ensemble_by_vmap() -> Built:
    """An ensemble: stacked parameters, functional_call under vmap, a skeleton that has no use of its own."""
    skeleton = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).requires_grad_(False)
    stacked = {name.replace(".", "_"): parameter(3, *weight.shape) for name, weight in skeleton.named_parameters()}

    def forward(self: Net, x: Tensor) -> Tensor:
        members = {name: self.stacked[name.replace(".", "_")] for name, _ in skeleton.named_parameters()}
        return torch.func.vmap(lambda member: torch.func.functional_call(skeleton, member, (x,)))(members).mean(0)

    return Net(forward, stacked=nn.ParameterDict(stacked)), *gaussian(4), None


@case(CASES)
def functional_call_with_scaled_weights() -> Built:
    """functional_call of a submodule with weights that are functions of its own parameters."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weights = {name: weight * self.scale for name, weight in self.body.named_parameters()}
        return torch.func.functional_call(self.body, weights, (x,)) + self.body(x)

    return (
        Net(forward, body=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), scale=parameter()),
        *gaussian(4),
        None,
    )


@case(CASES)
def jacobian_inside_forward() -> Built:
    """A physics-like output: value and input derivative by torch.func.grad."""

    def forward(self: Net, x: Tensor) -> Tensor:
        value = torch.func.vmap(lambda sample: self.body(sample).squeeze(0))(x)
        slope = torch.func.vmap(torch.func.grad(lambda sample: self.body(sample).squeeze(0)))(x)
        return torch.cat([value[:, None], slope], dim=1)

    return Net(forward, body=nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))), *gaussian(2), None


@case(CASES)
def fourier_layer_real() -> Built:
    """Spectral gates with a real parameter over positions, T = P."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.gate[:, None], n=x.shape[1], dim=1).flatten(1))

    return Net(forward, gate=parameter(3), head=nn.Linear(10, 2)), *gaussian(5, 2), None


@case(CASES)
def fourier_layer_complex() -> Built:
    """A Fourier neural operator: a complex parameter contracted over channels by einsum."""

    def forward(self: Net, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x, dim=2)[:, :, :3]
        mixed = torch.einsum("pim,iom->pom", modes, self.weight)
        return torch.tanh(torch.fft.irfft(mixed, n=6, dim=2) + self.skip(x)).mean(2)

    return Net(forward, weight=complex_parameter(2, 3, 3), skip=nn.Conv1d(2, 3, 1)), *gaussian(2, 6), None


@case(CASES)
def complex_linear_layer() -> Built:
    """A complex layer with bias, and the modulus as output."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight + self.bias).abs()

    return Net(forward, weight=complex_parameter(4, 3), bias=complex_parameter(3)), *gaussian(4), None


@case(CASES)
def complex_intermediate() -> Built:
    """Real parameters as phases: a complex intermediate, a conjugate, a real part."""

    def forward(self: Net, x: Tensor) -> Tensor:
        wave = torch.polar(F.softplus(self.amplitude(x)), x @ self.phase)
        return (wave * wave.conj().roll(1, dims=1)).real + wave.imag

    return Net(forward, amplitude=nn.Linear(4, 3), phase=parameter(4, 3)), *gaussian(4), None


def complex_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.complex(torch.randn(shape), torch.randn(shape)))
