"""One number for all bits of a tensor: what changes the tensor changes it."""

import pytest
import torch
from torch import Tensor

from featlearn.network import fingerprint as module
from featlearn.network.fingerprint import fingerprint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


def drawn(size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(size, generator=generator, dtype=torch.float64)
    return (real * 50).abs().to(dtype) if dtype == torch.uint8 else (real * 50).to(dtype)


CHANGES = {
    "all signs": lambda t: -t,
    "two signs": lambda t: torch.cat([-t[:2], t[2:]]),
    "reversed": lambda t: t.flip(0),
    "two neighbors": lambda t: torch.cat([t[1:2], t[:1], t[2:]]),
    "two pieces": lambda t: torch.cat([t[16:32], t[:16], t[32:]]),
    "shifted": lambda t: t.roll(8),
    "one more": lambda t: torch.cat([t[:-1], t[-1:] + 1]),
}


@pytest.mark.parametrize("piece", [4, 2**15])
@pytest.mark.parametrize("size", [64, 63])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_show(name: str, dtype: torch.dtype, size: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    tensor = drawn(size, dtype)
    changed = CHANGES[name](tensor)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(changed) != fingerprint(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_any_single_bit_shows(dtype: torch.dtype) -> None:
    tensor = drawn(9, dtype)
    seen = {int(fingerprint(tensor))}
    raw = tensor.view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(int(fingerprint(tensor)))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(raw)


def test_zeros_of_either_sign_and_any_place_in_memory() -> None:
    assert fingerprint(torch.zeros(8)) != fingerprint(-torch.zeros(8))
    flat = torch.randn(65)
    assert int(fingerprint(flat[1:])) == int(fingerprint(flat[1:])) != int(fingerprint(flat[:-1]))
    assert int(fingerprint(torch.zeros(0))) == 0
    matrix = torch.randn(6, 4)
    assert fingerprint(matrix.T) == fingerprint(matrix.T.contiguous())
    assert fingerprint(torch.randn(3, 4, dtype=torch.complex64).conj()).dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("offset", range(9))
def test_a_view_has_the_number_of_its_copy(dtype: torch.dtype, offset: int) -> None:
    whole = torch.arange(100).to(dtype)
    for size in (16, 17, 24):
        part = whole[offset : offset + size]
        assert fingerprint(part) == fingerprint(part.clone())
