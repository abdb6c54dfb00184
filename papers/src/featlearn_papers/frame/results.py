"""Results as files: what a run writes, and the ones that are kept with the package. Reading imports no torch.

figure.png, figure.pdf, numbers.csv (what is drawn), claims.json (the fields of `Claim.to_json`), meta.json (how it was
made, and seeds, spread and reasons of each claim), page.html.
"""

import dataclasses
import json
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import featlearn
from featlearn.errors import InputValueError
from featlearn_papers.frame.claims import Claim, counted, counts, write_json
from featlearn_papers.frame.registry import Declaration
from featlearn_papers.frame.scale import Scale

KEPT = Path(__file__).parents[1] / "results"
FILES = ("figure.png", "numbers.csv", "claims.json", "meta.json")
"""of a result that is kept"""
STANDARD = 3
"""by which claims are judged: 1 by the mean over seeds, 2 by the mean and the seeds, 3 by the interval of the mean"""


@dataclasses.dataclass(frozen=True)
class Result:
    """One figure as it was found on disk."""

    folder: Path
    claims: list[dict[str, Any]]
    meta: dict[str, Any]

    @property
    def scale(self) -> Scale:
        """At which it was run."""
        return Scale(self.meta["scale"])

    @property
    def counts(self) -> dict[str, int]:
        """Count the claims of each of `claims.KINDS`."""
        return counts(self.claims)

    @property
    def summary(self) -> str:
        """The counts in words: zeros are left out, but for how many hold."""
        found = self.counts
        words = {
            "depends": "hold under our choice alone",
            "undecided": "undecided",
            "not judged": "not judged",
            "fails": "fail",
            "known": "known to fail",
        }
        parts = [f"{found[name]} {word}" for name, word in words.items() if found[name]]
        if found["checks"]:
            parts.append(counted(found["checks"], "check"))
        return ", ".join([f"{found['holds']} of {sum(found.values()) - found['checks']} claims hold", *parts])


def opened(folder: Path) -> Result | None:
    """The result in a folder; None where there is none."""
    try:
        claims, meta = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("claims.json", "meta.json")
        )
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputValueError(f"{folder} holds a damaged result: {error}; run it again") from error
    return Result(folder, claims, meta)


def kept(id: str) -> Result | None:
    """The result that came with the package; None where there is none, or it was judged by an older standard."""
    found = opened(KEPT / id)
    return None if found is None or found.meta.get("standard") != STANDARD else found


def keep(folder: Path) -> Path:
    """Take a result into the package, unless one of a larger scale, judged by the same standard, is there."""
    result = opened(folder)
    if result is None:
        raise InputValueError(f"{folder} holds no result, expected claims.json and meta.json; run the figure first")
    before = kept(result.meta["id"])
    if before is not None and before.scale.rank > result.scale.rank:
        raise InputValueError(
            f"{result.meta['id']} is kept at scale {before.scale}, which is larger than {result.scale}"
        )
    place = KEPT / str(result.meta["id"])
    place.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(folder / name, place / name)
    return place


def write(
    folder: Path,
    declared: Declaration,
    scale: Scale,
    claims: Sequence[Claim],
    *,
    seeds: Sequence[int],
    enough: bool = True,
    **made: Any,
) -> Result:
    """claims.json and meta.json; `made` goes to meta as it is. Claims below their scale are named there only.

    Without `enough` seeds no claim about chance is decided.
    """
    _check(declared.id, claims, len(seeds))
    judged = [claim for claim in claims if claim.least.rank <= scale.rank]
    meta = {
        "id": declared.id,
        "title": declared.title,
        "scale": str(scale),
        "standard": STANDARD,
        "seeds": list(seeds),
        **made,
        "claims": {claim.id: claim.details() for claim in judged},
        "not_judged": [claim.id for claim in claims if claim.least.rank > scale.rank],
    }
    write_json(folder / "claims.json", [claim.to_json(enough=enough) for claim in judged])
    write_json(folder / "meta.json", meta)
    found = opened(folder)
    assert found is not None
    return found


def _check(id: str, claims: Sequence[Claim], seeds: int) -> None:
    names = [claim.id for claim in claims]
    if len(set(names)) != len(names):
        raise InputValueError(f"claims of {id} have ids {names}, expected each once")
    for claim in claims:
        if not isinstance(claim.values, str) and len(claim.each) not in (1, seeds):
            raise InputValueError(
                f"claim {claim.id!r} of {id} has {len(claim.each)} values, expected one for each of "
                f"{counted(seeds, 'seed')}, or one where chance has no part; runs[name] has the seeds first"
            )


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    others = {name: version(name) for name in ("torch", "numpy")}
    return {"python": platform.python_version(), "featlearn": featlearn.__version__, **others}
