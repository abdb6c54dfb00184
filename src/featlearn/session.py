"""Session: repeated measurements of one model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel
from featlearn.contraction.factors import Gradients
from featlearn.contraction.kernel_sum import Kernels
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.gradients.directions import Directions, Outputs
from featlearn.linalg.estimate import Estimate
from featlearn.losses import Loss
from featlearn.network.inputs import Inputs, batch_size
from featlearn.planning.plan import Plan
from featlearn.planning.rank_costs import Device
from featlearn.planning.sketch_plan import SketchPlan
from featlearn.quantities.alignment_estimate import estimate_alignment_of
from featlearn.quantities.balance import LayerBalance, layer_balance_of
from featlearn.quantities.diagonal import ntk_diagonal_of
from featlearn.quantities.feature_change import FeatureChange, features_moved_of
from featlearn.quantities.layer_alignment import LayerPair, LayerPairs, Norm, layer_alignment_of
from featlearn.quantities.layer_features import NeuralFeatures
from featlearn.quantities.linearization_gap import LinearizationGap, linearization_gap_of
from featlearn.quantities.neural_features import neural_features_of
from featlearn.quantities.ntk import sketched_kernel, tangent_kernel
from featlearn.quantities.ntk_plan import kernel_plan
from featlearn.quantities.operator import NTKOperator
from featlearn.quantities.preactivation_kernel import ptk_of
from featlearn.quantities.representation import representation_kernels
from featlearn.quantities.sample_gradients import gradients_of
from featlearn.quantities.velocity import feature_speed_of, ntk_velocity_of
from featlearn.request import Settings
from featlearn.signatures import name_keywords


class Session:
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
        self.x = x
        self._audited = AuditedModel(model, **settings)

    @property
    def model(self) -> nn.Module:
        """The model that is measured."""
        return self._audited.model

    def __repr__(self) -> str:
        samples, audits = batch_size(self.x), len(self._audited.audits.graphs)
        counted = f"{samples} sample{'s' * (samples != 1)}, {audits} audited graph{'s' * (audits != 1)}"
        return f"Session({type(self.model).__name__}, {counted})"

    @overload
    def ntk(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: Literal["network"] = "network",
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: None = None,
    ) -> Tensor: ...
    @overload
    def ntk(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: Literal["layer", "parameter"],
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: None = None,
    ) -> Kernels: ...
    @overload
    def ntk(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: Literal["network"] = "network",
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: Sketch,
    ) -> Estimate: ...
    @overload
    def ntk(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: Literal["layer", "parameter"],
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: Sketch,
    ) -> dict[str, Estimate]: ...
    @name_keywords("The kernel does not depend on targets, so drop `y`.")
    def ntk(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: str = "network",
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: Sketch | None = None,
    ) -> Tensor | Kernels | Estimate | dict[str, Estimate]:
        """Compute the tangent kernel: see `fl.ntk`. `x` replaces the inputs of the Session in this call."""
        if sketch is not None:
            return sketched_kernel(
                self._audited, self._inputs(x), x2, sketch, outputs=outputs, by=by, optimizer=optimizer, verify=verify
            )
        return tangent_kernel(
            self._audited, self._inputs(x), x2, outputs=outputs, by=by, optimizer=optimizer, verify=verify
        )

    @name_keywords()
    def plan(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        outputs: Outputs = "mean",
        by: str = "network",
        optimizer: Optimizer | None = None,
        verify: bool = False,
        sketch: Sketch | None = None,
        ranks: int | None = None,
        device: str | Device = "H100",
    ) -> Plan | SketchPlan:
        """Estimate the cost of `ntk` with the same arguments: see `fl.plan`."""
        return kernel_plan(
            self._audited,
            self._inputs(x),
            x2,
            outputs=outputs,
            by=by,
            optimizer=optimizer,
            verify=verify,
            sketch=sketch,
            ranks=ranks,
            device=device,
        )

    @overload
    def ntk_diagonal(
        self, *, x: Inputs | None = None, outputs: Outputs = "mean", by: Literal["network"] = "network"
    ) -> Tensor: ...
    @overload
    def ntk_diagonal(
        self, *, x: Inputs | None = None, outputs: Outputs = "mean", by: Literal["layer", "parameter"]
    ) -> dict[str, Tensor]: ...
    @name_keywords()
    def ntk_diagonal(
        self, *, x: Inputs | None = None, outputs: Outputs = "mean", by: str = "network"
    ) -> Tensor | dict[str, Tensor]:
        """Compute the diagonal of the kernel: see `fl.quantities.ntk_diagonal`."""
        return ntk_diagonal_of(self._audited, self._inputs(x), outputs=outputs, by=by)

    @name_keywords()
    def gradients(
        self,
        *,
        x: Inputs | None = None,
        outputs: int | Literal["each"] | Directions | Tensor = "each",
        by: Literal["parameter", "layer"] = "parameter",
    ) -> Iterator[tuple[slice, str, Gradients]]:
        """Yield per-sample gradients, chunk by chunk: see `fl.quantities.gradients`."""
        return gradients_of(self._audited, self._inputs(x), outputs=outputs, by=by)

    @name_keywords()
    def neural_features(
        self,
        *,
        x: Inputs | None = None,
        initial: Mapping[str, Tensor] | None = None,
        layers: str | Sequence[str] | None = None,
        outputs: int | Directions | None = None,
    ) -> NeuralFeatures:
        """Compute NFM, AGOP and PTK covariance of every linear map: see `fl.neural_features`."""
        return neural_features_of(self._audited, self._inputs(x), initial=initial, layers=layers, outputs=outputs)

    @overload
    def linearization_gap(
        self,
        initial: Mapping[str, Tensor],
        *,
        x: Inputs | None = None,
        by: Literal["network"] = "network",
        link: bool = True,
        effective: bool = True,
    ) -> LinearizationGap: ...
    @overload
    def linearization_gap(
        self,
        initial: Mapping[str, Tensor],
        *,
        x: Inputs | None = None,
        by: Literal["layer"],
        link: bool = True,
        effective: bool = True,
    ) -> dict[str, float]: ...
    @name_keywords()
    def linearization_gap(
        self,
        initial: Mapping[str, Tensor],
        *,
        x: Inputs | None = None,
        by: str = "network",
        link: bool = True,
        effective: bool = True,
    ) -> LinearizationGap | dict[str, float]:
        """Compute what the linearization at an earlier state misses: see `fl.linearization_gap`."""
        return linearization_gap_of(self._audited, self._inputs(x), initial, by=by, link=link, effective=effective)

    @overload
    def features_moved(
        self, initial: Mapping[str, Tensor], *, x: Inputs | None = None, by: Literal["network"] = "network"
    ) -> FeatureChange: ...
    @overload
    def features_moved(
        self, initial: Mapping[str, Tensor], *, x: Inputs | None = None, by: Literal["layer"]
    ) -> dict[str, FeatureChange]: ...
    @name_keywords()
    def features_moved(
        self, initial: Mapping[str, Tensor], *, x: Inputs | None = None, by: str = "network"
    ) -> FeatureChange | dict[str, FeatureChange]:
        """Compute how much the features changed since an earlier state: see `fl.quantities.features_moved`."""
        return features_moved_of(self._audited, self._inputs(x), initial, by=by)

    @name_keywords()
    def layer_alignment(self, *, x: Inputs | None = None, norm: Norm = "fro") -> LayerPairs[LayerPair]:
        """Compute the alignment of consecutive weights: see `fl.layer_alignment`."""
        return layer_alignment_of(self._audited, self._inputs(x), norm=norm)

    @name_keywords()
    def layer_balance(
        self, *, x: Inputs | None = None, rates: Mapping[str, float] | Optimizer | None = None
    ) -> LayerPairs[LayerBalance]:
        """Compute what gradient flow conserves between consecutive layers: see `fl.quantities.layer_balance`."""
        return layer_balance_of(self._audited, self._inputs(x), rates)

    @name_keywords()
    def ntk_velocity(
        self, y: Tensor, *, x: Inputs | None = None, loss: Loss = "sum-half", outputs: str = "mean"
    ) -> Tensor:
        """Compute dK/dt under gradient flow: see `fl.quantities.ntk_velocity`."""
        return ntk_velocity_of(self._audited, self._inputs(x), y, loss=loss, outputs=outputs)

    @name_keywords()
    def feature_speed(self, y: Tensor, *, x: Inputs | None = None, loss: Loss = "sum-half") -> float:
        """Compute how much faster features change than the error: see `fl.quantities.feature_speed`."""
        return feature_speed_of(self._audited, self._inputs(x), y, loss=loss)

    @name_keywords()
    def representation_kernels(
        self,
        x2: Inputs | None = None,
        *,
        x: Inputs | None = None,
        of: Literal["input", "output"] = "input",
        layers: str | Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Compute Gram matrices of each layer's input or output: see `fl.quantities.representation_kernels`."""
        request = self._audited.request
        request.refuse("representation_kernels", "readout", "parameters", "group")
        return representation_kernels(
            self.model, self._inputs(x), x2=x2, of=of, layers=layers, dtype=request.dtype, memory=request.memory
        )

    @name_keywords()
    def ptk(
        self,
        x2: Inputs | None = None,
        *,
        layer: str,
        x: Inputs | None = None,
        outputs: int | Literal["sum", "full"] = "sum",
        positions: bool = False,
    ) -> Tensor:
        """Compute the pre-activation tangent kernel of one layer: see `fl.quantities.ptk`."""
        return ptk_of(self._audited, self._inputs(x), x2, layer=layer, outputs=outputs, positions=positions)

    @name_keywords()
    def estimate_alignment(
        self,
        y: Tensor,
        *,
        x: Inputs | None = None,
        centered: bool = False,
        vectors: int | None = None,
        generator: torch.Generator | None = None,
        sketch: Sketch | None = None,
    ) -> Estimate:
        """Estimate the kernel-task alignment without the kernel: see `fl.estimate_alignment`."""
        return estimate_alignment_of(
            self._audited,
            self._inputs(x),
            y,
            centered=centered,
            vectors=vectors,
            generator=generator,
            sketch=sketch,
        )

    @name_keywords()
    def operator(self, *, x: Inputs | None = None, optimizer: Optimizer | None = None) -> NTKOperator:
        """Return the tangent kernel as an operator that is never formed: see `fl.NTKOperator`."""
        return NTKOperator.of(self._audited, self._inputs(x), optimizer)

    def _inputs(self, x: Inputs | None) -> Inputs:
        return self.x if x is None else x
