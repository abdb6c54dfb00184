"""Models whose output is not (P, C): language models, a segmentation network, an encoder-decoder, a VAE, a detector."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A block of causal attention and a two-layer network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT as it is usually written: (logits, loss), and logits at the last position alone without targets."""

    def __init__(self, vocabulary: int = 11, length: int = 8, width: int = 12, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block(width, heads) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class EncoderDecoder(nn.Module):
    """torch's own transformer, called with source and target ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.body = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.body(self.embedding(src), self.embedding(tgt), tgt_mask=mask, tgt_is_causal=True))


class Unnamed(EncoderDecoder):
    """The same with parameters whose names do not say which ids are the decoder's."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return super().forward(first, second)


class Segmentation(nn.Module):
    """Classes of pixels, (P, C, H, W)."""

    def __init__(self, classes: int = 3, wrapped: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.wrapped = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, classes, 1), wrapped

    def forward(self, x: Tensor) -> Any:
        scores = self.head(torch.tanh(self.body(x)))
        return {"out": scores, "aux": x} if self.wrapped else scores


class VAE(nn.Module):
    """It samples in eval mode too, as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(5, 2)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        return torch.sigmoid(self.decoder(z)), mean, log_variance


class Detector(nn.Module):
    """A list with a dictionary for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"boxes": row[None, :4], "scores": row[4:].sigmoid()} for row in self.head(x)]
