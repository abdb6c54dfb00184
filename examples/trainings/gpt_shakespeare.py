"""A GPT of 10.8 million parameters learns the characters of Shakespeare, by AdamW.

    python examples/trainings/gpt_shakespeare.py

Six blocks of width 384, 256 places, batches of 64, no dropout. About 3 minutes on an H200 with other work; needs
shakespeare/input.txt in FEATLEARN_DATA.
"""

import torch
from classification import DEVICE, arguments, schedule, told
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import GPT
from featlearn_papers import data

CYCLE = "to be, or not to be. "


def text(split: str, smoke: bool) -> data.Text:
    """The plays, or one sentence over and over."""
    if not smoke:
        return data.shakespeare(split=split)  # type: ignore[arg-type]
    letters = sorted(set(CYCLE))
    return data.Text(torch.tensor([letters.index(letter) for letter in CYCLE * 50]), "".join(letters))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over all places."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def main() -> None:
    """Train and tell: what is measured are the logits of the character after the last."""
    parser = arguments(__doc__, "gpt-shakespeare")
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(given.seed)
    plays, unseen = text("train", given.smoke), text("test", given.smoke)
    context, batch, steps = (16, 8, 20) if given.smoke else (256, 64, given.steps)
    sizes = {"blocks": 2, "width": 16, "heads": 2} if given.smoke else {"blocks": 6}
    model = GPT(len(plays.vocabulary), context=context, generator=generator, **sizes).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    rates = schedule(optimizer, steps, 0.05)
    (x, y), (x_test, y_test) = (
        tuple(part.to(DEVICE) for part in one.windows(128, context, generator=generator)) for one in (plays, unseen)
    )
    watched = fl.watch(
        model,
        (x[:64], y[:64, -1]),
        out=given.out,
        test=(x_test[:64], y_test[:64, -1]),
        optimizer=optimizer,
        readout=fl.readouts.last_token,
        settings={"seed": given.seed},
        overwrite=True,
    )
    with watched as watch:
        for step in range(1, steps + 1):
            inputs, targets = (part.to(DEVICE) for part in plays.windows(batch, context, generator=generator))
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            watch.step(loss=loss)
            if step % max(1, steps // 20) == 0:
                with torch.no_grad():
                    held_out = loss_of(model, x_test, y_test)
                watch.log(held_out_loss=held_out)
                print(f"step {step} of {steps}: loss {loss.item():.3f}, held out {held_out.item():.3f}")
    told(watch.run)


if __name__ == "__main__":
    main()
