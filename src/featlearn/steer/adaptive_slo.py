"""Speed limited optimization that boosts the layer with the least feature learning.

See Beaglehole et al. 2024, App. J.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from featlearn.errors import InputTypeError, InputValueError
from featlearn.quantities.neural_features import neural_features
from featlearn.signatures import name_keywords
from featlearn.steer.slo import move, refuse_bad_options, refuse_bad_tensors

__all__ = ["AdaptiveSLO", "hidden_correlations"]

Measure = Callable[[nn.Module, Any], Mapping[str, float]]


@name_keywords()
def hidden_correlations(
    model: nn.Module, probe: Any, *, dtype: torch.dtype | None = torch.float64, **options: Any
) -> dict[str, float]:
    """Compute the uncentered neural feature correlation (UC-NFC) of every hidden layer, by layer name.

    The readout is excluded: its correlation is always 1. The default dtype is float64: in long runs, some ReLU input
    comes so close to zero that float32 cannot resolve its sign, and the measurement raises an error. `options` go to
    :func:`featlearn.neural_features` (`readout`, `outputs`, `layers`).
    """
    features = neural_features(model, probe, dtype=dtype, **options)
    return {name: float(layer.uncentered) for name, layer in features.items() if not layer.is_readout}


class AdaptiveSLO(Optimizer):
    """Adaptive speed limited optimization (Beaglehole et al. 2024, App. J).

    Before a step the UC-NFC of every hidden layer is measured on `probe`. The weight of the layer where it is smallest
    moves with speed `boost`. All other parameters (other weights, readout, biases, norms) move with 1 / boost: W <- W -
    lr * speed * g / (eps + |g|_F), tensor by tensor.

    Erratum: App. J prints "dividing by eps |grad|"; here eps + |grad|, as in App. I. The printed formula, with eps =
        0.01, destroys the network.

    In our trials of the paper's experiment (Fig. 12), the *lowest* correlation of a layer exceeded that of gradient
    descent on every seed. But layers did not become equal, and where gradient descent trained at all, its test error
    was lower. See docs/how-to/steer-with-slo.md.

    Args:
        model: Network; all trainable parameters are optimized.
        probe: Inputs to measure on.
        lr: Learning rate. In a step, one weight moves by lr * boost, the other parameters by lr / boost.
        boost: Number s of the paper, >= 1.
        eps: Number >= 0 added to each norm.
        every: Number of steps between measurements.
        measure: Function `measure(model, probe)` that returns numbers by layer name; the smallest is boosted. The
            weight of a layer is `name.weight`. By default `hidden_correlations`;
            `functools.partial(hidden_correlations, readout=...)` passes options on. Queries, keys, and values that
            share a tensor move together.

    Layers with undefined correlation (nan: no gradient reaches them) are skipped. If all are undefined, none is
    boosted. Each parameter has a separate group with its `name`; `param_groups[i]["speed"]` is its latest speed.
    `state_dict()` allows an exact resume; it does not contain the model or the probe.
    """

    @name_keywords()
    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        lr: float,
        *,
        boost: float = 20.0,
        eps: float = 0.01,
        every: int = 1,
        measure: Measure = hidden_correlations,
    ):
        if not isinstance(model, nn.Module):
            raise InputTypeError(f"model is {type(model).__name__}, expected an nn.Module")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputValueError(f"every is {every!r}, expected a whole number of steps >= 1")
        if isinstance(boost, bool) or not isinstance(boost, int | float):
            raise InputTypeError(f"boost is {boost!r}, expected a number >= 1")
        if not 1 <= boost < math.inf:
            raise InputValueError(f"boost is {boost!r}, expected a number >= 1")
        groups = [{"params": [p], "name": name} for name, p in model.named_parameters() if p.requires_grad]
        if not groups:
            raise InputValueError(
                "the model has no trainable parameters, expected at least one with requires_grad=True"
            )
        speeds = {"speed": 1 / boost, "boost": float(boost), "every": every, "steps": 0}
        super().__init__(groups, {"lr": lr, "eps": eps, "keep_output_scale": False, "foreach": None} | speeds)
        self.model, self.probe, self.measure = model, probe, measure

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add one parameter of the model, `{"params": [p], "name": "layer.weight"}`."""
        group = self.defaults | param_group
        if "name" not in group or isinstance(group["params"], torch.Tensor) or len(group["params"]) != 1:
            raise InputValueError("expected a list of one parameter, and its 'name' in the model, in each group")
        refuse_bad_options(group)
        refuse_bad_tensors(group["params"], keep=False)
        super().add_param_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Call `closure` with gradients enabled, measure if due, and take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.param_groups[0]["steps"] % self.param_groups[0]["every"] == 0:
            self._choose()
        for group in self.param_groups:
            move(group, self.state)
            group["steps"] += 1
        return loss

    def _choose(self) -> None:
        """Set the speed of the layer with the smallest correlation to `boost`, and all others to 1 / boost."""
        with torch.enable_grad():
            correlations = self.measure(self.model, self.probe)
        if not correlations:
            raise InputValueError("no hidden layer was measured, expected at least one besides the readout")
        defined = {name: value for name, value in correlations.items() if not math.isnan(value)}
        boosted = self._weights(min(defined, key=defined.__getitem__)) if defined else []
        for group in self.param_groups:
            group["speed"] = group["boost"] if group["name"] in boosted else 1 / group["boost"]

    def _weights(self, layer: str) -> list[str]:
        """Return parameters of a measured layer; `attention.q` may be part of the single weight of `attention`."""
        owned: dict[str, list[str]] = {}
        for group in self.param_groups:
            if group["params"][0].dim() > 1:  # exclude biases and gains
                owner = group["name"].rpartition(".")[0].partition(".parametrizations.")[0]
                owned.setdefault(owner, []).append(group["name"])
        parent_weights = owned.get(layer.rpartition(".")[0], [])
        weights = owned.get(layer, parent_weights if len(parent_weights) == 1 else [])
        if not weights:
            raise InputValueError(
                f"the layer to boost, {layer!r}, has no trainable weight, expected a module of the model with a "
                "weight; use a module per weight, or pass a measure that excludes this layer"
            )
        return weights
