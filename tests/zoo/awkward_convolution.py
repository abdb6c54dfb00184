"""Convolutions of every kind, normalization layers and other layers with channels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian, parameter

CASES: list[Case] = []


@case(CASES)
def conv1d() -> Built:
    """Positions along one axis, mean over them."""
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()), *gaussian(2, 7), None


@case(CASES)
def conv2d_then_flatten() -> Built:
    """Convolution, pooling, flatten, linear."""
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 2)]
    return nn.Sequential(*layers), *gaussian(2, 4, 6), None


@case(CASES)
def conv3d() -> Built:
    """Three spatial axes of unequal size."""
    layers = [nn.Conv3d(2, 3, (2, 1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)]
    return nn.Sequential(*layers), *gaussian(2, 3, 2, 3), None


@case(CASES)
def conv2d_without_bias_strided_dilated() -> Built:
    """Stride, dilation and padding, all different in the two axes; some pixels are never read."""
    conv = nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0), dilation=(1, 2), bias=False)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), *gaussian(2, 5, 7), None


@case(CASES)
def grouped_convolution() -> Built:
    """Two groups."""
    layers = [nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)]
    return nn.Sequential(*layers), *gaussian(4, 3, 3), None


@case(CASES)
def depthwise_separable_convolution() -> Built:
    """As many groups as channels, with a multiplier, then 1 x 1."""
    layers = [
        nn.Conv2d(3, 6, 3, padding=1, groups=3),
        nn.SiLU(),
        nn.Conv2d(6, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers), *gaussian(3, 4, 3), None


@case(CASES)
def channels_equal_samples() -> Built:
    """P = channels = height = width."""
    layers = [nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten(), nn.Linear(64, 2)]
    return nn.Sequential(*layers), *gaussian(4, 4, 4, P=4), None


@case(CASES)
def circular_padding() -> Built:
    """The layer pads by itself before the convolution: wrapped around."""
    conv = nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular")
    return (
        nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(6, 2)),
        *gaussian(2, 4, 5),
        None,
    )


@case(CASES)
def reflected_and_replicated_padding() -> Built:
    """The layer pads by itself: mirrored, then repeated."""
    first = nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect")
    second = nn.Conv1d(3, 2, 4, padding=1, padding_mode="replicate")
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(14, 3)), *gaussian(2, 6), None


@case(CASES)
def same_padding_with_even_kernel() -> Built:
    """'same' padding that is not symmetric."""
    conv = nn.Conv2d(2, 3, (4, 2), padding="same", dilation=(1, 1))
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)), *gaussian(2, 4, 3), None


@case(CASES)
def transposed_convolution() -> Built:
    """The weight's channel axes are swapped; stride and output padding."""
    conv = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1)
    return (
        nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        *gaussian(3, 3, 2),
        None,
    )


@case(CASES)
def grouped_transposed_convolution() -> Built:
    """Transposed, grouped and dilated, in one dimension."""
    conv = nn.ConvTranspose1d(4, 6, 3, stride=3, groups=2, dilation=2, output_padding=2, bias=False)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(96, 2)), *gaussian(4, 4), None


@case(CASES)
def transposed_convolution_3d() -> Built:
    """Transposed in three dimensions."""
    conv = nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1))
    return nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten()), *gaussian(2, 2, 2, 3), None


@case(CASES)
def convolution_by_unfold() -> Built:
    """Patches by unfold, then a matrix product with the weight on the left."""

    def forward(self: Net, x: Tensor) -> Tensor:
        patches = F.unfold(x, kernel_size=3, padding=1)
        maps = torch.tanh(self.weight.flatten(1) @ patches + self.bias[:, None])
        return self.head(maps.mean(2))

    return Net(forward, weight=parameter(5, 2, 3, 3), bias=parameter(5), head=nn.Linear(5, 3)), *gaussian(2, 4, 3), None


@case(CASES)
def pixel_shuffle() -> Built:
    """Channels become positions and back."""
    layers = [nn.Conv2d(2, 8, 2), nn.PixelShuffle(2), nn.Tanh(), nn.Conv2d(2, 1, 3), nn.PixelUnshuffle(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 2)), *gaussian(2, 4, 3), None


@case(CASES)
def upsampling_unet() -> Built:
    """Down, up by interpolation, skip by concatenation of channels."""

    def forward(self: Net, x: Tensor) -> Tensor:
        down = torch.relu(self.down(x))
        up = F.interpolate(down, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([up, x], dim=1)).mean((2, 3))

    return Net(forward, down=nn.Conv2d(2, 3, 2, stride=2), out=nn.Conv2d(5, 2, 3, padding=1)), *gaussian(2, 4, 6), None


@case(CASES)
def channels_last_memory() -> Built:
    """Channels-last weights and activations."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.body(x.contiguous(memory_format=torch.channels_last))

    body = nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 2))
    return Net(forward, body=body.to(memory_format=torch.channels_last)), *gaussian(3, 3, 4), None


@case(CASES)
def convolution_called_on_two_scales() -> Built:
    """One convolution used on maps of different sizes."""

    def forward(self: Net, x: Tensor) -> Tensor:
        large = torch.tanh(self.conv(x)).mean((2, 3))
        small = torch.tanh(self.conv(F.avg_pool2d(x, 2))).mean((2, 3))
        return self.head(large * small)

    return Net(forward, conv=nn.Conv2d(2, 3, 2, padding=1), head=nn.Linear(3, 2)), *gaussian(2, 4, 6), None


@case(CASES)
def samples_along_a_spatial_axis() -> Built:
    """The batch is laid along the height of one image, kernels have height one."""

    def forward(self: Net, x: Tensor) -> Tensor:
        image = x.permute(1, 0, 2).unsqueeze(0)
        return torch.tanh(self.conv(image)).squeeze(0).mean(2).T

    return Net(forward, conv=nn.Conv2d(2, 3, (1, 3))), *gaussian(2, 6), None


@case(CASES)
def unbatched_convolution_over_samples() -> Built:
    """Samples are the channels of a depthwise-like pass: all share one kernel, expanded to P groups."""

    def forward(self: Net, x: Tensor) -> Tensor:
        kernels = self.kernel.expand(len(x), 1, 3)
        return self.head(torch.tanh(F.conv1d(x.unsqueeze(0), kernels, groups=len(x)).squeeze(0)))

    return Net(forward, kernel=parameter(1, 1, 3), head=nn.Linear(4, 2)), *gaussian(6), None


@case(CASES)
def modulated_convolution() -> Built:
    """Each sample has its own kernel, done as one convolution with P groups."""

    def forward(self: Net, x: Tensor) -> Tensor:
        style = self.style(x.mean((2, 3)))
        kernels = (self.weight * style[:, None, :, None, None]).flatten(0, 1)
        maps = F.conv2d(x.flatten(0, 1).unsqueeze(0), kernels, padding=1, groups=len(x))
        return torch.tanh(maps).reshape(len(x), 3, -1).mean(2)

    return Net(forward, style=nn.Linear(2, 2), weight=parameter(3, 2, 3, 3)), *gaussian(2, 3, 4), None


@case(CASES)
def standardized_convolution_weight() -> Built:
    """Weight standardization: a sample-free function of the weight."""

    def forward(self: Net, x: Tensor) -> Tensor:
        weight = self.conv.weight
        centered = weight - weight.mean((1, 2, 3), keepdim=True)
        standardized = centered / (centered.std((1, 2, 3), keepdim=True) + 1e-5)
        return torch.tanh(F.conv2d(x, standardized, self.conv.bias)).mean((2, 3))

    return Net(forward, conv=nn.Conv2d(2, 3, 3)), *gaussian(2, 4, 5), None


@case(CASES)
def squeeze_and_excitation() -> Built:
    """Channel gates from pooled maps, broadcast over positions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        maps = self.conv(x)
        gates = torch.sigmoid(self.gate(maps.mean((2, 3))))
        return (maps * gates[:, :, None, None]).flatten(2).amax(2)

    return Net(forward, conv=nn.Conv2d(2, 3, 2), gate=nn.Linear(3, 3)), *gaussian(2, 4, 3), None


def with_statistics(*modules: nn.Module) -> nn.Sequential:
    """Give batch norms running statistics other than zero mean and unit variance."""
    model = nn.Sequential(*modules)
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model


def perturbed(model: nn.Module) -> nn.Module:
    """Move scales and shifts of normalization layers away from one and zero."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape))
    return model


@case(CASES)
def batch_norm_1d() -> Built:
    """Running statistics in eval mode do not couple samples."""
    model = with_statistics(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return perturbed(model), *gaussian(4), None


@case(CASES)
def batch_norm_1d_over_positions() -> Built:
    """BatchNorm1d on (P, channels, T)."""
    model = with_statistics(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2))
    return perturbed(model), *gaussian(2, 6), None


@case(CASES)
def batch_norm_2d() -> Built:
    """Convolution without bias and batch norm, twice, with in-place ReLU."""
    model = with_statistics(
        nn.Conv2d(2, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, 2, bias=False),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return perturbed(model), *gaussian(2, 4, 5), None


@case(CASES)
def batch_norm_without_affine() -> Built:
    """Batch norm without parameters of its own, and one in three dimensions."""
    model = with_statistics(
        nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)
    )
    return perturbed(model), *gaussian(2, 2, 3, 2), None


@case(CASES)
def layer_norm() -> Built:
    """Over the last axis, with positions."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x))).mean(1)

    return (
        Net(forward, body=nn.Linear(3, 6), norm=perturbed(nn.LayerNorm(6)), head=nn.Linear(6, 2)),
        *gaussian(4, 3),
        None,
    )


@case(CASES)
def layer_norm_over_two_axes() -> Built:
    """Normalized over (T, d), without bias; no axis of positions is left."""
    model = perturbed(nn.Sequential(nn.LayerNorm((4, 3), bias=False), nn.Flatten(), nn.Linear(12, 2)))
    return model, *gaussian(4, 3), None


@case(CASES)
def group_norm() -> Built:
    """Groups of channels."""
    model = nn.Sequential(nn.Conv2d(2, 6, 2), nn.GroupNorm(3, 6), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))
    return perturbed(model), *gaussian(2, 3, 4), None


@case(CASES)
def instance_norm_with_affine() -> Built:
    """Implemented as batch norm over the merged axes of samples and channels, with repeated scales."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
    )
    return perturbed(model), *gaussian(2, 3, 4), None


@case(CASES)
def instance_norm_with_running_statistics() -> Built:
    """Running statistics in eval mode; T = P."""
    model = with_statistics(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(10, 2))
    return perturbed(model), *gaussian(2, 5), None


@case(CASES)
def rms_norm() -> Built:
    """Over the last axis, as in language models."""
    model = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 2))
    return perturbed(model), *gaussian(4), None


@case(CASES)
def local_response_norm() -> Built:
    """Channels coupled within one sample."""
    model = nn.Sequential(nn.Conv2d(2, 5, 2), nn.LocalResponseNorm(3), nn.Flatten(), nn.Linear(20, 2))
    return model, *gaussian(2, 3, 3), None


@case(CASES)
def prelu_shared() -> Built:
    """One slope for everything."""
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 2)), *gaussian(4), None


@case(CASES)
def prelu_per_channel() -> Built:
    """A slope per channel, with positions; the number of channels equals P."""
    model = nn.Sequential(nn.Conv1d(2, 5, 2), nn.PReLU(5), nn.Flatten(), nn.Linear(20, 2), nn.PReLU(2))
    return perturbed(model), *gaussian(2, 5), None
