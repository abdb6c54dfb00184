"""Changes of layers: the mechanism of each pair, and where features were learned."""

import math
import re
from dataclasses import dataclass

from featlearn.diagnosis.evidence import LAYER_CHANGED
from featlearn.diagnosis.run_data import RunData

_PAIR = re.compile(r"layers/(?P<first>.+)--(?P<second>.+)/alignment")
_LAYER = re.compile(r"weights/(?P<layer>.+)/distance")
ROLES = ("q", "k", "v")
"""Projections that one weight of attention may hold: neural features are measured for each."""


@dataclass(frozen=True)
class LayerPairMechanism:
    """What changed the product U W of two layers that follow each other (Xu & Ziyin 2024, Sec. 3).

    ln |U W| changed by the sum of `alignment`, `first_norm` and `second_norm`: |U W| = zeta |U| |W|.
    """

    name: str
    """"alignment" or "disalignment" if zeta changed, "rescaling" if only norms did, else "none"; "cannot tell" if zeta
    did not change and the norms were not recorded"""
    alignment: float
    """change of ln zeta; negative is disalignment"""
    first_norm: float
    """change of ln |W|"""
    second_norm: float
    """change of ln |U|"""
    start: float
    """zeta at the start"""
    end: float
    """zeta at the end"""
    random: float
    """zeta of random weights of this shape"""

    @property
    def rescaling(self) -> float:
        """Change of ln |U| |W|; nan if one of the norms was not recorded."""
        return self.first_norm + self.second_norm


def mechanisms(run_data: RunData) -> dict[str, LayerPairMechanism]:
    """ "first--second" -> the mechanism of this pair."""
    found = {}
    for name in run_data.scalar_names:
        match = _PAIR.fullmatch(name)
        zeta = run_data.since_start(name) if match else None
        if match is None or zeta is None or not (zeta.first > 0 and zeta.last > 0):
            continue
        norms = [_log_growth(run_data, match[layer]) for layer in ("first", "second")]
        turned = math.log(zeta.last / zeta.first)
        random = run_data.curve(name.removesuffix("alignment") + "random")
        found[f"{match['first']}--{match['second']}"] = LayerPairMechanism(
            name_of(turned, sum(norms)),
            turned,
            norms[0],
            norms[1],
            zeta.first,
            zeta.last,
            math.nan if random is None else random.last,
        )
    return found


def name_of(turned: float, stretched: float) -> str:
    """The angle decides first; rescaling is a change of norms at a constant angle.

    See Xu & Ziyin 2024, Sec. 3.2 to 3.4.
    """
    if abs(turned) >= LAYER_CHANGED.low:
        return "alignment" if turned > 0 else "disalignment"
    if math.isnan(stretched):
        return "cannot tell"
    return "rescaling" if abs(stretched) >= LAYER_CHANGED.low else "none"


def _log_growth(run_data: RunData, layer: str) -> float:
    norm = run_data.since_start(f"weights/{layer}/norm")
    if norm is None or not (norm.first > 0 and norm.last > 0):
        return math.nan
    return math.log(norm.last / norm.first)


@dataclass(frozen=True)
class LayerLearning:
    """How much one layer learned; nan for what was not recorded."""

    distance: float
    """|W - W0| / |W0|"""
    correlation: float
    """centered neural feature correlation at the end"""
    centered_share: float
    """how much of the agreement of weights and gradients training has made; of fused projections, the largest"""
    kernel_share: float
    """its share of the last kernel"""
    alignment: float
    """rise of the alignment of its kernel with the task"""
    readout: bool = False
    """whether its gradients are those of the start, as of a readout: its correlation is then 1 whatever was learned"""


def layer_learning(run_data: RunData) -> dict[str, LayerLearning]:
    """Layer -> how much it learned, sorted by how far its weight moved."""
    found = {}
    for name in run_data.scalar_names:
        match = _LAYER.fullmatch(name)
        distance = run_data.curve(name) if match else None
        if match is None or distance is None:
            continue
        layer = match["layer"]
        share = run_data.curve(f"ntk/layers/{layer}/share")
        alignment = run_data.since_start(f"ntk/layers/{layer}/alignment")
        correlation, centered_share, readout = _features(run_data, layer)
        found[layer] = LayerLearning(
            distance.last,
            correlation,
            centered_share,
            math.nan if share is None else share.last,
            math.nan if alignment is None else alignment.rise,
            readout,
        )
    return dict(sorted(found.items(), key=lambda item: -item[1].distance))


def _features(run_data: RunData, layer: str) -> tuple[float, float, bool]:
    """Centered correlation and share at the end, and whether it is a readout.

    Of fused projections, those of the one that learned most.
    """
    parts = []
    for name in (layer, *(f"{layer}.{role}" for role in ROLES)):
        correlation = run_data.curve(f"features/{name}/centered", least=1)
        share = run_data.curve(f"features/{name}/centered_share", least=1)
        if correlation is None or share is None:
            continue
        # The gradient of the output by the output of a readout never changes, so that this is undefined there.
        changed = run_data.curve(f"features/{name}/double_centered", least=1)
        recorded = f"features/{name}/double_centered" in run_data.scalar_names
        parts.append((share.last, correlation.last, recorded and changed is None))
    if not parts:
        return math.nan, math.nan, False
    most, of_most, _ = max(parts)
    return of_most, most, all(readout for *_, readout in parts)
