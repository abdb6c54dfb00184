"""Feed-forward networks: output shapes, coincidences of sizes, in-place operations, frozen and unused parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian, parameter

CASES: list[Case] = []


@case(CASES)
def mlp_with_bias() -> Built:
    """The plain one."""
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def mlp_without_bias() -> Built:
    """Mm in place of Addmm."""
    return nn.Sequential(nn.Linear(4, 7, bias=False), nn.GELU(), nn.Linear(7, 3, bias=False)), *gaussian(4), None


@case(CASES)
def single_linear_layer() -> Built:
    """The output's own node is the use; its input needs no gradient."""
    return nn.Linear(4, 3), *gaussian(4), None


@case(CASES)
def scalar_output() -> Built:
    """Output of shape (P,)."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]

    return Net(forward, body=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))), *gaussian(4), None


@case(CASES)
def one_column_output() -> Built:
    """Output of shape (P, 1)."""
    return nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 1)), *gaussian(4), None


@case(CASES)
def squeezed_output() -> Built:
    """squeeze() drops the sample axis at batch size 1."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).squeeze()

    return Net(forward, body=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))), *gaussian(4), None


@case(CASES)
def squeezed_inside() -> Built:
    """squeeze() in the middle, harmless for more than one sample only."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.unsqueeze(1))).squeeze()
        return self.second(hidden).reshape(-1, 2)

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def single_sample() -> Built:
    """P = 1: every axis of length one looks like the sample axis."""
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 2)), *gaussian(1, P=1, P2=4), None


@case(CASES)
def width_equals_samples() -> Built:
    """d = P: square activations."""
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)), *gaussian(5), None


@case(CASES)
def outputs_equal_samples() -> Built:
    """C = P: square outputs."""
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)), *gaussian(3), None


@case(CASES)
def every_size_equal() -> Built:
    """P = d = C, and P2 another."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), *gaussian(4, P=4), None


@case(CASES)
def in_place_relu() -> Built:
    """The layer's output is overwritten right after the layer."""
    return (
        nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 2), nn.LeakyReLU(inplace=True)),
        *gaussian(4),
        None,
    )


@case(CASES)
def in_place_arithmetic() -> Built:
    """Scaled, shifted and partly overwritten in place."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.mul_(2.0).add_(self.shift)
        hidden[:, 1] = x[:, 0]
        return self.second(hidden.tanh_())

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 3), shift=parameter(6)), *gaussian(4), None


@case(CASES)
def deep_residual() -> Built:
    """Eight residual blocks, shared shapes throughout."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 0.3 * torch.tanh(block(x))
        return self.head(x)

    return (
        Net(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(8)), head=nn.Linear(4, 2)),
        *gaussian(4),
        None,
    )


@case(CASES)
def dense_concatenation() -> Built:
    """Each layer reads the concatenation of all earlier ones."""

    def forward(self: Net, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.silu(layer(torch.cat(features, dim=1))))
        return self.head(torch.cat(features, dim=1))

    layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(6, 3), nn.Linear(9, 2)])
    return Net(forward, layers=layers, head=nn.Linear(11, 3)), *gaussian(4), None


@case(CASES)
def quadratic_activation() -> Built:
    """The square of a layer's output."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(self.first(x) ** 2)

    return Net(forward, first=nn.Linear(4, 7), second=nn.Linear(7, 2, bias=False)), *gaussian(4), None


@case(CASES)
def log_softmax_output() -> Built:
    """Outputs that are coupled with each other, over classes."""
    return nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 3), nn.LogSoftmax(dim=-1)), *gaussian(4), None


@case(CASES)
def dropout_modules() -> Built:
    """Handed over in training mode; measured in eval mode there is no noise."""
    layers = [nn.Linear(4, 7), nn.Dropout(0.5), nn.ReLU(), nn.AlphaDropout(0.3), nn.Linear(7, 2), nn.Dropout(0.9)]
    return nn.Sequential(*layers), *gaussian(4), None


@case(CASES)
def frozen_layers() -> Built:
    """requires_grad=False does not count, and the gradient passes through."""
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[2].bias.requires_grad_(True)
    return model, *gaussian(4), None


@case(CASES)
def frozen_bias_before_head() -> Built:
    """Only a bias of the last layer is frozen: Addmm with one trainable input."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model[2].bias.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    return model, *gaussian(4), None


@case(CASES)
def unused_parameter() -> Built:
    """A parameter and a whole layer that never enter the output: zero kernels, but present."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.used(x)

    return Net(forward, used=nn.Linear(4, 2), unused=nn.Linear(3, 3), spare=parameter(2)), *gaussian(4), None


@case(CASES)
def used_only_detached() -> Built:
    """A parameter that enters through detach() only; another one detached once and used once."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.fixed.detach() + x @ self.partly.detach() @ self.partly.T)
        return self.head(hidden)

    return Net(forward, fixed=parameter(4, 4), partly=parameter(4, 4), head=nn.Linear(4, 2)), *gaussian(4), None


@case(CASES)
def features_under_no_grad() -> Built:
    """The body requires grad but runs under no_grad."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = torch.relu(self.body(x))
        return self.head(features)

    return Net(forward, body=nn.Linear(4, 7), head=nn.Linear(7, 2)), *gaussian(4), None


@case(CASES)
def zero_initialized_head() -> Built:
    """All gradients before the head are exactly zero: they say nothing about where the sample is."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.init.zeros_(model[2].weight)
    return model, *gaussian(4), None


@case(CASES)
def dead_samples() -> Built:
    """Some samples reach no hidden unit: their gradients are exactly zero."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
    x, x2 = gaussian(4)
    x[1] = -x[1].abs()
    x[3] = -x[3].abs()
    x2[0] = 0.0
    return model, x, x2, None


@case(CASES)
def repeated_samples() -> Built:
    """Equal samples: a singular kernel, and equal rows that must not be merged."""
    x, x2 = gaussian(4)
    x[2] = x[0]
    x[4] = x[0]
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), x, x2, None


@case(CASES)
def transposed_output() -> Built:
    """The output is a non-contiguous view with the samples last in memory."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)).T.contiguous()[::2].T

    return Net(forward, body=nn.Linear(4, 5)), *gaussian(4), None


@case(CASES)
def equal_output_columns() -> Built:
    """The output is an expanded view: all columns share memory."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x).expand(-1, 3)

    return Net(forward, body=nn.Linear(4, 1)), *gaussian(4), None


@case(CASES)
def constant_output_column() -> Built:
    """One column depends on no sample, one on no parameter."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), self.constant.expand(len(x), 1), x[:, :1]], dim=1)

    return Net(forward, body=nn.Linear(4, 2), constant=parameter(1)), *gaussian(4), None


@case(CASES)
def penalty_added_to_output() -> Built:
    """A norm of the weights is added to every output: a sample-free 0-d term."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x) + 0.1 * (self.body.weight**2).sum()

    return Net(forward, body=nn.Linear(4, 3)), *gaussian(4), None


@case(CASES)
def image_flattened_in_the_model() -> Built:
    """Linear on flattened images, and on their rows with the batch axis in the middle."""

    def forward(self: Net, x: Tensor) -> Tensor:
        rows = torch.tanh(self.per_row(x.transpose(0, 1)))
        return self.head(torch.cat([x.flatten(1), rows.transpose(0, 1).flatten(1)], dim=1))

    return Net(forward, per_row=nn.Linear(3, 2), head=nn.Linear(20, 2)), *gaussian(4, 3), None


@case(CASES)
def identity_input_gradient() -> Built:
    """The input itself requires grad, as after an earlier attribution."""
    x, x2 = gaussian(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), x.requires_grad_(), x2.requires_grad_(), None


@case(CASES, tolerance=1e-6)
def mixed_trainable_dtypes() -> Built:
    """Half of the parameters in float32, half in float64."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.float())).double())

    return Net(forward, first=nn.Linear(4, 6).float(), second=nn.Linear(6, 2)), *gaussian(4), None


@case(CASES, tolerance=1e-6)
def casts_to_float32_inside() -> Built:
    """The middle is computed in float32 from float64 parameters."""

    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        return self.second(torch.tanh(hidden).double())

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)), *gaussian(4), None
