"""Perceptrons, VGG-11 and GPT along training: the experiment behind Fig. 2, 13, 14 and 15 of Beaglehole et al. 2024."""

from dataclasses import dataclass

from featlearn.papers.context import Context
from featlearn.papers.experiment import Experiment, Size
from featlearn.papers.paper_003.tracking import Images, Language, convolutional, language_model, perceptron
from featlearn.papers.runs import Numbers
from featlearn.papers.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. I: width 256 and five hidden layers; what is unlike the paper in the rest is said at each scale."""

    perceptrons: tuple[Images, ...]
    width: int = 256
    hidden_layers: int = 5
    vgg: Images
    vgg_width: int = 64
    vgg_head: int = 4096
    gpt: Language

    @property
    def mlps(self) -> list[str]:
        """The names of the perceptrons' numbers."""
        return [f"mlp-{one.data}" for one in self.perceptrons]

    @property
    def architectures(self) -> dict[str, list[str]]:
        """Kind of network -> the names of its numbers."""
        return {"mlp": self.mlps, "vgg": ["vgg"], "gpt": ["gpt"]}


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """All networks, one after the other; NAME/steps, NAME/cosine ... as `FeatureTracker.through` gives them."""
    found = {f"mlp-{one.data}": perceptron(one, setup.width, setup.hidden_layers, context) for one in setup.perceptrons}
    found["vgg"] = convolutional(setup.vgg, setup.vgg_width, setup.vgg_head, context)
    found["gpt"] = language_model(setup.gpt, context)
    return {f"{name}/{what}": values for name, path in found.items() for what, values in path.items()}


SMOKE = Setup(
    perceptrons=(Images(data="digits", samples=256, epochs=20, lr=5.0, batch=64, probe=64),), width=32, hidden_layers=3,
    vgg=Images(data="digits", samples=48, epochs=2, lr=0.1, batch=16, momentum=0.9, probe=8), vgg_width=4, vgg_head=16,
    gpt=Language(data="cycle", blocks=1, width=16, heads=2, context=8, batch=8, steps=20, probe=8, probes=2),
)  # fmt: skip
LAPTOP = Setup(
    perceptrons=(
        Images(data="mnist", samples=2000, epochs=50, lr=10.0, probe=128),
        Images(data="cifar10", samples=2000, epochs=50, lr=2.0, pooling=2, probe=128),
        Images(data="svhn", samples=2000, epochs=50, lr=2.0, pooling=2, probe=128),
        Images(data="cifar100", samples=2000, epochs=50, lr=2.0, pooling=2, probe=128),
        Images(data="stl10", samples=2000, epochs=50, lr=1.0, pooling=6, probe=128),
        Images(data="gtsrb", samples=2000, drawn=True, epochs=50, lr=1.0, pooling=2, probe=128),
    ),
    vgg=Images(data="cifar10", samples=500, epochs=40, lr=0.1, batch=50, momentum=0.9, probe=64),
    vgg_width=8, vgg_head=64,
    gpt=Language(width=64, heads=4, context=32, batch=16, steps=400),
)  # fmt: skip
PAPER = Setup(
    perceptrons=(
        Images(data="mnist", samples=50_000, epochs=20, lr=10.0, probe=1000),
        Images(data="cifar10", samples=10_000, epochs=150, lr=0.2, probe=1000),
    ),
    vgg=Images(data="cifar10", samples=10_000, epochs=50, lr=0.03, batch=256, momentum=0.9, probe=256),
    gpt=Language(),
)  # fmt: skip

TRACKED = Experiment(
    id="003/tracked-networks",
    sizes={
        Scale.SMOKE: Size(setup=SMOKE, seeds=1, seconds=6, mebibytes=50),
        Scale.LAPTOP: Size(setup=LAPTOP, seeds=3, seconds=115, mebibytes=400),
        Scale.PAPER: Size(setup=PAPER, seeds=3, seconds=232, mebibytes=3400, device="cuda"),
    },
    measure=measure,
)
