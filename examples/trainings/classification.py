"""What the trainings on images share: data on the device, random crops, a schedule, and a watched loop."""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.record import Run
from featlearn_papers.data import image_reader

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBE = 128
"""samples that are measured, and as many unseen ones"""


class Images(NamedTuple):
    """Pictures of which means and deviations of colors are taken out, and classes."""

    x: Tensor
    labels: Tensor
    x_test: Tensor
    labels_test: Tensor


class Training(NamedTuple):
    """How long, how fast, in what portions."""

    epochs: int
    batch: int
    lr: float
    warm: float = 0.1
    """share of the steps over which the rate rises; then it falls to zero along a cosine"""


def arguments(about: str, out: str) -> argparse.ArgumentParser:
    """The options that all trainings have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / out, help="folder of the run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes, on made-up or built-in data")
    return parser


def images(name: str, samples: int, tested: int, smoke: bool) -> Images:
    """The first pictures of a data set; where it is only to be seen that everything runs, small digits."""
    if smoke:
        data = fl.data.digits()
        x = data.x.view(-1, 1, 8, 8).expand(-1, 3, 8, 8).contiguous()
        parts = [x[:128], data.labels[:128], x[128:144], data.labels[128:144]]
    else:
        read = image_reader(name)
        train, test = (read(split=split, samples=n) for split, n in (("train", samples), ("test", tested)))
        parts = [train.x, train.labels, test.x, test.labels]
    mean, deviation = parts[0].mean((0, 2, 3), keepdim=True), parts[0].std((0, 2, 3), keepdim=True)
    parts[0], parts[2] = ((x - mean) / deviation for x in (parts[0], parts[2]))
    return Images(*(part.to(DEVICE) for part in parts))


def cropped(x: Tensor, flip: bool = True, padding: int = 4) -> Tensor:
    """Each picture moved by up to `padding` pixels, and mirrored or not."""
    samples, _, height, width = x.shape
    down, right = torch.randint(2 * padding + 1, (2, samples, 1), device=x.device)
    rows, columns = (torch.arange(n, device=x.device) + shift for n, shift in ((height, down), (width, right)))
    if flip:
        mirrored = torch.rand(samples, 1, device=x.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = nn.functional.pad(x, (padding,) * 4)
    picked = padded[torch.arange(samples, device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def schedule(optimizer: torch.optim.Optimizer, steps: int, warm: float) -> torch.optim.lr_scheduler.LambdaLR:
    """Up in a line, down along a cosine."""
    rise = max(1, round(warm * steps))

    def share(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Share of right classes, in eval mode."""
    was = model.training
    model.eval()
    parts = zip(x.split(1000), labels.split(1000), strict=True)
    right = sum(int((model(some).argmax(1) == wanted).sum()) for some, wanted in parts)
    model.train(was)
    return right / len(x)


def train(
    model: nn.Module,
    data: Images,
    optimizer: torch.optim.Optimizer,
    training: Training,
    out: Path,
    settings: dict[str, object],
    flip: bool = True,
) -> Run:
    """Cross-entropy on random crops, in bfloat16 on a GPU; the run, with the test accuracy after every epoch."""
    steps = training.epochs * (len(data.x) // training.batch)
    rates = schedule(optimizer, steps, training.warm)
    samples = min(PROBE, len(data.x_test))
    watched = fl.watch(
        model,
        (data.x[:samples], data.labels[:samples]),
        out=out,
        test=(data.x_test[:samples], data.labels_test[:samples]),
        optimizer=optimizer,
        loss="cross-entropy",
        settings=settings,
        overwrite=True,
    )
    with watched as watch:
        for epoch in range(training.epochs):
            order = torch.randperm(len(data.x), device=data.x.device).split(training.batch)
            for rows in order[: len(data.x) // training.batch]:
                with torch.autocast(data.x.device.type, torch.bfloat16, enabled=data.x.is_cuda):
                    loss = nn.functional.cross_entropy(model(cropped(data.x[rows], flip)), data.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rates.step()
                watch.step(loss=loss)
            reached = accuracy(model, data.x_test, data.labels_test)
            watch.log(held_out_accuracy=reached)
            print(f"epoch {epoch + 1} of {training.epochs}: loss {loss.item():.3f}, test accuracy {reached:.3f}")
    return watch.run


def told(run: Run) -> None:
    """Verdict on the screen, report beside the run."""
    print(fl.diagnose(run))
    print(f"report: {run.report(Path(run.path) / 'report.html')}")
