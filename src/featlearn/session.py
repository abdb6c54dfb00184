"""Session: repeated measurements of one model."""

from typing import Unpack

from torch import nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.network.inputs import Inputs, batch_size
from featlearn.quantities.alignment_estimate import estimate_alignment_of
from featlearn.quantities.feature_change import features_moved_of
from featlearn.quantities.layer_pairs import layer_alignment_of, layer_balance_of
from featlearn.quantities.linearization_gap import linearization_gap_of
from featlearn.quantities.neural_features import neural_features_of
from featlearn.quantities.ntk import ntk_of
from featlearn.quantities.ntk_plan import plan_of
from featlearn.quantities.operator import operator_of
from featlearn.quantities.preactivation_kernel import ptk_of
from featlearn.quantities.representation import representation_kernels_of
from featlearn.quantities.sample_gradients import gradients_of, ntk_diagonal_of
from featlearn.quantities.velocity import feature_speed_of, ntk_velocity_of
from featlearn.signatures import name_keywords, session_method


class Session(AuditedModel):
    """Measure one model many times, and keep what does not change between calls.

    Methods return the same results as the functions of the same name. The first call audits the model on a few
    samples: where the samples lie in its graph, and which rules agree with autograd. Later calls reuse the audit, and
    the plan of memory and chunks, while the graph stays the same. Every call checks on the whole batch what may change
    with the weights or the samples. Weights, data, modules and modes may change between calls; a changed graph is
    audited anew. A Session holds no weights and no activations. Nothing else in this package remembers a model between
    calls.

    >>> session = fl.Session(model, x)
    >>> for batch in loader:
    ...     train_step(model, batch)
    ...     kernels.append(session.ntk())

    Args:
        model: Module to measure, in eval mode. It is left as it was.
        x: Inputs of all calls that pass none.
        **settings: As for `fl.ntk`. Each acts on every method, or the method refuses it by name: `group` is for `ntk`,
            `neural_features`, `estimate_alignment` and `operator`.
    """

    @name_keywords()
    def __init__(self, model: nn.Module, x: Inputs, **settings: Unpack[Settings]) -> None:
        batch_size(x)
        super().__init__(model, **settings)
        self.x = x

    def __repr__(self) -> str:
        samples, audits = batch_size(self.x), len(self.audits.graphs)
        counted = f"{samples} sample{'s' * (samples != 1)}, {audits} audited graph{'s' * (audits != 1)}"
        return f"Session({type(self.model).__name__}, {counted})"

    ntk = session_method(ntk_of, "The kernel does not depend on targets, so drop `y`.")
    plan = session_method(plan_of)
    ntk_diagonal = session_method(ntk_diagonal_of)
    gradients = session_method(gradients_of)
    neural_features = session_method(neural_features_of)
    linearization_gap = session_method(linearization_gap_of)
    features_moved = session_method(features_moved_of)
    layer_alignment = session_method(layer_alignment_of)
    layer_balance = session_method(layer_balance_of)
    ntk_velocity = session_method(ntk_velocity_of)
    feature_speed = session_method(feature_speed_of)
    representation_kernels = session_method(representation_kernels_of)
    ptk = session_method(ptk_of)
    estimate_alignment = session_method(estimate_alignment_of)
    operator = session_method(operator_of)
