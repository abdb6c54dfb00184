"""The rates of the update an optimizer is about to make: eta_j in sum_j eta_j d_j f d_j f'.

See Atanasov et al. 2022, Eq. 91.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from featlearn.contraction.factors import Dense, Gradients
from featlearn.errors import InputTypeError, InputValueError, UnsupportedModelError
from featlearn.planning.plan import Rate

SUPPORTED = (SGD, Adam, AdamW, RMSprop, Adagrad)


def step_rates(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Rate]:
    """The rate of every parameter; 0 for those the optimizer does not hold.

    Diagonal preconditioners only: SGD with groups, Adam, AdamW, RMSprop, Adagrad. The second moment is taken as it
    will stand after the step: advanced by `.grad` where there is one (call between `backward()` and `step()`), as it
    stands where there is none. Momentum and weight decay are not part of the update; where torch adds weight decay to
    the gradient (all but AdamW) it is part of the second moment.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputTypeError(f"optimizer is {optimizer!r}, expected a torch.optim.Optimizer")
    if type(optimizer) not in SUPPORTED:  # a subclass may make another update
        kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
        raise InputTypeError(
            f"optimizer is {type(optimizer).__name__}, expected exactly one of {kinds}; the step "
            "of another class, or of a subclass, may be another"
        )
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in parameters.values()):
        raise InputValueError(
            "the optimizer holds none of the parameters that are measured; expected one built from this model's "
            "parameters()"
        )
    return {name: _rate(optimizer, held[id(p)], p, name) if id(p) in held else 0.0 for name, p in parameters.items()}


def _rate(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, name: str) -> Rate:
    if group.get("maximize"):
        raise InputValueError("the optimizer maximizes; expected one that minimizes a loss")
    lr = float(group["lr"])
    if lr < 0:
        raise InputValueError(f"a group of the optimizer has lr={lr}, expected a learning rate >= 0")
    if type(optimizer) is SGD:
        return lr
    if parameter.is_complex():
        raise UnsupportedModelError(f"{name} is complex; only SGD has a kernel for complex parameters")
    state = optimizer.state.get(parameter, {})
    gradient = None if parameter.grad is None else parameter.grad.detach()
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.to_dense()
    decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    if gradient is not None and group.get("weight_decay") and not decoupled:
        gradient = gradient + group["weight_decay"] * parameter.detach()  # it enters the second moment
    if not state or (isinstance(optimizer, Adagrad) and not float(state["step"]) and gradient is None):
        raise InputValueError(
            f"the optimizer has no state for {name} yet; take one step with it first, then measure its kernel"
        )
    if isinstance(optimizer, Adagrad):
        return _adagrad(group, state, gradient, lr)
    if isinstance(optimizer, RMSprop):
        return _rmsprop(group, state, gradient, lr)
    return _adam(group, state, gradient, lr)


def _adam(group: dict[str, Any], state: dict[str, Any], gradient: Tensor | None, lr: float) -> Tensor:
    decay, step, moment = group["betas"][1], float(state["step"]), state["exp_avg_sq"].detach()
    if gradient is not None:
        step, moment = step + 1, decay * moment + (1 - decay) * gradient**2
    if group["amsgrad"]:
        moment = torch.maximum(moment, state["max_exp_avg_sq"].detach())
    rate: Tensor = lr / ((moment / (1 - decay**step)).sqrt() + group["eps"])
    return rate


def _rmsprop(group: dict[str, Any], state: dict[str, Any], gradient: Tensor | None, lr: float) -> Tensor:
    decay, moment = group["alpha"], state["square_avg"].detach()
    mean = state["grad_avg"].detach() if group["centered"] else None
    if gradient is not None:
        moment = decay * moment + (1 - decay) * gradient**2
        mean = None if mean is None else decay * mean + (1 - decay) * gradient
    rate: Tensor = lr / ((moment if mean is None else moment - mean**2).sqrt() + group["eps"])
    return rate


def _adagrad(group: dict[str, Any], state: dict[str, Any], gradient: Tensor | None, lr: float) -> Tensor:
    total, step = state["sum"].detach(), float(state["step"])
    if gradient is not None:
        total, step = total + gradient**2, step + 1
    rate: Tensor = lr / (1 + (step - 1) * group["lr_decay"]) / (total.sqrt() + group["eps"])
    return rate


def with_rates(captured: Iterator[tuple[str, Gradients]], rates: Mapping[str, Rate]) -> Iterator[tuple[str, Gradients]]:
    """Gradients times the square root of the rate, which stands on either side of the kernel."""
    for name, gradients in captured:
        rate = rates.get(name, 1.0)
        if isinstance(gradients, Dense) and isinstance(rate, Tensor):
            yield name, Dense(gradients.gradient * rate.flatten().to(gradients.gradient).sqrt())
        elif rate == 1.0:
            yield name, gradients
        elif isinstance(gradients, Dense):
            yield name, Dense(gradients.gradient * rate**0.5)
        else:
            assert isinstance(rate, float)
            parts = tuple(replace(part, grads=part.grads * rate**0.5) for part in gradients.parts)
            yield name, replace(gradients, parts=parts)
        del gradients
