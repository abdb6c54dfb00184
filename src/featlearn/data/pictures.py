"""Image files, read and resized by Pillow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from featlearn.data.files import damaged, missing

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST = 1 << 22  # pixels of one picture; those of the sets here have at most 63 thousand


def read_pictures(paths: Sequence[Path], kind: str, size: int, crop: bool = False) -> NDArray[numpy.uint8]:
    """Pictures as bytes (P, 3, size, size); `crop` keeps the middle square, otherwise the picture is squeezed."""
    pixels = numpy.empty((len(paths), 3, size, size), dtype=numpy.uint8)
    for position, path in enumerate(paths):
        pixels[position] = _picture(path, kind, size, crop)
    return pixels


def resized(pixels: NDArray[numpy.uint8], size: int) -> NDArray[numpy.uint8]:
    """Bytes (P, 3, height, width) as (P, 3, size, size)."""
    if pixels.shape[2:] == (size, size):
        return pixels
    from PIL import Image

    found = numpy.empty((len(pixels), 3, size, size), dtype=numpy.uint8)
    for position, image in enumerate(pixels):
        found[position] = _square(Image.fromarray(numpy.ascontiguousarray(image.transpose(1, 2, 0))), size)
    return found


def _picture(path: Path, kind: str, size: int, crop: bool) -> NDArray[numpy.uint8]:
    from PIL import Image

    if not path.is_file():
        missing(path.parent, ("",), (path.name,), "a picture named in the list is not there")
    try:
        with Image.open(path, formats=[kind]) as image:
            width, height = image.size
            if width * height > _MOST:  # before it is unpacked
                raise ValueError(f"{width} x {height} pixels")
            coloured = image.convert("RGB")
    except Exception as error:  # a damaged picture fails in any way there is
        raise damaged(path, f"cannot be read ({error})", f"a picture in the format {kind}") from error
    if crop:
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        coloured = coloured.crop((left, top, left + side, top + side))
    return _square(coloured, size)


def _square(image: "Image", size: int) -> NDArray[numpy.uint8]:
    from PIL.Image import Resampling

    small = image if image.size == (size, size) else image.resize((size, size), Resampling.BILINEAR)
    return numpy.asarray(small, dtype=numpy.uint8).transpose(2, 0, 1)
