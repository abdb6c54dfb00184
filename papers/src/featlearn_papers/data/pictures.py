"""Read and resize image files with Pillow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import damage, raise_missing

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_PIXELS = 1 << 22  # of one picture; those of the sets here have at most 63 thousand


def read_pictures(paths: Sequence[Path], kind: str, size: int, crop: bool = False) -> NDArray[numpy.uint8]:
    """Read pictures as bytes (P, 3, size, size). `crop` keeps the middle square; otherwise the picture is squeezed."""
    pixels = numpy.empty((len(paths), 3, size, size), dtype=numpy.uint8)
    for position, path in enumerate(paths):
        pixels[position] = _picture(path, kind, size, crop)
    return pixels


def resize(pixels: NDArray[numpy.uint8], size: int) -> NDArray[numpy.uint8]:
    """Resize bytes (P, 3, height, width) to (P, 3, size, size)."""
    if pixels.shape[2:] == (size, size):
        return pixels
    from PIL import Image

    result = numpy.empty((len(pixels), 3, size, size), dtype=numpy.uint8)
    for position, image in enumerate(pixels):
        result[position] = _square(Image.fromarray(numpy.ascontiguousarray(image.transpose(1, 2, 0))), size)
    return result


def _picture(path: Path, kind: str, size: int, crop: bool) -> NDArray[numpy.uint8]:
    from PIL import Image

    if not path.is_file():
        raise_missing(path.parent, ("",), (path.name,), "a picture named in the list is missing")
    try:
        with Image.open(path, formats=[kind]) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:  # check before decompressing
                raise ValueError(f"{width} x {height} pixels")
            colored = image.convert("RGB")
    except Exception as error:  # a damaged picture raises any error
        raise damage(path, f"cannot be read ({error})", f"a picture in the format {kind}") from error
    if crop:
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        colored = colored.crop((left, top, left + side, top + side))
    return _square(colored, size)


def _square(image: "Image", size: int) -> NDArray[numpy.uint8]:
    from PIL.Image import Resampling

    small = image if image.size == (size, size) else image.resize((size, size), Resampling.BILINEAR)
    return numpy.asarray(small, dtype=numpy.uint8).transpose(2, 0, 1)
