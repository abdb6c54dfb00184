"""Speed limited optimization that always drives the layer whose features are furthest behind.

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
    """Uncentered neural feature correlation (UC-NFC) of every hidden layer, by layer name.

    The readout is left out: its correlation is 1 whatever it has learned. Measured in double by default: in a long
    run some ReLU input comes so close to zero that single precision cannot resolve its sign, and the measurement
    raises an error. `options` go to :func:`featlearn.neural_features` (`readout`, `outputs`, `layers`).
    """
    features = neural_features(model, probe, dtype=dtype, **options)
    return {name: float(layer.uncentered) for name, layer in features.items() if not layer.is_readout}


class AdaptiveSLO(Optimizer):
    """Adaptive speed limited optimization (Beaglehole et al. 2024, App. J).

    Before a step the UC-NFC of every hidden layer is measured on `probe`. The weight of the layer where it is smallest
    moves with speed `boost`, every other parameter (other weights, readout, biases, norms) with 1 / boost:
    W <- W - lr * speed * g / (eps + |g|_F), tensor by tensor.

    Erratum: App. J prints "dividing by eps |grad|"; here eps + |grad|, as in App. I. Read literally, with eps = 0.01,
    it destroys the network.

    What to expect: in our trials of the paper's experiment (Fig. 12) the *lowest* correlation of a layer rose above
    that of gradient descent on every seed, but layers did not become equal, and where gradient descent trained at all
    its test error was lower. See docs/how-to/steer-with-slo.md.

    Args:
        model: the network; all of its trainable parameters are optimized.
        probe: inputs to measure on, whatever the model takes.
        lr: learning rate. The distance moved in a step is lr * boost for one weight and lr / boost for the others.
        boost: s of the paper, >= 1.
        eps: added to each norm, >= 0.
        every: measure again after so many steps; in between the same layer stays ahead.
        measure: `measure(model, probe)` gives the number to raise, for every layer that takes part, by layer name;
            its weight is what the module of that name owns, `name.weight`. By default `hidden_correlations`;
            `functools.partial(hidden_correlations, readout=...)` passes options on. Queries, keys and values that
            share one tensor move together.

    A layer whose correlation is undefined (nan: no gradient reaches it) is passed over; where all are, none is
    boosted. Each parameter is a group of its own, with its `name`; `param_groups[i]["speed"]` says how fast it last
    moved. `state_dict()` holds what is needed to go on, bit for bit; the model and the probe are not in it.
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
            raise InputTypeError(f"model is {type(model).__name__}, expected an nn.Module: its layers are measured")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputValueError(f"every is {every!r}, expected a whole number of steps >= 1")
        if isinstance(boost, bool) or not isinstance(boost, int | float):
            raise InputTypeError(f"boost is {boost!r}, expected a number >= 1")
        if not 1 <= boost < math.inf:
            raise InputValueError(f"boost is {boost!r}, expected >= 1: the layer that is behind is to move fastest")
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
            raise InputValueError("expected one parameter in a list, and its 'name' in the model, in each group")
        refuse_bad_options(group)
        refuse_bad_tensors(group["params"], keep=False)
        super().add_param_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Measure if it is time to, then move; `closure` is called first, with gradients enabled."""
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
        """Give the weight of the layer that is behind the speed `boost`, and all others 1 / boost."""
        with torch.enable_grad():
            correlations = self.measure(self.model, self.probe)
        if not correlations:
            raise InputValueError("no hidden layer was measured, expected at least one: a readout cannot be behind")
        defined = {name: value for name, value in correlations.items() if not math.isnan(value)}
        driven = self._weights(min(defined, key=defined.__getitem__)) if defined else []
        for group in self.param_groups:
            group["speed"] = group["boost"] if group["name"] in driven else 1 / group["boost"]

    def _weights(self, layer: str) -> list[str]:
        """The parameters behind a measured layer; `attention.q` may be a part of the one weight of `attention`."""
        owned: dict[str, list[str]] = {}
        for group in self.param_groups:
            if group["params"][0].dim() > 1:  # biases and gains are no weights
                owner = group["name"].rpartition(".")[0].partition(".parametrizations.")[0]
                owned.setdefault(owner, []).append(group["name"])
        whole = owned.get(layer.rpartition(".")[0], [])
        weights = owned.get(layer, whole if len(whole) == 1 else [])
        if not weights:
            raise InputValueError(
                f"the layer that is behind, {layer!r}, has no trainable weight of its own, expected a module of the "
                "model that owns it; give each weight its module, or pass a measure that leaves this layer out"
            )
        return weights
