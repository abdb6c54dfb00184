"""Pictures of figures: what saving them keeps."""

import numpy
from PIL import Image

from featlearn_papers.frame.drawing import _fewer_colors


def test_a_palette_keeps_the_color_of_a_thin_line(tmp_path):
    import matplotlib

    pixels = matplotlib.colormaps["viridis"](numpy.random.default_rng(0).random((300, 400)))[:, :, :3] * 255
    pixels = pixels.astype(numpy.uint8)
    pixels[100], pixels[150] = (0, 114, 178), (255, 255, 255)
    Image.fromarray(pixels).save(tmp_path / "figure.png")
    _fewer_colors(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.mode == "P"
        after = numpy.asarray(image.convert("RGB"), dtype=int)
    assert abs(after[[100, 150]] - pixels[[100, 150]]).max() <= 8
