"""How much is held at a time where no kernel is planned: sweeps over samples, columns, features of layers."""

from collections.abc import Iterator, Mapping

from featlearn.measurement import Measurement
from featlearn.planning.memory import byte_budget

# Numbers in a block of columns, which is held on its way into sums over samples.
_COLUMNS = 2**24


def samples_at_once(measurement: Measurement, memory: str | int | None, graphs: float, held: int) -> int:
    """How many samples fit, each taking this many graphs of a forward pass, beside vectors of parameters."""
    example = measurement.example()
    graph = example.graph.structure.output_bytes / len(example.indices) if example.graph else 1.0
    weights = sum(p.numel() * p.element_size() for p in measurement.parameters.values())
    fitting = (byte_budget(memory, measurement.device) - (held + 3) * weights) / (graphs * graph + 1)
    # On a CPU larger chunks are no faster, on a GPU small ones leave it idle.
    most = 1024 if measurement.device.type == "cuda" else 128
    return int(max(1, min(most, fitting)))


def vectors_at_once(measurement: Measurement, memory: str | int | None, count: int) -> int:
    """How many of `count` vectors of parameters are held at a time: a quarter of the memory."""
    size = sum(p.numel() * max(p.element_size(), 4) for p in measurement.parameters.values())
    return int(max(1, min(count, byte_budget(memory, measurement.device) // (4 * size))))


def columns_at_once(
    measurement: Measurement, memory: str | int | None, rows: int, classes: int, sample_bytes: float
) -> int:
    """How many samples of a kernel's columns are taken together, for so many rows of all pairs of classes.

    The inputs of a block are held too, in an eighth of the memory.
    """
    step = max(64, min(4096, _COLUMNS // (rows * classes**2)))
    room = byte_budget(memory, measurement.device) // 8
    return max(1, min(step, int(room / sample_bytes)))


def feature_groups(
    widths: Mapping[str, int], available: int, itemsize: int, held: int, largest: int
) -> Iterator[tuple[list[str], int, int]]:
    """Layers whose features of all samples fit together; a layer too wide for that alone, in blocks of samples.

    Gives names, samples in a block and samples in a forward pass. `widths`: numbers that each layer has of a sample;
    `held`: samples that are held together.
    """
    room = int(0.5 * available) // itemsize

    def group(names: list[str], block: int) -> tuple[list[str], int, int]:
        width = sum(widths[name] for name in names)
        return names, block, max(1, min(block, int(0.15 * available) // (width * itemsize)))

    names: list[str] = []
    total = 0
    for name, width in widths.items():
        if width * held > room:
            yield group([name], max(1, room // (2 * width)))
            continue
        if names and (total + width) * held > room:
            yield group(names, largest)
            names, total = [], 0
        names.append(name)
        total += width
    if names:
        yield group(names, largest)
