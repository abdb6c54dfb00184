"""Results as web pages without any file beside them: one figure, or the gallery of all that are kept."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from featlearn_papers.frame.claims import counted, share, verdict
from featlearn_papers.frame.registry import Declaration
from featlearn_papers.frame.results import Result

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #555; --rule: #ddd; --paper: #fff; --link: #0a5a94;
--holds: #00664b; --fails: #a63f00; --undecided: #6a5200; --depends: #3d6a00 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --soft: #aaa; --rule: #444; --paper: #161616;
--link: #7ab8e8; --holds: #4fc9a4; --fails: #ff9d57; --undecided: #e5c558; --depends: #b5d46a } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem 1rem 4rem;
color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: clamp(1.5rem, 6vw, 2rem); line-height: 1.2 }
h2 { font-size: clamp(1.2rem, 5vw, 1.5rem); line-height: 1.25 }
ul { padding-left: 1.2rem } li { margin-bottom: .3rem } a { color: var(--link) }
.box { overflow-x: auto; border: 1px solid var(--rule); border-radius: .5rem; margin: 1rem 0 }
.box:focus-visible { outline: 3px solid var(--link) }
.picture { background: #fff; padding: .6rem } /* figures are drawn for white paper */
img { display: block; max-width: 100%; height: auto; margin: 0 auto }
table { border-collapse: collapse; width: 100%; min-width: 56rem; font-size: 13px; overflow-wrap: normal }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-top: 1px solid var(--rule) }
tr:first-child th { border-top: 0 } td:first-child { min-width: 13rem } td:last-child { min-width: 18rem }
.holds { color: var(--holds) } .fails { color: var(--fails); font-weight: 600 }
.undecided { color: var(--undecided); font-weight: 600 } .depends { color: var(--depends); font-weight: 600 }
.known, .not-judged, .how { color: var(--soft) }
.how { font-size: 13px } section { margin-bottom: 3.5rem }
.filters { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; border: 0; padding: 0; margin: .5rem 0 }
.filters label { cursor: pointer } .grid { display: grid; gap: 1rem; padding: 0; list-style: none; margin: 1rem 0;
grid-template-columns: repeat(auto-fill, minmax(min(100%, 14.5rem), 1fr)) }
.grid a { display: block; height: 100%; border: 1px solid var(--rule); border-radius: .5rem; overflow: hidden;
color: inherit; text-decoration: none } .grid a:hover, .grid a:focus-visible { border-color: var(--link) }
.grid img { width: 100%; aspect-ratio: 16 / 10; object-fit: cover; object-position: left top; background: #fff }
.grid p { margin: .3rem .7rem } .grid strong { margin-right: .4rem } .badge { font-size: 13px; margin-right: .6rem }
.gallery section { display: none } .gallery section:target { display: block }
.gallery:has(section:target) .overview { display: none }
@media (max-width: 40rem) { .picture img { max-width: 40rem } } /* panels are read by moving the picture */
@media (min-width: 64rem) { td:first-child { min-width: 11rem } td:last-child { min-width: 13rem } }
@media print { .box { overflow: visible } table, img { min-width: 0; max-width: 100% } }
"""
COLUMNS = ("claim", "", "paper", "ours", "spread", "difference", "holds within", "band from", "why")
PAPERS = {
    "000": "Shan & Bordelon 2021a: rapid feature evolution",
    "001": "Shan & Bordelon 2021b: kernel alignment and training",
    "002": "Atanasov et al. 2022: silent alignment",
    "003": "Beaglehole et al. 2024: feature learning as alignment",
    "004": "Xu & Ziyin 2024: three mechanisms of feature learning",
}
CHECKS = (
    "Checks: sentences that cannot fail, because they are true by construction, compare a formula with itself, or list "
    "what was put in. They are not counted."
)


def figure_page(result: Result) -> str:
    """The page of one figure: paper's value, ours, spread over seeds, difference, and why."""
    return _document(f"{result.meta['id']}: {result.meta['title']}", _section(result))


def gallery(declarations: Sequence[Declaration], results: Mapping[str, Result]) -> str:
    """All results that are kept, and the figures that are still missing."""
    shown = [results[one.id] for one in declarations if one.id in results]
    missing = [one for one in declarations if one.id not in results]
    rest = "".join(f"<li>{escape(one.id)} {escape(one.title)}</li>" for one in missing)
    left = f"<h2>Not yet</h2><ul>{rest}</ul>" if rest else ""
    back = '<p><a href="#">All figures</a></p>'
    sections = "".join(_section(result).replace("<h2>", f"{back}<h2>", 1) for result in shown)
    overview = f'<div class="overview"><h1>The papers, reproduced</h1>{_grid(shown)}{left}</div>'
    return _document("The papers, reproduced", f'<main class="gallery">{overview}{sections}</main>')


KINDS = {"holds": "hold", "depends": "depend", "undecided": "undecided", "fails": "fail"}
"""Verdict -> its word on a badge."""


def _grid(shown: Sequence[Result]) -> str:
    """Return a thumbnail with badges for every figure, and filters by paper and verdict, which need no script."""
    papers = {paper: PAPERS.get(paper, paper) for paper in dict.fromkeys(map(_paper, shown))}
    choices = {"paper": papers, "verdict": {"fails": "with a claim that fails", "undecided": "with an undecided claim"}}
    filters, rules = "", ""
    for name, values in choices.items():
        options = {"": f"all {'papers' if name == 'paper' else 'verdicts'}"} | values
        labels = "".join(
            f'<label><input type="radio" name="{name}" id="{name}-{escape(value)}"{"" if value else " checked"}> '
            f"{escape(words)}</label>"
            for value, words in options.items()
        )
        filters += f'<fieldset class="filters"><legend>{name.capitalize()}</legend>{labels}</fieldset>'
        rules += "".join(
            f".gallery:has(#{name}-{value}:checked) .grid li:not(.of-{value}) {{ display: none }}\n" for value in values
        )
    return f'<style>{rules}</style>{filters}<ul class="grid">{"".join(map(_card, shown))}</ul>'


def _paper(result: Result) -> str:
    return str(result.meta["id"]).partition("/")[0]


def _card(result: Result) -> str:
    counts = {kind: result.counts[kind] for kind in KINDS}
    classes = " ".join(f"of-{name}" for name in [_paper(result), *(kind for kind, count in counts.items() if count)])
    total = sum(count for kind, count in result.counts.items() if kind != "checks")
    badges = "".join(
        f'<span class="badge {kind}">{count}{f" of {total}" if kind == "holds" else ""} {KINDS[kind]}</span>'
        for kind, count in counts.items()
        if count or kind == "holds"
    )
    return (
        f'<li class="{classes}"><a href="#{_anchor(result)}">'
        f'<img alt="Thumbnail of {escape(result.meta["id"])}" loading="lazy" src="{_thumbnail(result)}">'
        f"<p><strong>{escape(result.meta['id'])}</strong>{escape(result.meta['title'])}</p><p>{badges}</p></a></li>"
    )


def _thumbnail(result: Result) -> str:
    """Return the upper left of the picture, at most THUMBNAIL pixels wide, as the address of a PNG image."""
    from matplotlib import image

    pixels = image.imread(result.folder / "figure.png")[..., :3]
    step = max(1, pixels.shape[1] // THUMBNAIL)
    height, width = (size // step for size in (min(pixels.shape[0], pixels.shape[1] * 10 // 16), pixels.shape[1]))
    blocks = pixels[: height * step, : width * step].reshape(height, step, width, step, 3)
    shades = (blocks.mean(axis=(1, 3)) * 15).round() / 15  # few shades: small files
    buffer = io.BytesIO()
    image.imsave(buffer, shades.clip(0, 1), format="png", pil_kwargs={"optimize": True})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


THUMBNAIL = 420
"""Width of thumbnails in pixels."""


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _anchor(result: Result) -> str:
    return escape(result.meta["id"].replace("/", "-"))


def _section(result: Result) -> str:
    meta = result.meta
    picture = base64.b64encode((result.folder / "figure.png").read_bytes()).decode()
    how = f"{meta['scale']} scale, {counted(len(meta['seeds']), 'seed')}, {_seconds(sum(meta['seconds']))}"
    how += f" on {meta['versions'].get('gpu', meta['device'])}"
    setup = _words(meta["setup"])
    left_out, name = meta["not_judged"], meta["id"]
    counted_ones = [claim for claim in result.claims if not claim["check"]]
    checks = [claim for claim in result.claims if claim["check"]]
    return (
        f'<section id="{_anchor(result)}"><h2>{escape(name)}: {escape(meta["title"])}</h2>'
        f"<p>{escape(meta['about'])}</p>"
        f"{_box('picture', f'Figure {name}')}"
        f'<img alt="{escape(meta["title"])}" src="data:image/png;base64,{picture}"></div>'
        f"<p>{escape(result.summary)}.</p>{_table(counted_ones, meta, f'Claims of {name}')}"
        + (f"<p>{escape(CHECKS)}</p>{_table(checks, meta, f'Checks of {name}')}" if checks else "")
        + f'<p class="how">{escape(how)}. Set-up: {escape(setup or "none")}. {escape(_sources(meta))}'
        + (f" Not judged at this scale: {escape(', '.join(left_out))}." if left_out else "")
        + "".join(f" {escape(note)}." for note in meta.get("notes", ()))
        + "</p></section>"
    )


def _box(kind: str, label: str) -> str:
    """The opening tag of a box that scrolls by itself, also by keyboard, so that the page does not."""
    return f'<div class="box {kind}" tabindex="0" role="region" aria-label="{escape(label)}">'


def _table(claims: Iterable[dict[str, Any]], meta: dict[str, Any], label: str) -> str:
    rows = "".join(_row(claim, meta["claims"][claim["id"]]) for claim in claims)
    heads = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    return f"{_box('claims', label)}<table><tr>{heads}</tr>{rows}</table></div>"


def _sources(meta: dict[str, Any]) -> str:
    """Which experiments the figure shows, and where their seeds are kept."""
    each = [f"{one['id']} ({one['key']}, seeds {_seeds(one['seeds'])})" for one in meta["experiments"]]
    return f"Experiment{'s' * (len(each) != 1)}: {', '.join(each)}."


def _seeds(seeds: Sequence[int]) -> str:
    low, high = min(seeds), max(seeds)
    whole = len(seeds) > 1 and list(seeds) == list(range(low, high + 1))
    return f"{low} to {high}" if whole else ", ".join(map(str, seeds))


def _words(value: Any) -> str:
    """A set-up, with those inside it in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inner(each)}" for name, each in value.items())
    return ", ".join(map(_inner, value)) if isinstance(value, list) else str(value)


def _inner(value: Any) -> str:
    return f"({_words(value)})" if isinstance(value, dict | list) else _words(value)


def _row(claim: dict[str, Any], details: dict[str, Any]) -> str:
    kind = "known" if claim["known"] is not None and not claim["holds"] else claim["verdict"]
    # what is known against a claim is the reason of a failure, and elsewhere a remark
    known = f"Known to fail elsewhere: {claim['known']}" if claim["known"] and claim["holds"] else claim["known"]
    reason = " ".join(
        filter(
            None, (claim["cause"], known, _open_question(details), details["why"], *map(_choice, details["choices"]))
        )
    )
    cells: Iterable[str] = (
        claim["claim"],
        _number(claim["paper"]),
        _number(claim["measured"]),
        _spread(details),
        _number(details["difference"]),
        _band(claim["band"]),
        claim["band_from"],
    )
    if (yes := share(claim, details["values"])) is not None:
        cells = (claim["claim"], _number(claim["paper"]), yes, "", "", "all seeds", claim["band_from"])
    first, *others = (f"<td>{escape(cell)}</td>" for cell in cells)
    # the verdict stands beside the claim, where a narrow window shows it
    judgment = f'<td class="{kind.replace(" ", "-")}">{verdict(claim)}</td>'
    return f"<tr>{first}{judgment}{''.join(others)}<td>{escape(reason)}</td></tr>"


def _open_question(details: dict[str, Any]) -> str:
    """Return why a claim is not judged, or how many seeds would decide it."""
    if details["not_judged"] is not None:
        return f"Not judged: {details['not_judged']}."
    return "" if details["seeds_needed"] is None else f"About {details['seeds_needed']} seeds would decide."


def _choice(choice: dict[str, Any]) -> str:
    """What was chosen, and the verdict under the other choice."""
    if choice["verdict"] is None:
        return f"Chosen: {choice['made']}; not tried: {choice['other']}."
    band = {"band": choice["band"]}
    found = share(band, choice["values"]) or f"{_number(choice['measured'])} (within {_band(choice['band'])})"
    return f"Chosen: {choice['made']}. With {choice['other']} it {_verb(choice['verdict'])}: {found}."


def _verb(verdict: str) -> str:
    return {"undecided": "is undecided", "depends": "holds"}.get(verdict, verdict)


def _spread(details: dict[str, Any]) -> str:
    count = len(details["values"])
    return "" if not details["spread"] else f"± {details['spread']:.2g} ({count} seeds)"


def _band(band: Any) -> str:
    if isinstance(band, str):
        return band
    low, high = band
    if low is None or high is None:
        return "any" if low is high else f"≥ {_number(low)}" if high is None else f"≤ {_number(high)}"
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 180 else f"{value / 60:.0f} min"
