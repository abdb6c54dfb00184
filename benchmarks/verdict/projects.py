"""Projects as their owners write them: fine-tuning, reinforcement learning, generative models, awkward training loops.

    python -m benchmarks.verdict.cases projects

Where theory does not fix the regime, the reference gap decides.
"""

import copy
import math
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.cases import Case, State, Trained, adam, collector, sgd, trained, watched
from benchmarks.verdict.constructions import Samples
from benchmarks.verdict.reference import linearization_gap
from benchmarks.verdict.training import copied

CASES: dict[str, Case] = {}
case = collector(CASES)


class Part(nn.Module):
    """One tensor of what a model returns, in eval mode."""

    def __init__(self, model: nn.Module, key: int | str) -> None:
        super().__init__()
        self.model, self.key = model, key

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[self.key].flatten(1)


def gap_since(model: nn.Module, initial: State, x: Tensor) -> float:
    return linearization_gap(model, initial, copied(model), x)


# Fine-tuning a network that was trained on another task.


def pretrained(seed: int, norm: type[nn.Module] | None = None) -> nn.Sequential:
    """A CNN that tells odd from even digits, with a new head for ten classes."""
    model = net.cnn((16, 32), 2, norm=norm)
    train, _ = tasks.digits(seed, 1000, targets="labels")
    optimizer, generator = adam(model, 3e-3), tasks.generator(seed)
    for _ in range(150):
        rows = torch.randint(len(train.x), (64,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(train.x[rows]), train.y[rows] % 2).backward()
        optimizer.step()
    model[-1] = nn.Linear(model[-1].in_features, 10)
    return model


@case("fine-tuning, fully", before="rich", reason="AdamW at a usual rate, a cosine schedule, clipped gradients")
def fully(path: Path) -> Trained:
    model = pretrained(3001)
    train, test = tasks.digits(3001, 300, targets="labels")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    initial, generator = copied(model), tasks.generator(3001)
    with watched(model, (train.x[:100], train.y[:100]), path, tuple(test), optimizer, nn.CrossEntropyLoss()) as watch:
        for _ in range(300):
            rows = torch.randint(len(train.x), (32,), generator=generator)
            loss = functional.cross_entropy(model(train.x[rows]), train.y[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            watch.step(loss=loss)
    return Trained(run=watch.run, reference=gap_since(model, initial, test.x))


@case(
    "fine-tuning, the head alone under BatchNorm",
    before="lazy",
    expected=("lazy",),
    reason="linear in the trained weights",
)
def head_only(path: Path) -> Trained:
    model = net.frozen(pretrained(3002, nn.BatchNorm2d))
    train, test = tasks.digits(3002, 300, targets="labels", raw=True)  # inputs of another scale: statistics move
    run = trained(
        path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=adam(model, 1e-2), steps=300, batch=32
    )
    return Trained(run=run, reference=0.0)


class LowRank(nn.Module):
    """W x + (alpha / r) B A x, W frozen."""

    def __init__(self, frozen: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.frozen, self.scale = frozen.requires_grad_(False), alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.lora_b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def adapters(path: Path, seed: int, rate: float) -> Trained:
    """Train adapters in the attention of a small transformer."""
    model = net.Transformer(10, 32, 2, 4)
    train, test = tasks.digits(seed, 600, targets="labels")
    optimizer = adam(model, 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(train.x), (train.y // 2) % 5).backward()
        optimizer.step()
    plain, first = copy.deepcopy(model), copied(model)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)
    changed = [(part.y // 2 + (part.x[:, 20] > 0)) % 5 for part in (train, test)]
    train, test = (Samples(part.x, y) for part, y in zip((train, test), changed, strict=True))
    loss = nn.CrossEntropyLoss()
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, rate), steps=300, batch=64)
    merged, names = dict(first), []
    for i, block in enumerate(model.blocks):
        for name in ("qkv", "out"):
            part = getattr(block, name)
            names.append(f"blocks.{i}.{name}.weight")
            merged[names[-1]] = first[names[-1]] + (part.scale * part.lora_b @ part.lora_a).detach()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in names)
    return Trained(run=run, reference=linearization_gap(plain, first, merged, test.x))


@case("fine-tuning, adapters at a small rate", before="rich", reason="the reference is that of merged weights")
def gentle_adapters(path: Path) -> Trained:
    return adapters(path, 3003, 1e-4)


@case("fine-tuning, adapters at a large rate", before="rich", reason="the reference is that of merged weights")
def strong_adapters(path: Path) -> Trained:
    return adapters(path, 3004, 1e-2)


# Reinforcement learning on a cart with a pole, written out.


def cart_pole(state: list[float], action: int) -> tuple[list[float], bool]:
    """One step of Barto, Sutton & Anderson 1983 with Euler's method, 0.02 s; and whether the pole fell."""
    x, speed, angle, turn = state
    force = 10.0 if action else -10.0
    sine, cosine = math.sin(angle), math.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    spin = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    drive = push - 0.05 * spin * cosine / 1.1
    state = [x + 0.02 * speed, speed + 0.02 * drive, angle + 0.02 * turn, turn + 0.02 * spin]
    return state, abs(state[0]) > 2.4 or abs(state[2]) > 0.21


def fresh(dice: random.Random) -> list[float]:
    return [dice.uniform(-0.05, 0.05) for _ in range(4)]


@case(
    "DQN",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate, a target network, targets that follow the network",
)
def dqn(path: Path) -> Trained:
    dice, model = random.Random(0), net.mlp([4, 64, 64, 2])
    target, optimizer = copy.deepcopy(model), adam(model, 1e-3)
    memory: list[tuple[list[float], int, list[float], bool]] = []
    state = fresh(dice)
    probe = torch.tensor([fresh(dice) for _ in range(64)]) * torch.tensor([20.0, 20.0, 3.0, 20.0])
    initial = copied(model)
    with watched(model, (probe, None), path, None, optimizer) as watch:
        for step in range(1500):
            explore = dice.random() < max(0.05, 1 - step / 500)
            with torch.no_grad():
                action = dice.randrange(2) if explore else int(model(torch.tensor([state])).argmax())
            after, done = cart_pole(state, action)
            memory.append((state, action, after, done))
            state = fresh(dice) if done else after
            s, a, n, d = zip(*dice.choices(memory, k=64), strict=True)
            with torch.no_grad():
                wanted = 1 + 0.99 * target(torch.tensor(n)).max(1).values * (1 - torch.tensor(d).float())
            values = model(torch.tensor(s)).gather(1, torch.tensor(a)[:, None])[:, 0]
            loss = functional.smooth_l1_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            if step % 100 == 99:
                target.load_state_dict(model.state_dict())
    return Trained(run=watch.run, reference=gap_since(model, initial, probe))


class ActorCritic(nn.Module):
    """(logits, value) on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.actor(h), self.critic(h)[:, 0]


@case("PPO", before="rich", reason="a clipped surrogate, a loss without a lower end; tuples as outputs")
def ppo(path: Path) -> Trained:
    dice, model = random.Random(1), ActorCritic()
    optimizer = adam(model, 1e-3)
    probe = torch.tensor([fresh(dice) for _ in range(64)]) * torch.tensor([20.0, 20.0, 3.0, 20.0])
    initial = copied(model)
    with watched(model, (probe, None), path, None, optimizer, readout=lambda out: out[0]) as watch:
        state = fresh(dice)
        for _ in range(12):
            states, actions, rewards, dones = [], [], [], []
            for _ in range(256):
                with torch.no_grad():
                    action = int(torch.distributions.Categorical(logits=model(torch.tensor([state]))[0]).sample())
                after, done = cart_pole(state, action)
                states.append(state), actions.append(action), rewards.append(1.0), dones.append(done)
                state = fresh(dice) if done else after
            s, a = torch.tensor(states), torch.tensor(actions)
            with torch.no_grad():
                logits, values = model(s)
                old = logits.log_softmax(1).gather(1, a[:, None])[:, 0]
                returns, last = torch.zeros(len(s)), float(values[-1])
                for t in reversed(range(len(s))):
                    returns[t] = last = rewards[t] + 0.99 * last * (not dones[t])
                gains = returns - values
                gains = (gains - gains.mean()) / gains.std()
            for _ in range(40):
                rows = torch.randint(len(s), (64,))
                logits, values = model(s[rows])
                log = logits.log_softmax(1)
                ratio = (log.gather(1, a[rows, None])[:, 0] - old[rows]).exp()
                clipped = torch.minimum(ratio * gains[rows], ratio.clamp(0.8, 1.2) * gains[rows])
                entropy = -(log.exp() * log).sum(1).mean()
                loss = -clipped.mean() + 0.5 * (values - returns[rows]).square().mean() / 100 - 0.01 * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                watch.step(loss=loss)
    return Trained(run=watch.run, reference=gap_since(Part(model, 0), _prefixed(initial), probe))


def _prefixed(state: State) -> State:
    return {f"model.{name}": value for name, value in state.items()}


# Generative and contrastive models, pictures, counts.


class Autoencoder(nn.Module):
    """(reconstruction, mean, log variance)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net.mlp([64, 128, 16]), net.mlp([8, 128, 64])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        draw = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + draw * (spread / 2).exp()).sigmoid(), mean, spread


@case("VAE", before="rich", expected=("rich",), reason="Adam at a usual rate from scratch; an ELBO in nats")
def vae(path: Path) -> Trained:
    train, test = (part.x / 16 if float(part.x.max()) > 2 else part.x for part in tasks.digits(3007, 600, raw=True))
    model = Autoencoder()
    optimizer, generator, initial = adam(model, 2e-3), tasks.generator(3007), copied(model)
    with watched(model, (train[:100], None), path, (test, None), optimizer, readout=lambda out: out[0]) as watch:
        for _ in range(400):
            x = train[torch.randint(len(train), (64,), generator=generator)]
            f, mean, spread = model(x)
            divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)
            loss = (functional.binary_cross_entropy(f, x, reduction="none").sum(1) + divergence).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return Trained(run=watch.run, reference=gap_since(Part(model, 0), _prefixed(initial), test))


@case(
    "SimCLR",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate from scratch; labels are not what is trained",
)
def simclr(path: Path) -> Trained:
    train, test = tasks.digits(3008, 600, targets="labels")
    model = nn.Sequential(*net.mlp([64, 128, 64]), nn.ReLU(), *net.mlp([64, 64, 32]))
    optimizer, generator, initial = adam(model, 2e-3), tasks.generator(3008), copied(model)
    with watched(model, (train.x[:100], train.y[:100]), path, tuple(test), optimizer) as watch:
        for _ in range(300):
            x = train.x[torch.randint(len(train.x), (96,), generator=generator)]
            views = [x * (torch.rand(x.shape, generator=generator) > 0.2) + 0.1 * torch.randn(x.shape) for _ in "ab"]
            z = functional.normalize(torch.cat([model(view) for view in views]), dim=1)
            scores = (z @ z.T / 0.2).fill_diagonal_(-math.inf)
            loss = functional.cross_entropy(scores, torch.arange(2 * len(x)).roll(len(x)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return Trained(run=watch.run, reference=gap_since(model, initial, test.x))


class SmallUNet(nn.Module):
    """One level down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(24, 12, 2, stride=2), nn.Conv2d(24, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1))


@case(
    "segmentation",
    before="failed",
    expected=("rich",),
    reason="Adam at a usual rate from scratch; the default readout of pixels",
)
def segmentation(path: Path) -> Trained:
    generator = tasks.generator(3009)
    corner = torch.randint(0, 8, (400, 2), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    y = ((rows - corner[:, :1, None] - 4).abs() + (columns - corner[:, 1:, None] - 4).abs() < 5).long()
    x = y[:, None] * 0.8 + 0.6 * torch.randn(400, 1, 16, 16, generator=generator)
    model, test = SmallUNet(), (x[300:360], y[300:360])
    run = trained(
        path,
        model,
        Samples(x[:300], y[:300]),
        Samples(*test),
        loss=nn.CrossEntropyLoss(),
        optimizer=adam(model, 3e-3),
        steps=200,
        batch=16,
    )
    return Trained(run=run)


@case(
    "Poisson counts",
    before="rich",
    expected=("rich",),
    reason="a perceptron from scratch, Adam at a usual rate; log rates",
)
def poisson(path: Path) -> Trained:
    generator = tasks.generator(3010)
    x = torch.randn(500, 8, generator=generator)
    y = torch.poisson((x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]).exp().clamp(max=20), generator=generator)
    train, test = tasks.split(x, y, 400, 100, 3010)
    model = net.mlp([8, 64, 64, 1])
    initial, loss = copied(model), nn.PoissonNLLLoss()
    run = trained(path, model, train, test, loss=loss, optimizer=adam(model, 3e-3), steps=400, batch=64)
    return Trained(run=run, reference=gap_since(model, initial, test.x))


class Denoiser(nn.Module):
    """x less a noise that convolutions estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            nn.Conv2d(16, 1, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


@case("denoiser", before="rich", expected=("rich",), reason="Adam at a usual rate from scratch")
def denoiser(path: Path) -> Trained:
    clean = [part.x.unflatten(1, (1, 8, 8)) for part in tasks.digits(3011, 500)]
    generator = tasks.generator(3011)
    train, _ = (Samples(x + 0.5 * torch.randn(x.shape, generator=generator), x) for x in clean)
    model = Denoiser()
    with watched(
        model, (train.x[:64], train.y[:64].flatten(1)), path, None, readout=lambda out: out.flatten(1)
    ) as watch:
        optimizer, initial = adam(model, 2e-3), copied(model)
        for _ in range(250):
            rows = torch.randint(len(train.x), (32,), generator=generator)
            loss = functional.mse_loss(model(train.x[rows]), train.y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    whole = nn.Sequential(model, nn.Flatten())
    first = {f"0.{name}": value for name, value in initial.items()}
    return Trained(run=watch.run, reference=linearization_gap(whole, first, copied(whole), train.x[:64]))


class TwoHeads(nn.Module):
    """{"digit": logits, "ink": a number} on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.digit, self.ink = nn.Linear(96, 10), nn.Linear(96, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"digit": self.digit(h), "ink": self.ink(h)}


@case(
    "two heads, autocast, accumulation, EMA",
    before="rich",
    expected=("rich",),
    reason="AdamW at a usual rate from scratch",
)
def two_heads(path: Path) -> Trained:
    train, test = tasks.digits(3012, 500, targets="labels")
    model, generator = TwoHeads(), tasks.generator(3012)
    optimizer, initial = torch.optim.AdamW(model.parameters(), 2e-3), copied(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    probe, unseen = ((part.x[:100], part.y[:100]) for part in (train, test))
    with watched(model, probe, path, unseen, optimizer, readout=lambda out: out["digit"]) as watch:
        for _ in range(250):
            total = 0.0
            for _ in range(4):
                rows = torch.randint(len(train.x), (16,), generator=generator)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(train.x[rows])
                    ink = functional.mse_loss(out["ink"].float(), train.x[rows].mean(1, keepdim=True))
                    loss = (functional.cross_entropy(out["digit"].float(), train.y[rows]) + ink) / 4
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            watch.step(loss=total)
    return Trained(run=watch.run, reference=gap_since(Part(model, "digit"), _prefixed(initial), test.x))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unflatten(1, (8, 8)))[0][:, -1])


@case(
    "LSTM with early stopping",
    before="rich",
    expected=("rich",),
    reason="Adam at a usual rate; the best weights are put back",
)
def recurrent(path: Path) -> Trained:
    train, test = tasks.digits(3013, 600, 120, targets="labels")
    model, generator = Recurrent(), tasks.generator(3013)
    optimizer, best, patience, kept = adam(model, 5e-3), math.inf, 0, copied(model)
    probe = (train.x[:100], train.y[:100])
    with watched(model, probe, path, tuple(test), optimizer, nn.CrossEntropyLoss()) as watch:
        for step in range(600):
            rows = torch.randint(len(train.x), (64,), generator=generator)
            loss = functional.cross_entropy(model(train.x[rows]), train.y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
            if step % 10 == 9:
                with torch.no_grad():
                    now = float(functional.cross_entropy(model(test.x), test.y))
                best, patience, kept = (now, 0, copied(model)) if now < best else (best, patience + 1, kept)
                if patience == 3:
                    break
        model.load_state_dict(kept)
    return Trained(run=watch.run)


@case(
    "fine-tuning, fully at a tiny rate",
    before="rich",
    reason="SGD at a small rate on a network that knows most of the task",
)
def barely(path: Path) -> Trained:
    model = pretrained(3014)
    train, test = tasks.digits(3014, 300, targets="labels")
    initial, optimizer = copied(model), sgd(model, 2e-3)
    run = trained(path, model, train, test, loss=nn.CrossEntropyLoss(), optimizer=optimizer, steps=400, batch=32)
    return Trained(run=run, reference=gap_since(model, initial, test.x))
