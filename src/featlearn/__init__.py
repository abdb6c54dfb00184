"""Measure feature learning in PyTorch models: tangent kernels, kernel-task alignment and how they change in training.

The public names load on first use: ``import featlearn`` alone imports neither torch nor any submodule.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn import data as data
    from featlearn import dynamics as dynamics
    from featlearn import errors as errors
    from featlearn import integrations as integrations
    from featlearn import metrics as metrics
    from featlearn import ops as ops
    from featlearn import readouts as readouts
    from featlearn import record as record
    from featlearn import reporting as reporting
    from featlearn import steer as steer
    from featlearn import sweeps as sweeps
    from featlearn import theory as theory
    from featlearn import widths as widths
    from featlearn.citations import citation as citation
    from featlearn.contraction.tensor_sketch import Sketch as Sketch
    from featlearn.diagnosis.verdict import diagnose as diagnose
    from featlearn.errors import FeatlearnError as FeatlearnError
    from featlearn.gradients.directions import Directions as Directions
    from featlearn.linalg.estimate import Estimate as Estimate
    from featlearn.monitoring.checkpoints import watch_checkpoints as watch_checkpoints
    from featlearn.monitoring.entry import watch as watch
    from featlearn.ops.registry import register_rule as register_rule
    from featlearn.planning.plan import Plan as Plan
    from featlearn.quantities.alignment_estimate import estimate_alignment as estimate_alignment
    from featlearn.quantities.gradient_products import corrupted_agop as corrupted_agop
    from featlearn.quantities.gradient_products import egop as egop
    from featlearn.quantities.layer_alignment import layer_alignment as layer_alignment
    from featlearn.quantities.layer_balance import layer_balance as layer_balance
    from featlearn.quantities.linearization_gap import linearization_gap as linearization_gap
    from featlearn.quantities.neural_features import neural_features as neural_features
    from featlearn.quantities.ntk import ntk as ntk
    from featlearn.quantities.ntk_diagonal import ntk_diagonal as ntk_diagonal
    from featlearn.quantities.ntk_plan import plan as plan
    from featlearn.quantities.operator import NTKOperator as NTKOperator
    from featlearn.quantities.ptk import ptk as ptk
    from featlearn.quantities.representation import representation_kernels as representation_kernels
    from featlearn.quantities.velocity import feature_speed as feature_speed
    from featlearn.quantities.velocity import ntk_velocity as ntk_velocity
    from featlearn.record.reader import open_run as open_run
    from featlearn.reporting.page import report as report
    from featlearn.session import Session as Session
    from featlearn.steer.adaptive_slo import AdaptiveSLO as AdaptiveSLO
    from featlearn.steer.slo import SLO as SLO
    from featlearn.sweeps.entry import sweep as sweep
    from featlearn.sweeps.results import open_sweep as open_sweep
    from featlearn.widths.entry import width_check as width_check

__version__ = "0.1.0"

_HOME = {
    "AdaptiveSLO": "featlearn.steer.adaptive_slo",
    "Estimate": "featlearn.linalg.estimate",
    "FeatlearnError": "featlearn.errors",
    "NTKOperator": "featlearn.quantities.operator",
    "Plan": "featlearn.planning.plan",
    "Directions": "featlearn.gradients.directions",
    "Session": "featlearn.session",
    "SLO": "featlearn.steer.slo",
    "Sketch": "featlearn.contraction.tensor_sketch",
    "citation": "featlearn.citations",
    "corrupted_agop": "featlearn.quantities.gradient_products",
    "diagnose": "featlearn.diagnosis.verdict",
    "egop": "featlearn.quantities.gradient_products",
    "estimate_alignment": "featlearn.quantities.alignment_estimate",
    "feature_speed": "featlearn.quantities.velocity",
    "layer_alignment": "featlearn.quantities.layer_alignment",
    "layer_balance": "featlearn.quantities.layer_balance",
    "linearization_gap": "featlearn.quantities.linearization_gap",
    "neural_features": "featlearn.quantities.neural_features",
    "ntk": "featlearn.quantities.ntk",
    "ntk_diagonal": "featlearn.quantities.ntk_diagonal",
    "ntk_velocity": "featlearn.quantities.velocity",
    "open_run": "featlearn.record.reader",
    "open_sweep": "featlearn.sweeps.results",
    "plan": "featlearn.quantities.ntk_plan",
    "ptk": "featlearn.quantities.ptk",
    "register_rule": "featlearn.ops.registry",
    "report": "featlearn.reporting.page",
    "representation_kernels": "featlearn.quantities.representation",
    "sweep": "featlearn.sweeps.entry",
    "watch": "featlearn.monitoring.entry",
    "watch_checkpoints": "featlearn.monitoring.checkpoints",
    "width_check": "featlearn.widths.entry",
}
_SUBMODULES = (
    "data",
    "dynamics",
    "errors",
    "integrations",
    "metrics",
    "ops",
    "readouts",
    "record",
    "reporting",
    "steer",
    "sweeps",
    "theory",
    "widths",
)


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"featlearn.{name}")
    if name not in _HOME:
        close = get_close_matches(name, __dir__(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module 'featlearn' has no attribute {name!r}{hint}", name=name)
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOME, *_SUBMODULES])
