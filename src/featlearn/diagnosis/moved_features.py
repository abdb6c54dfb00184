"""How far the features moved: what enters the last trained map, and what enters each layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from featlearn.diagnosis.run_data import RunData
from featlearn.linalg.estimate import Estimate


@dataclass(frozen=True, eq=False)
class MovedFeatures(Estimate):
    """Relative change of what enters the last trained map, centered over the samples."""

    cka: float = math.nan
    """Centered kernel alignment of the first and the last representation; 1 if they agree."""
    by_weights: float = math.nan
    """The part that weights alone make, with the buffers of now; the whole if no buffer changed."""
    by_layer: Mapping[str, float] = field(default_factory=dict)
    """Layer name -> relative change of what enters it."""


def moved_features(run_data: RunData) -> MovedFeatures:
    """Return the recorded change at the end of a run; nan if it was not recorded."""
    total, cka = recorded_estimate(run_data, "features/moved"), recorded_estimate(run_data, "features/cka")
    by_weights = recorded_estimate(run_data, "features/moved_by_weights")
    layers = {}
    for name in run_data.scalar_names:
        layer = name.removeprefix("features/").removesuffix("/moved")
        curve = run_data.curve(name, least=1) if name == f"features/{layer}/moved" else None
        if curve is not None:
            layers[layer] = curve.last
    return MovedFeatures(
        float(total),
        float(total.stderr),
        total.samples,
        cka=float(cka),
        by_weights=float(total) if math.isnan(float(by_weights)) else float(by_weights),
        by_layer=layers,
    )


def recorded_estimate(run_data: RunData, name: str) -> Estimate:
    """Return the last value of a scalar, with the error recorded beside it; nan if it was not recorded."""
    value, error = (run_data.curve(scalar, least=1) for scalar in (name, f"{name}_error"))
    if value is None:
        return Estimate(math.nan, math.nan, 1)
    return Estimate(value.last, math.nan if error is None else error.last, max(run_data.samples, 1))
