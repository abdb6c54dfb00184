"""What the pictures of a report need: samples to show, and the inputs that a network is most sensitive to."""

import math
from dataclasses import replace

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, ModelWithInputs, map_tensors, read_output, tensors_in

SAMPLES = 64
"""Largest number of samples that are shown."""
SIDE = 64
"""Largest height and width of a thumbnail in pixels."""
SMALLEST_SQUARE = 49
"""Smallest number of columns that may be the pixels of a square image."""
SMOOTH = 0.75
"""Mean difference of neighboring pixels over that of any two, below which rows of numbers are taken for images."""
TOKENS, COLUMNS = 24, 8
"""Largest number of tokens of a sequence, and of columns of a table, that are shown."""
PATTERNS, DIRECTIONS = 4, 10
"""Number of eigenvectors, and largest number of outputs whose gradients they are of."""
LARGEST = 2**23
"""Numbers in the gradients of all samples together: 32 MiB in float32."""
WORDS, NEAREST, LARGEST_VOCABULARY = 12, 5, 2**16
"""Tokens whose nearest ones are recorded, how many of those, and the largest vocabulary."""

Arrays = dict[str, numpy.ndarray]


def picture_arrays(batch: ModelWithInputs, *, first: bool) -> Arrays:
    """Return the arrays of one measurement; samples with the first one alone. Empty if there is nothing to show."""
    arrays = _shown_samples(batch) if first else {}
    if any(tensor.is_floating_point() for tensor in _by_sample(batch.x, batch.samples)):
        arrays |= _patterns(batch)
    return arrays | _nearest_tokens(batch)


def _by_sample(x: Inputs, samples: int) -> list[Tensor]:
    """Return the tensors that have a row for each sample."""
    return [tensor.detach() for tensor in tensors_in(x) if tensor.dim() > 1 and len(tensor) == samples]


def _chosen(samples: int, count: int) -> Tensor:
    """Return `count` places spread over the samples."""
    return torch.linspace(0, samples - 1, min(samples, count)).round().long()


def _shown_samples(batch: ModelWithInputs) -> Arrays:
    tensors = _by_sample(batch.x, batch.samples)
    if not tensors:
        return {}
    places = _chosen(batch.samples, SAMPLES)
    rows = tensors[0][places.to(tensors[0].device)].cpu()
    arrays = {"samples": places.numpy()}
    shape = image_shape(rows)
    if shape is not None:
        return arrays | {"thumbnails": _thumbnails(_images(rows, shape))}
    if rows.dim() == 2 and not rows.is_floating_point() and not rows.is_complex():
        return arrays | {"tokens": rows[:, -TOKENS:].long().numpy()}
    return arrays | ({"rows": rows[:, :COLUMNS].float().numpy()} if rows.dim() == 2 and not rows.is_complex() else {})


def image_shape(rows: Tensor) -> tuple[int, int, int] | None:
    """Return (channels, height, width) if the rows of a batch are images, else None.

    Batches (P, 1 or 3, H, W) are images. Rows of a square number of columns, and matrices, are images if neighboring
    pixels are more alike than others.
    """
    if rows.is_complex() or rows.dtype == torch.bool or min(rows.shape) == 0:
        return None
    if rows.dim() == 4 and rows.shape[1] in (1, 3):
        return rows.shape[1], rows.shape[2], rows.shape[3]
    if not rows.is_floating_point():
        return None
    side = math.isqrt(rows.shape[1])
    if rows.dim() == 2 and rows.shape[1] >= SMALLEST_SQUARE and side * side == rows.shape[1]:
        shape = (1, side, side)
    elif rows.dim() == 3 and min(rows.shape[1:]) ** 2 >= SMALLEST_SQUARE:
        shape = (1, rows.shape[1], rows.shape[2])
    else:
        return None
    pixels = rows.double().reshape(len(rows), *shape[1:])
    near = (pixels.diff(dim=1).abs().mean() + pixels.diff(dim=2).abs().mean()) / 2
    order = torch.randperm(shape[1] * shape[2], generator=torch.Generator().manual_seed(0))
    flat = pixels.flatten(1)
    far = (flat - flat[:, order]).abs().mean()
    return shape if float(near) < SMOOTH * float(far) else None


def _images(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return images (n, channels, height, width), at most SIDE pixels high and wide."""
    images = rows.float().reshape(len(rows), *shape)
    height, width = (min(size, SIDE) for size in shape[1:])
    return images if (height, width) == shape[1:] else interpolate(images, (height, width), mode="area")


def _thumbnails(images: Tensor) -> numpy.ndarray:
    """Scale images to bytes, the smallest value to 0 and the largest to 255: (n, height, width), or (n, height,
    width, 3).
    """
    low, high = images.amin(), images.amax()
    bytes_ = ((images - low) / (high - low).clamp(min=1e-30) * 255).round().to(torch.uint8)
    array: numpy.ndarray = (bytes_[:, 0] if bytes_.shape[1] == 1 else bytes_.permute(0, 2, 3, 1)).contiguous().numpy()
    return array


def _patterns(batch: ModelWithInputs) -> Arrays:
    """Return leading eigenvectors of the average gradient outer product, and their shares of its trace."""
    gradients, shape = _input_gradients(batch)
    flat = gradients.double()
    flat = flat / flat.norm().clamp(min=1e-300)
    values, vectors = torch.linalg.eigh(flat @ flat.mT)
    values, vectors = values.flip(0).clamp(min=0)[:PATTERNS], vectors.flip(1)[:, :PATTERNS]
    patterns = normalize(vectors.mT @ flat, dim=1).float()
    largest = patterns.abs().argmax(1, keepdim=True)
    patterns = patterns * patterns.gather(1, largest).sign()
    arrays = {"shares": values.numpy()}
    if shape is not None:
        return arrays | {"patterns": _images(patterns, shape).numpy()}
    sensitivity = flat.square().sum(0)
    heaviest = sensitivity.argsort(descending=True, stable=True)[:COLUMNS]
    return arrays | {"columns": heaviest.numpy(), "column_shares": sensitivity[heaviest].numpy()}


def _input_gradients(batch: ModelWithInputs) -> tuple[Tensor, tuple[int, int, int] | None]:
    """Return gradients (n, D) of outputs, or of random sums of them, by the first inputs; and their image shape."""
    asking = replace(batch, x=map_tensors(batch.x, _with_gradient))
    (rows, *_) = [one for one in _by_sample(batch.x, batch.samples) if one.is_floating_point()]
    size, parts = rows[0].numel(), []
    count = max(4, min(SAMPLES, LARGEST // (DIRECTIONS * size)))
    with torch.enable_grad():
        raw, x = asking.call(_chosen(batch.samples, count))
        outputs = read_output(raw, x, batch.readout)
        outputs = outputs.reshape(len(outputs), -1)
        (inputs, *_) = [one for one in tensors_in(x) if one.requires_grad and one.dim() > 1]
        for direction in _directions(outputs):
            (part,) = torch.autograd.grad(outputs, inputs, direction, retain_graph=True, allow_unused=True)
            parts.append(torch.zeros_like(inputs) if part is None else part)
    return torch.cat(parts).flatten(1).detach().cpu(), image_shape(rows[:SAMPLES].cpu())


def _with_gradient(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.requires_grad_(True) if plain.is_floating_point() else plain


def _directions(outputs: Tensor) -> Tensor:
    """Return (k, n, C): each output, or random signs of all where they are many."""
    classes = outputs.shape[1]
    signs = torch.eye(classes)
    if classes > DIRECTIONS:
        draw = torch.rand(DIRECTIONS, classes, generator=torch.Generator().manual_seed(0))
        signs = (draw < 0.5).float() * 2 - 1
    return signs[:, None].expand(-1, len(outputs), -1).to(outputs)


def _nearest_tokens(batch: ModelWithInputs) -> Arrays:
    """Return the nearest embeddings of the most frequent tokens; empty without tokens or without an embedding."""
    tensors = [one for one in _by_sample(batch.x, batch.samples) if one.dtype in (torch.int64, torch.int32)]
    embeddings = [part for part in unwrapped(batch.model).modules() if isinstance(part, nn.Embedding)]
    if not tensors or not embeddings or not NEAREST < embeddings[0].num_embeddings <= LARGEST_VOCABULARY:
        return {}
    weight = embeddings[0].weight.detach()
    counts = torch.bincount(tensors[0].flatten().cpu().clamp(min=0), minlength=len(weight))
    words = counts[: len(weight)].argsort(descending=True, stable=True)[:WORDS]
    table = normalize(weight.float(), dim=1)
    likeness = (table[words.to(table.device)] @ table.mT).cpu()
    likeness.scatter_(1, words[:, None], -math.inf)
    return {"words": words.numpy(), "nearest": likeness.topk(NEAREST, 1).indices.numpy()}


def picture_work(outputs: int, samples: int) -> tuple[int, int]:
    """Return the number of output directions and of samples of the gradients."""
    return min(outputs, DIRECTIONS), min(samples, SAMPLES)
