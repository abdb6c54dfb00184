"""One number for all bits of a tensor."""

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of as many bytes."""
# Odd factors that spread bits and places over 64 bits, and how many numbers are taken at a time: on a CPU what stays
# in its cache, on a GPU more.
_BITS, _PLACES, _NEXT = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D
_PIECE, _CUDA_PIECE = 2**15, 2**23


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that changes with any bit of a tensor, and when entries trade places; on a GPU not waited for.

    Tensors with the same entries have the same number wherever they lie in memory, on one kind of device.

    Each number is multiplied, its upper half added to the lower one, and multiplied by a factor of its place: products
    modulo 2^64 alone would lose the highest bits of pairs of numbers, two signs say.
    """
    numbers = _integers(tensor)
    size = min(len(numbers), _CUDA_PIECE if numbers.is_cuda else _PIECE)
    places = torch.arange(1, size + 1, device=numbers.device).mul_(_PLACES)
    places = places.bitwise_xor_(places >> 32).mul_(_BITS).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for piece in numbers.split(max(size, 1)):
        spread = piece.long() * _BITS
        spread.bitwise_xor_(spread >> 32).mul_(places[: len(piece)])
        total = total * _NEXT + spread.sum()  # modulo 2^64
    return total


def _integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, of eight bytes where they fit."""
    values = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    flat = values.resolve_neg().contiguous().view(-1)
    width = 8 if flat.nbytes % 8 == 0 else flat.element_size()
    if flat.storage_offset() * flat.element_size() % width:  # eight bytes must begin at a multiple of eight
        flat = flat.clone()
    return flat.view(INTEGERS[width])
