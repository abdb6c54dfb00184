"""The table of a sweep as arrays over its axes."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from featlearn.sweeps.results import Sweep


def dataset(sweep: "Sweep", xarray: Any) -> Any:
    """An `xarray.Dataset` over axes and seed, or over point and seed where the points are no full grid."""
    seeds = sorted({row["seed"] for row in sweep.rows})
    axes = sweep.axes
    full = math.prod(map(len, axes.values())) == len(sweep.points)
    if full:
        coordinates: dict[str, Any] = {name: (name, _array(values)) for name, values in axes.items()}
        places = [tuple(_index(axes[name], row[name]) for name in axes) for row in sweep.rows]
        names, shape = list(axes), [len(values) for values in axes.values()]
    else:
        coordinates = {
            name: ("point", _array([point.settings.get(name) for point, _ in sweep.points])) for name in axes
        }
        places = [(number,) for number, (_, own) in enumerate(sweep.points) for _ in own]
        names, shape = ["point"], [len(sweep.points)]
    coordinates["seed"] = ("seed", numpy.array(seeds, dtype=int))
    variables = {}
    for column in [*sweep.columns, "status", "seconds"]:
        cells = numpy.full([*shape, len(seeds)], None, dtype=object)
        for place, row in zip(places, sweep.rows, strict=True):
            cells[(*place, seeds.index(row["seed"]))] = row[column]
        if column == "status":
            cells[cells == None] = "missing"  # noqa: E711 # elementwise
        variables[column] = ([*names, "seed"], _numbers(cells))
    same = {name: values[0] for name, values in sweep.settings.items() if name not in axes}
    told = {name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in same.items()}
    return xarray.Dataset(variables, coordinates, {"function": sweep.function, **told})


def _index(values: Sequence[Any], value: Any) -> int:
    """By type too: 1, 1.0 and True are different settings."""
    return next(i for i, one in enumerate(values) if type(one) is type(value) and one == value)


def _array(values: Sequence[Any]) -> numpy.ndarray:
    """Numbers as numbers, all else as words."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return numpy.array(values)
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return numpy.array(words, dtype=object)


def _numbers(cells: numpy.ndarray) -> numpy.ndarray:
    """Floats, nan for None, if there is no word among them."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in cells.flat):
        return numpy.array([math.nan if v is None else float(v) for v in cells.flat]).reshape(cells.shape)
    return cells
