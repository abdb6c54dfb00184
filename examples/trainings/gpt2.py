"""GPT-2 of 124 million parameters for its first 300 steps: the tangent kernel of 64 sequences at six checkpoints.

    python examples/trainings/gpt2.py

The network of `transformers` with random weights; tokens are the bytes of Shakespeare. What is measured is the mean
log-probability of a sequence. About 2 minutes on an H200 with other work; needs `transformers`, and
shakespeare/input.txt in FEATLEARN_DATA.
"""

from collections.abc import Mapping

import torch
from classification import DEVICE, arguments, schedule, told
from gpt_shakespeare import text
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import featlearn as fl

CHECKPOINTS = (10, 30, 100, 200)
"""steps between the first and the last, which are always measured"""


def log_probability(output: object, x: Mapping[str, Tensor]) -> Tensor:
    """Of each sequence, the mean over its places, (P,)."""
    logits, tokens = output.logits[:, :-1], x["input_ids"][:, 1:]  # type: ignore[attr-defined]
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).mean((1, 2))


def main() -> None:
    """Train and tell."""
    parser = arguments(__doc__, "gpt2")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    generator = torch.Generator().manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    plays = text("train", given.smoke)
    length, batch, steps, probe = (16, 4, 12, 8) if given.smoke else (256, 32, given.steps, 64)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64} if given.smoke else {}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    model = GPT2LMHeadModel(config).to(DEVICE)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    rates = schedule(optimizer, steps, 0.1)
    x = {"input_ids": plays.windows(probe, length // 2, generator=generator)[0].to(DEVICE)}
    watched = fl.watch(
        model,
        (x, None),
        out=given.out,
        every=lambda step: step in CHECKPOINTS,
        readout=log_probability,
        budget=None,
        quantities=["gap", "kernel", "weights"],
        optimizer=optimizer,
        settings={"seed": given.seed},
        overwrite=True,
    )
    with watched as watch:
        for step in range(1, steps + 1):
            tokens, targets = (part.to(DEVICE) for part in plays.windows(batch, length, generator=generator))
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
                logits = model(tokens).logits
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            watch.step(loss=loss)
            if step % max(1, steps // 10) == 0:
                print(f"step {step} of {steps}: loss {loss.item():.3f}")
    told(watch.run)


if __name__ == "__main__":
    main()
