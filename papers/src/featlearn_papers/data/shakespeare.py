"""Tiny Shakespeare, a text of a million characters."""

from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

from featlearn.data.dataset_files import Root, damage, locate
from featlearn.data.draws import checked_count, checked_generator
from featlearn.errors import InputValueError

__all__ = ["Text", "shakespeare"]

_FOLDERS = ("shakespeare", "tinyshakespeare", "shakespeare_char", "")
_MAX_BYTES = 1 << 30
_TRAIN = 0.9


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers.

    Attributes:
        tokens: Positions in `vocabulary`, shape (N,), int64.
        vocabulary: Different characters of the whole text, sorted.
        name: Name of the text.
    """

    tokens: Tensor
    vocabulary: str
    name: str = ""

    def windows(self, samples: int, context: int, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw windows of the text: x and y (samples, context), with y[:, t] the character after x[:, t].

        Windows start at uniformly drawn positions and may overlap. `generator` is a new one with seed 0 by default.
        """
        rows, length = checked_count(samples, "samples"), checked_count(context, "context")
        positions = len(self.tokens) - length
        if positions < 1:
            raise InputValueError(f"context={length}, but the text has {len(self.tokens)} characters; take fewer")
        generator = checked_generator(generator)
        starts = torch.randint(positions, (rows, 1), generator=generator, device=generator.device).cpu()
        windows = self.tokens[starts + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def text(self, tokens: Tensor) -> str:
        """Return tokens (T,) as characters."""
        return "".join(self.vocabulary[int(token)] for token in tokens)


def shakespeare(root: Root = None, split: Literal["train", "test", "all"] = "train") -> Text:
    """Read Tiny Shakespeare: 1,115,394 characters of plays, 65 different ones (Beaglehole et al. 2024, Fig. 2D).

    Args:
        root: Directory with ``shakespeare/input.txt`` or ``tinyshakespeare/input.txt``. FEATLEARN_DATA by default.
        split: ``"train"``, the first 90 % of the text; ``"test"``, the rest; or ``"all"``. nanoGPT uses the same split;
            none is official.

    Returns:
        `Text` with `tokens` (N,), `vocabulary`, and `windows(samples, context)` for inputs and targets.
    """
    if split not in ("train", "test", "all"):
        raise InputValueError(f"split is {split!r}, expected 'train', 'test' or 'all'")
    path = locate(root, _FOLDERS, ("input.txt",), "shakespeare")
    if not 0 < path.stat().st_size <= _MAX_BYTES:
        raise damage(path, f"has {path.stat().st_size} bytes", "a text of about a million")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damage(path, f"is not text ({error})", "characters in UTF-8") from error
    codes = numpy.frombuffer(text.encode("utf-32-le"), dtype=numpy.uint32)
    characters, tokens = numpy.unique(codes, return_inverse=True)
    cut = int(_TRAIN * len(tokens))
    part = {"train": slice(cut), "test": slice(cut, None), "all": slice(None)}[split]
    vocabulary = "".join(chr(code) for code in characters)
    return Text(torch.from_numpy(tokens.reshape(-1)[part].astype(numpy.int64)), vocabulary, "shakespeare")
