"""One measurement made by all ranks of a run: rank 0 asks for a kernel or features, and every rank measures its part.

Rank 0 alone has the run, its quantities and its schedule. It measures everything alone for the first time, and has the
others take part where that is much work. They wait for what it asks for, until it is done.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.contraction.kernel_sum import Kernels
from featlearn.distributed.first_rank import buffers_of_first, tensors_of_first
from featlearn.distributed.group import RankGroup
from featlearn.errors import InputTypeError
from featlearn.gradients.directions import Directions, Outputs
from featlearn.kernel.divided_kernel import divided_kernels
from featlearn.monitoring.probe_data import WatchedNetwork
from featlearn.monitoring.ranks import Ranks
from featlearn.network.inputs import Inputs, map_tensors, tensors_in
from featlearn.quantities.layer_features import NeuralFeatures
from featlearn.quantities.neural_features import neural_features_of

LEAST_SHARE = 32
"""Samples of the probe that every rank has, at least, where a measurement is divided."""
WORTHWHILE = 5e9
"""Multiply-adds of a kernel from which measurements are divided: ranks lose time by talking to each other."""
UNDIVIDED = {"gap", "moved", "richness", "weights", "layers", "convergence", "optimizer"}
"""Quantities that rank 0 measures alone: a few passes, or rates of an optimizer that it alone has set gradients aside
for."""

T = TypeVar("T")


class SharedMeasurement:
    """The ranks that measure a network together."""

    def __init__(self, ranks: Ranks, watched: WatchedNetwork, audited: AuditedModel) -> None:
        self._ranks, self._model, self._readout, self._audits = ranks, watched.model, watched.readout, audited.audits
        self._home = tensors_in(watched.probe.x)[0].device
        self._divided: AuditedModel | None = None
        self._inputs: dict[str, Inputs] = {}
        self._first_state: Mapping[str, Any] = {}
        self._sent: tuple[object, object] = (None, None)
        """The probe and the initial weights that the other ranks have, of rank 0."""
        self.work = 0.0
        """Multiply-adds of a kernel of the probe."""
        self._audited_alone = False
        """Whether rank 0 has measured alone, so that its audits are made."""
        self._leads = self._asking = False
        """Whether rank 0 measures together with the others now; whether it has asked them for something."""
        self._failure: str | None = None
        """Why the ranks cannot measure together."""
        self._untold: str | None = None

    def divides(self, names: Collection[str], samples: int) -> bool:
        """On rank 0: return whether all ranks measure these quantities of a probe now, because they are much work.

        Wait for the other ranks, for some seconds at most, and once in vain.
        """
        long = self._audited_alone and self.work >= WORTHWHILE
        enough = samples >= LEAST_SHARE * self._ranks.size and not UNDIVIDED.issuperset(names)
        if not long or not enough or self._failure is not None or not self._ranks.all_watch:
            return False
        if not self._ranks.all_here():
            self._failure = self._untold = "not all ranks came to this step in time"
        return self._failure is None

    def ends_together(self, well: bool) -> bool:
        """Whether all ranks make the last measurement; `well`: this one ends without an error."""
        return self._divided is not None and self._ranks.all_at_end(well and self._failure is None)

    def untold_failure(self) -> str | None:
        """On rank 0: that and why the ranks do not measure together any more, once."""
        why, self._untold = self._untold, None
        return None if why is None else f"the ranks cannot measure together, so rank 0 measures alone: {why}"

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Run this block on rank 0, and divide its long computations among all ranks."""
        try:
            with buffers_of_first(self._group, self._model):
                pass  # it has them
        except Exception as error:
            self._failure = self._untold = str(error)
        waiting, self._leads = self._failure is None, True
        try:
            yield
        finally:
            self._leads = False
            if waiting and not self._asking:  # else they are in the middle of what was asked for
                with suppress(Exception):  # ranks that are gone: the next step of training tells
                    self._group.from_first(None)

    def follow(self) -> None:
        """On the other ranks: measure what rank 0 asks for, until it is done.

        What goes wrong, rank 0 knows too, and writes down; a rank that is gone is missed by the next step of training.
        """
        with suppress(Exception), buffers_of_first(self._group, self._model):
            while (request := self._group.from_first(None)) is not None:
                with suppress(Exception):
                    self._perform(*request)

    def close(self) -> None:
        """Give up the process group, on every rank."""
        if self._divided is not None:
            with suppress(Exception):
                dist.destroy_process_group(self._group.process_group)

    @property
    def _group(self) -> RankGroup:
        return self._audited.request.group

    @property
    def _audited(self) -> AuditedModel:
        """The network in a process group of its own: what the user's code sends never meets what is sent here."""
        if self._divided is None:  # all ranks come here together
            backend = None if self._home.type == "cuda" else "gloo"
            group = dist.new_group(backend=backend, timeout=self._ranks.timeout)
            self._divided = AuditedModel(self._model, readout=self._readout, group=group)
            self._divided.audits = self._audits
        return self._divided

    def measured(self, watched: WatchedNetwork, alone: Callable[[], T], act: str, *arguments: Any) -> T:
        """On rank 0: return what `alone` measures, by all ranks; by rank 0, now and from now on, if they cannot.

        The act is "kernels" (names of one or two probes, outputs, by) or "features" (whether they are compared with the
        initial weights, outputs).
        """
        if not self._leads or self._failure is not None:
            measured = alone()
            self._audited_alone = True
            return measured
        self._asking, why = True, ""
        found: T | None = None
        try:
            self._send(watched, initial=act == "features" and arguments[0])
            found = self._ask(act, *arguments)
        except Exception as error:
            why = str(error)  # the error itself would keep what was being measured
        self._asking = False
        if found is None:
            found = alone()  # raises if the network itself cannot be measured
            self._failure = self._untold = why
        return found

    def _send(self, watched: WatchedNetwork, *, initial: bool) -> None:
        """Samples and initial weights for ranks that do not have them."""
        probe, begun = self._sent
        if probe is not watched.probe:
            probes = {"probe": watched.probe.x, "test": watched.test and watched.test.x, "both": watched.both}
            self._inputs = {name: x for name, x in probes.items() if x is not None}
            self._ask("probes", map_tensors(self._inputs, lambda one: one.to("meta")))
        if initial and begun is not watched.initial:
            if not all(isinstance(one, Tensor) for one in watched.initial.values()):
                raise InputTypeError("the state of the model holds other things than tensors, which are not sent")
            self._first_state = watched.initial
            self._ask("initial")
        self._sent = (watched.probe, watched.initial if initial else begun)

    def _ask(self, act: str, *arguments: Any) -> Any:
        self._group.from_first((act, arguments))
        return self._perform(act, arguments)

    def _perform(self, act: str, arguments: tuple[Any, ...]) -> Any:
        """What rank 0 asks for, on every rank."""
        return getattr(self, f"_{act}")(*arguments)

    def _probes(self, kinds: dict[str, Inputs]) -> None:
        """The probes of rank 0; `kinds`: the same with tensors that hold nothing."""
        own = {str(place): tensor for place, tensor in enumerate(tensors_in(self._inputs))}
        found = iter(tensors_of_first(self._group, own).values())
        with self._group.together():
            self._inputs = map_tensors(kinds, lambda _: next(found).to(self._home))

    def _initial(self) -> None:
        found = tensors_of_first(self._group, self._first_state)
        with self._group.together():
            self._first_state = {name: one.cpu() for name, one in found.items()}

    def _kernels(self, of: tuple[str, ...], outputs: Outputs, by: str) -> Kernels:
        x, x2 = (*(self._inputs[name] for name in of), None)[:2]
        found: dict[str, Any] = divided_kernels(self._audited, x, x2, outputs, by, False, dict)
        return {key: kernel.full_tensor().to(self._home) for key, kernel in found.items()}

    def _features(self, compared: bool, outputs: Directions | None) -> NeuralFeatures:
        initial = self._first_state if compared else None
        return neural_features_of(self._audited, x=self._inputs["probe"], initial=initial, outputs=outputs)
