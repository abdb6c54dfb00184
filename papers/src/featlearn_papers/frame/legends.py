"""Legends that cross no curve, name what bands show, and can be read."""

from collections.abc import Iterator
from typing import Any

from featlearn.errors import InputValueError

SMALLEST = 7
"""points of any text in a figure"""
PLACES = (
    "upper right",
    "upper left",
    "lower left",
    "lower right",
    "center right",
    "center left",
    "upper center",
    "lower center",
    "center",
)
ROOM = (1.15, 1.3, 1.45, 1.6, 1.8)
"""by how much an axis may be made longer for a legend that finds no place"""

PASSES = 3
"""a legend below its panel makes all panels smaller, and others may cross then"""


def arrange_legends(figure: Any) -> None:
    """Move each legend to where no curve is: inside its panel, with room made above the curves, or below the panel.

    Below the panels stands what the bands of `drawing.curve` are. The layout is then kept: one for other pixels, as
    each file would have, could put a legend over a curve again.
    """
    _name_bands(figure)
    for _ in range(PASSES):
        figure.draw_without_rendering()
        crossed = [ax for ax in figure.axes if ax.get_legend() is not None and crosses(ax)]
        for ax in crossed:
            _move(ax)
        if not crossed:
            break
    else:
        figure.draw_without_rendering()
    figure.set_layout_engine("none")


def crossing_legends(figure: Any) -> list[str]:
    """Titles of the panels whose legend lies over a curve."""
    figure.draw_without_rendering()
    crossed = [ax for ax in figure.axes if ax.get_legend() is not None and crosses(ax)]
    return [ax.get_title("left") or ax.get_title() or str(figure.axes.index(ax)) for ax in crossed]


def check_text(figure: Any) -> None:
    """Refuse text that is too small to be read."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text.get_fontsize() < SMALLEST:
            raise InputValueError(
                f"{text.get_text()!r} is drawn at {text.get_fontsize():g} pt, expected at least {SMALLEST}: leave out "
                "its fontsize, and give it room by shorter words, ncols or a higher panel"
            )


def crosses(ax: Any) -> bool:
    """Whether the legend of a panel lies over something drawn there, in axes laid over it too."""
    box = ax.get_legend().get_window_extent()
    same = [other for other in ax.figure.axes if other.bbox.bounds == ax.bbox.bounds]
    return any(one for other in same for one in _hits(other, box))


def _hits(ax: Any, box: Any) -> Iterator[bool]:
    for line in ax.lines:
        path = line.get_transform().transform_path(line.get_path()).cleaned(remove_nans=True)
        if line.get_linestyle() not in ("None", ""):
            yield bool(path.intersects_bbox(box, filled=False))
        yield any(box.contains(*point) for point in path.vertices)
    for points in ax.collections:
        if type(points).__name__ == "PathCollection":
            yield any(box.contains(*point) for point in points.get_offset_transform().transform(points.get_offsets()))


def _move(ax: Any) -> None:
    """Panels keep their place: only limits and the legend change, so that nothing is laid out again."""
    legend, transform = ax.get_legend(), ax.yaxis.get_transform()
    low, high = transform.transform(ax.get_ylim())
    for room in (1.0, *ROOM):
        if room > 1:
            ax.set_ylim(*transform.inverted().transform([low, low + room * (high - low)]))
        for place in PLACES:
            legend.set_loc(place)
            if not crosses(ax):
                return
    ax.set_ylim(*transform.inverted().transform([low, high]))
    _put_below(ax)


def _put_below(ax: Any) -> None:
    """Under the panel and its label, in two columns if there are many entries."""
    from matplotlib.transforms import ScaledTranslation

    entries = [(handle, text.get_text()) for handle, text in zip(*_entries(ax), strict=True)]
    # in inches: the panel becomes smaller for the legend, and its label does not
    drop = (ax.xaxis.get_tightbbox().y0 - ax.bbox.y0) / ax.figure.dpi
    place = ax.transAxes + ScaledTranslation(0, drop, ax.figure.dpi_scale_trans)
    ax.legend(
        *zip(*entries, strict=True),
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=place,
        ncols=1 + (len(entries) > 3),
        columnspacing=1,
        handlelength=1.5,
    )


def _entries(ax: Any) -> tuple[Any, Any]:
    legend = ax.get_legend()
    return legend.legend_handles, legend.get_texts()


def _name_bands(figure: Any) -> None:
    """One entry for each kind of band, outside the panels."""
    from matplotlib.patches import Patch

    bands = (one for ax in figure.axes for one in ax.collections if type(one).__name__ == "FillBetweenPolyCollection")
    names = dict.fromkeys(str(one.get_gid()) for one in bands if one.get_gid())
    if names:
        patches = [Patch(color="gray", alpha=0.3, linewidth=0, label=f"band: {name}") for name in names]
        figure.legend(handles=patches, loc="outside lower right", ncols=len(names), borderaxespad=0.1)
