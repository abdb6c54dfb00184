"""Speed limited optimization: every tensor moves at a speed of its own, whatever its gradient's size.

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

    Each parameter is divided by the Frobenius norm of its own gradient, so that `lr * speed` is the distance it moves
    in a step (less where |g| is not large against `eps`). `speed`, C_l in the paper, is an option of each parameter
    group; :func:`featlearn.steer.speed_groups` builds the groups from layer names. A layer with a large speed among
    slow ones is forced away from its initial weights, and its centered neural feature correlation takes over.

    There is no momentum and no weight decay. At `eps=0` steps do not shrink near a minimum: decay the learning rate
    or give an `eps` (0.1 in Beaglehole et al. 2024, App. I).

    Errata: Beaglehole et al. 2024, Sec. 5.2, prints + (ascent), here -. App. J prints "dividing by eps |grad|", here
    eps + |grad|, as in App. I; taken literally it destroys the network.

    **keep_output_scale** goes beyond the paper: Xu & Ziyin 2024, Sec. 3.4, ask for algorithms that align layers while
    the scale of the output changes little. Each weight tensor (two axes or more) then turns on the sphere it lies on:
    its gradient is projected to t = g - <g, W> W / |W|^2, the step is W - lr * speed * t / (eps + |t|), and the result
    is multiplied back to the norm that W had at its first step. Conserved: the Frobenius norm of every weight tensor.
    In a network that is homogeneous in each weight (ReLU or linear, no biases) the output is the product of these norms
    times a function of directions alone: the rescaling of Xu & Ziyin 2024, Sec. 3.3 is switched off, and the network
    can learn only by alignment or disalignment of layers. Not conserved: the outputs themselves. The target then
    determines how aligned the layers become: large initial norms need little alignment, small ones much, and norms too
    small for the target cannot fit it. Tensors with fewer than two axes (biases, gains of norms) take the plain step. A
    weight of zero could never move and is refused.

    Args:
        params: parameters, named parameters or group dictionaries, as for any optimizer of torch.
        lr: learning rate, a number >= 0.
        eps: added to each norm, >= 0.
        speed: of groups that do not give their own.
        keep_output_scale: as above; also an option of each group.
        foreach: step many tensors at once, with more memory, rather than one after the other; None does so on
            accelerators. The same numbers to rounding.

    A gradient of None or zero moves nothing, also at `eps=0`; norms are taken in float64 where the device has it, so
    that small gradients do not vanish in them. Sparse gradients are made dense. Complex parameters are refused. The
    state holds the norms that are kept, and nothing else. Each process divides by the norm of the tensor that it
    holds: not for parameters that are flattened and cut into shards.
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
        defaults = {
            "lr": lr,
            "eps": eps,
            "speed": speed,
            "keep_output_scale": keep_output_scale,
            "foreach": foreach,
        }
        refuse_bad_options(defaults)
        super().__init__(checked_parameters(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, `{"params": ..., "speed": ...}`; options that it does not give take their defaults."""
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
        """Move every parameter that has a gradient; `closure` is called first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            move(group, self.state)
        return loss


def move(group: dict[str, Any], state: MutableMapping[Tensor, Any]) -> None:
    """One step of one parameter group, by its lr, speed, eps, keep_output_scale and foreach."""
    distance, eps, together = group["lr"] * group["speed"], group["eps"], group["foreach"]
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for parameter in cast(list[Tensor], group["params"]):
        if parameter.grad is not None:
            kept = group["keep_output_scale"] and parameter.dim() > 1
            kinds.setdefault((parameter.device, parameter.dtype, kept), []).append(parameter)
    for (device, _, kept), alike in kinds.items():
        foreach = device.type != "cpu" if together is None else together
        for some in [alike] if foreach else [[parameter] for parameter in alike]:
            if kept:
                _turn(some, _radii(some, state), distance, eps)
            else:
                _walk(some, distance, eps)


def _walk(parameters: list[Tensor], distance: float, eps: float) -> None:
    """W <- W - distance g / (eps + |g|)."""
    gradients = [_gradient(parameter) for parameter in parameters]
    total = _norms(gradients) + eps
    # Where both are zero nothing is to be divided: a gradient of zero moves nothing.
    divisors = torch.where(total < torch.finfo(gradients[0].dtype).tiny, 1.0, total).unbind()
    add_quotients(parameters, gradients, divisors, -distance)


def _turn(weights: list[Tensor], radii: list[float], distance: float, eps: float) -> None:
    """A step along the sphere |W| = radius: against t = g - <g, W> W / |W|^2, then back to the radius."""
    gradients = [_gradient(weight) for weight in weights]
    starts = [weight.to(gradient.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
    squares = _norms(starts).square()
    inner = torch.stack([(g * w).sum(dtype=squares.dtype) for g, w in zip(gradients, starts, strict=True)])
    radial = (-inner / squares).unbind()
    tangents = [torch.addcmul(g, w, r) for g, w, r in zip(gradients, starts, radial, strict=True)]
    size, limits = _norms(tangents), torch.finfo(gradients[0].dtype)
    # What a gradient along W leaves is rounding, not a direction; and the quotient is to stay in range.
    directed = (size > 8 * limits.eps * _norms(gradients)) & (size > distance * limits.tiny)
    rates = torch.where(directed, -distance / (eps + size), 0.0).unbind()
    moved = [torch.addcmul(w, t, rate) for w, t, rate in zip(starts, tangents, rates, strict=True)]
    back = (squares.new_tensor(radii) / _norms(moved)).unbind()
    for weight, new, factor in zip(weights, moved, back, strict=True):
        weight.copy_(new * factor)


def _radii(weights: list[Tensor], state: MutableMapping[Tensor, Any]) -> list[float]:
    """The norm of every weight when it was first stepped."""
    for weight in weights:
        if "norm" not in state[weight]:
            # A number, since torch rounds the tensors of a state to the precision of the parameter.
            state[weight]["norm"] = float(_norms([weight]))
    return [state[weight]["norm"] for weight in weights]


def _gradient(parameter: Tensor) -> Tensor:
    """Its gradient: dense, and in single precision at least, where a norm can be told from zero and infinity."""
    gradient = cast(Tensor, parameter.grad)
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return dense if dense.dtype in (torch.float32, torch.float64) else dense.float()


def _norms(tensors: list[Tensor]) -> Tensor:
    """Frobenius norms, (n,)."""
    # The squares of float32 numbers below 1e-19 vanish in float32: gradients of deep networks with small weights.
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    if len(tensors) == 1:
        single: Tensor = torch.linalg.vector_norm(tensors[0], dtype=dtype)
        return single[None]
    return torch.stack(norms(tensors, 2, dtype))


def checked_parameters(params: Any) -> list[Any]:
    """Parameters, named parameters or groups as a list."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, dict | set | str) or not isinstance(params, Iterable):
        raise InputTypeError(
            f"params is {type(params).__name__}, expected parameters or a list of groups; pass model.parameters() or "
            "featlearn.steer.speed_groups(model, speeds)"
        )
    listed = list(params)
    if not listed:
        raise InputValueError("params is empty, expected at least one parameter; a generator can be read only once")
    return listed


def refuse_bad_options(options: dict[str, Any]) -> None:
    """Options of a group that are not numbers >= 0 or not switches."""
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
    """Parameters that cannot be stepped."""
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputTypeError(f"a parameter is {type(tensor).__name__}, expected a tensor; pass model.parameters()")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise InputValueError("a parameter is twice in one group and would be stepped twice; pass each once")
    for tensor in tensors:
        described = f"a parameter of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
        if not tensor.is_floating_point():
            raise InputTypeError(f"{described} was given, expected real floating-point numbers; leave it out")
        if keep and tensor.dim() > 1 and tensor.requires_grad and not tensor.detach().any():
            raise InputValueError(
                f"{described} is zero, and keep_output_scale=True would keep it so; initialize it, or put it in a "
                "group with keep_output_scale=False"
            )
