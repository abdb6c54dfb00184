"""Speed limited optimization: every tensor moves at its own speed, independent of its gradient's norm.

See Beaglehole et al. 2024, Sec. 5.
"""

import math
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from featlearn.errors import InputTypeError, InputValueError
from featlearn.signatures import name_keywords
from featlearn.torch_internals import add_quotients, norms

__all__ = ["SLO"]


class SLO(Optimizer):
    r"""Speed limited optimization: W <- W - lr * speed * g / (eps + |g|_F), tensor by tensor.

    See Beaglehole et al. 2024, Sec. 5.2.

    Each gradient is divided by its Frobenius norm, so that `lr * speed` is the distance moved in a step (less if |g| is
    not large compared to `eps`). `speed`, C_l in the paper, is an option of each parameter group;
    :func:`featlearn.steer.speed_groups` builds the groups from layer names. A fast layer among slow ones moves away
    from its initial weights, and its centered neural feature correlation dominates.

    There is no momentum and no weight decay. At `eps=0` steps do not shrink near a minimum: decay the learning rate
    or give an `eps` (0.1 in Beaglehole et al. 2024, App. I).

    Errata: Beaglehole et al. 2024, Sec. 5.2, prints + (ascent), here -. App. J prints "dividing by eps |grad|", here
    eps + |grad|, as in App. I; the printed formula destroys the network.

    **keep_output_scale** goes beyond the paper: Xu & Ziyin 2024, Sec. 3.4, call for algorithms that align layers
    without changing the scale of the output much. Each weight tensor (two axes or more) then moves on a sphere of fixed
    norm: its gradient is projected to t = g - <g, W> W / |W|^2, the step is W - lr * speed * t / (eps + |t|), and the
    result is rescaled to the norm that W had at its first step. The Frobenius norm of every weight tensor is thus
    conserved; the outputs are not. In a network that is homogeneous in each weight (ReLU or linear, no biases), the
    output is the product of these norms times a function of directions. Rescaling (Xu & Ziyin 2024, Sec. 3.3) is thus
    excluded, and the network can learn only by alignment or disalignment of layers. The target determines the
    alignment: large initial norms need little alignment, small norms much, and norms too small for the target cannot
    fit it. Tensors with fewer than two axes (biases, gains of norms) take the plain step. Zero weights could never
    move, and raise an error.

    Args:
        params: Parameters, named parameters, or group dictionaries, as for torch optimizers.
        lr: Learning rate, a number >= 0.
        eps: Number >= 0 added to each norm.
        speed: Speed of groups without the option `speed`.
        keep_output_scale: As above; also an option of each group.
        foreach: Step many tensors at once, which is faster and needs more memory; by default on accelerators only.
            Results agree up to rounding.

    Parameters with a gradient of None or zero do not move, also at `eps=0`. Norms are computed in float64 if the device
    supports it, so that small gradients do not underflow. Sparse gradients are converted to dense. Complex parameters
    raise an error. The state contains only the norms to conserve. Each process divides by the norm of its local tensor:
    do not use SLO on flattened and sharded parameters.
    """

    @name_keywords()
    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        eps: float = 0.0,
        speed: float = 1.0,
        keep_output_scale: bool = False,
        foreach: bool | None = None,
    ):
        defaults = {"lr": lr, "eps": eps, "speed": speed, "keep_output_scale": keep_output_scale, "foreach": foreach}
        refuse_bad_options(defaults)
        super().__init__(checked_parameters(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, `{"params": ..., "speed": ...}`; missing options have their defaults."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise InputTypeError(f"param_group is {param_group!r}, expected a dictionary with 'params'")
        group = param_group | {"params": checked_parameters(param_group["params"])}
        options = self.defaults | group
        refuse_bad_options(options)
        refuse_bad_tensors(group["params"], keep=options["keep_output_scale"])
        super().add_param_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Call `closure` with gradients enabled, and move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            move(group, self.state)
        return loss


def move(group: dict[str, Any], state: MutableMapping[Tensor, Any]) -> None:
    """Take a step for a parameter group, with its lr, speed, eps, keep_output_scale and foreach."""
    distance, eps, use_foreach = group["lr"] * group["speed"], group["eps"], group["foreach"]
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for parameter in cast(list[Tensor], group["params"]):
        if parameter.grad is not None:
            keep_norm = group["keep_output_scale"] and parameter.dim() > 1
            kinds.setdefault((parameter.device, parameter.dtype, keep_norm), []).append(parameter)
    for (device, _, keep_norm), parameters in kinds.items():
        foreach = device.type != "cpu" if use_foreach is None else use_foreach
        for batch in [parameters] if foreach else [[parameter] for parameter in parameters]:
            if keep_norm:
                _step_on_sphere(batch, _radii(batch, state), distance, eps)
            else:
                _step(batch, distance, eps)


def _step(parameters: list[Tensor], distance: float, eps: float) -> None:
    """Step W <- W - distance g / (eps + |g|)."""
    gradients = [_gradient(parameter) for parameter in parameters]
    total = _norms(gradients) + eps
    # Avoid 0 / 0: a zero gradient moves nothing.
    divisors = torch.where(total < torch.finfo(gradients[0].dtype).tiny, 1.0, total).unbind()
    add_quotients(parameters, gradients, divisors, -distance)


def _step_on_sphere(weights: list[Tensor], radii: list[float], distance: float, eps: float) -> None:
    """Step along the sphere |W| = radius: move against t = g - <g, W> W / |W|^2, then rescale to the radius."""
    gradients = [_gradient(weight) for weight in weights]
    starts = [weight.to(gradient.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
    squares = _norms(starts).square()
    inner = torch.stack([(g * w).sum(dtype=squares.dtype) for g, w in zip(gradients, starts, strict=True)])
    radial = (-inner / squares).unbind()
    tangents = [torch.addcmul(g, w, r) for g, w, r in zip(gradients, starts, radial, strict=True)]
    size, limits = _norms(tangents), torch.finfo(gradients[0].dtype)
    # Gradients along W leave only rounding errors; the second condition keeps the quotient in range.
    directed = (size > 8 * limits.eps * _norms(gradients)) & (size > distance * limits.tiny)
    rates = torch.where(directed, -distance / (eps + size), 0.0).unbind()
    moved = [torch.addcmul(w, t, rate) for w, t, rate in zip(starts, tangents, rates, strict=True)]
    rescaling = (squares.new_tensor(radii) / _norms(moved)).unbind()
    for weight, updated, factor in zip(weights, moved, rescaling, strict=True):
        weight.copy_(updated * factor)


def _radii(weights: list[Tensor], state: MutableMapping[Tensor, Any]) -> list[float]:
    """Return the norm of every weight at its first step."""
    for weight in weights:
        if "norm" not in state[weight]:
            # Stored as float: torch casts state tensors to the dtype of the parameter.
            state[weight]["norm"] = float(_norms([weight]))
    return [state[weight]["norm"] for weight in weights]


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient, dense and at least float32, so that its norm neither underflows nor overflows."""
    gradient = cast(Tensor, parameter.grad)
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return dense if dense.dtype in (torch.float32, torch.float64) else dense.float()


def _norms(tensors: list[Tensor]) -> Tensor:
    """Compute Frobenius norms, (n,)."""
    # Squares of float32 numbers below 1e-19 underflow, for example gradients of deep networks with small weights.
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    if len(tensors) == 1:
        single: Tensor = torch.linalg.vector_norm(tensors[0], dtype=dtype)
        return single[None]
    return torch.stack(norms(tensors, 2, dtype))


def checked_parameters(params: Any) -> list[Any]:
    """Return parameters, named parameters, or groups as a list."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, dict | set | str) or not isinstance(params, Iterable):
        raise InputTypeError(
            f"params is {type(params).__name__}, expected parameters or a list of groups; pass model.parameters() or "
            "featlearn.steer.speed_groups(model, speeds)"
        )
    parameters = list(params)
    if not parameters:
        raise InputValueError("params is empty, expected at least one parameter; a generator can be read only once")
    return parameters


def refuse_bad_options(options: dict[str, Any]) -> None:
    """Raise unless numbers of a group are >= 0 and flags are booleans."""
    for name in ("lr", "eps", "speed"):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputTypeError(f"{name} is {value!r}, expected a number >= 0; pass a float, also for a tensor")
        if not (math.isfinite(value) and value >= 0):
            raise InputValueError(f"{name} is {value!r}, expected a finite number >= 0")
    if not isinstance(options["keep_output_scale"], bool):
        raise InputTypeError(f"keep_output_scale is {options['keep_output_scale']!r}, expected True or False")
    if options["foreach"] is not None and not isinstance(options["foreach"], bool):
        raise InputTypeError(f"foreach is {options['foreach']!r}, expected True, False or None")


def refuse_bad_tensors(listed: list[Any], *, keep: bool) -> None:
    """Raise for parameters that cannot be optimized."""
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputTypeError(f"a parameter is {type(tensor).__name__}, expected a tensor; pass model.parameters()")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise InputValueError("a parameter appears twice in a group; pass each parameter once")
    for tensor in tensors:
        described = f"a parameter of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        if not tensor.is_floating_point():
            raise InputTypeError(f"{described} was passed, expected real floating-point numbers; exclude it")
        if keep and tensor.dim() > 1 and tensor.requires_grad and not tensor.detach().any():
            raise InputValueError(
                f"{described} is zero, and keep_output_scale=True would keep it so; initialize it, or put it in a "
                "group with keep_output_scale=False"
            )
