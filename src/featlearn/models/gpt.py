"""A small GPT with separate layers for queries, keys, and values."""

import math

import torch
from torch import Tensor, nn

from featlearn.errors import InputValueError
from featlearn.models.layers import Activation, Linear, Parametrization, WeightInitialization, activation_function
from featlearn.shapes import checked_number
from featlearn.theory.arguments import checked_count

__all__ = ["GPT"]


class GPT(nn.Module):
    """Token and position embeddings, transformer blocks, and a linear ``readout`` to tokens.

    The network of Beaglehole et al. 2024 (Fig. 2D) is nanoGPT's for characters of Shakespeare, with 3 blocks instead
    of 6 and no dropout. These are the defaults: width 384, 6 heads, 256 positions, 65 tokens. Blocks are pre-norm, with
    an MLP of 4 times the width; LayerNorms have a gain and no shift. The layers of block b are
    ``blocks.b.attention.query``, ``.key``, ``.value``, ``.output``, ``blocks.b.expansion`` and ``.contraction``. Query,
    key, and value are separate matrices, in contrast to nanoGPT, so that their features are measured separately.

    Kernels need one output per sample: ``fl.ntk(model, tokens, readout=fl.readouts.last_token)``, and for 65 outputs
    ``outputs=fl.Directions(k)``.

    Args:
        tokens: V, size of the vocabulary.
        context: Maximal number of positions T.
        blocks: Number of blocks.
        heads: Number of attention heads; a divisor of `width`.
        width: Width of the residual stream.
        tied: Share the readout's weight with the token embedding, as in nanoGPT; the readout then has no multiplier and
            no bias.
        activation: Activation of the MLPs; gelu in nanoGPT.
        parametrization: ``"standard"``, or ``"ntk"``: linear layers have weights of variance 1 and are scaled in the
            forward pass. Embeddings and gains are the same in both.
        bias: Whether linear layers have a bias, initialized to zero.
        deviation: Standard deviation of initial weights at any width, 0.02 in nanoGPT. It is sqrt(2 blocks) times
            smaller in the last layers of residual branches (``output``, ``contraction``).
        generator: Source of the weights; torch's global generator by default.
    """

    def __init__(
        self,
        tokens: int = 65,
        *,
        context: int = 256,
        blocks: int = 3,
        heads: int = 6,
        width: int = 384,
        tied: bool = True,
        activation: Activation = "gelu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        deviation: float = 0.02,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        count = checked_count(blocks, "blocks")
        if checked_count(width, "width") % checked_count(heads, "heads"):
            raise InputValueError(f"width={width} and heads={heads}, expected a width divisible by heads")
        if not checked_number(deviation, "deviation") > 0:
            raise InputValueError(f"deviation={deviation!r}, expected a number > 0")
        initialization = WeightInitialization(parametrization, "normal", bias, generator)
        self.tokens = _embedding(checked_count(tokens, "tokens"), width, deviation, initialization)
        self.places = _embedding(checked_count(context, "context"), width, deviation, initialization)
        self.blocks = nn.ModuleList(
            _TransformerBlock(width, heads, count, activation, deviation, initialization) for _ in range(count)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        if tied:
            self.readout = Linear(width, tokens, bias=False)
            self.readout.weight = self.tokens.weight
        else:
            self.readout = initialization.linear(width, tokens, width * deviation**2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (P, T), int64, to next-token logits (P, T, V)."""
        length, context = tokens.shape[1], self.places.num_embeddings
        if length > context:
            raise InputValueError(f"tokens have shape {tuple(tokens.shape)}, expected (P, T) with T <= {context}")
        h = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.readout(self.norm(h))
        return logits


class _TransformerBlock(nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        blocks: int,
        activation: str,
        deviation: float,
        initialization: WeightInitialization,
    ) -> None:
        super().__init__()
        last = deviation / math.sqrt(2 * blocks)
        self.activation = activation_function(activation)
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = _Attention(width, heads, deviation, last, initialization)
        self.norm = nn.LayerNorm(width, bias=False)
        self.expansion = initialization.linear(width, 4 * width, width * deviation**2)
        self.contraction = initialization.linear(4 * width, width, 4 * width * last**2)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h))
        added: Tensor = self.contraction(self.activation(self.expansion(self.norm(h))))
        return h + added


class _Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(
        self, width: int, heads: int, deviation: float, last: float, initialization: WeightInitialization
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (initialization.linear(width, width, width * deviation**2) for _ in range(3))
        self.output = initialization.linear(width, width, width * last**2)

    def forward(self, h: Tensor) -> Tensor:
        samples, places, width = h.shape
        shape = (samples, places, self.heads, width // self.heads)
        query, key, value = (part(h).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.output(mixed.transpose(1, 2).reshape(samples, places, width))
        return attended


def _embedding(count: int, width: int, deviation: float, initialization: WeightInitialization) -> nn.Embedding:
    # pass the weight, so that torch draws none
    return nn.Embedding(
        count, width, _weight=torch.empty(count, width).copy_(initialization.unit((count, width)) * deviation)
    )
