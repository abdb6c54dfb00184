"""Lightning trains as it does without the callback, and the run is recorded."""

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from featlearn.errors import FeatlearnError
from featlearn.integrations import lightning as integration

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Each of the two, as if it alone were imported."""
    pytest.importorskip(request.param.partition(".")[0], reason="lightning is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(request.param)
    monkeypatch.setattr(integration, "_PACKAGES", (request.param,))
    return found


def module(package: ModuleType) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    return Module()


class Logger:
    """What a Trainer reports to."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))


def trained(package: ModuleType, path: Path, callbacks: list[Any], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.arange(48) % 3)
    net = module(package)
    trainer = package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=path,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net, DataLoader(data, 8, shuffle=True))
    return net, trainer


def probe() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3


def test_a_watched_fit_is_the_fit_itself(package: ModuleType, tmp_path: Path):
    plain, trainer = trained(package, tmp_path, [])
    random = torch.get_rng_state()
    seen, logger = integration.callback(probe(), tmp_path / "run", every=3, budget=None, sinks=[Logger()]), Logger()
    assert isinstance(seen, package.Callback)
    watched, other = trained(package, tmp_path, [seen])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, watched.losses, strict=True))
    assert all(torch.equal(value, watched.state_dict()[key]) for key, value in plain.state_dict().items())
    states = [t.optimizers[0].state_dict()["state"] for t in (trainer, other)]
    assert states[0]
    assert all(torch.equal(states[0][p][key], states[1][p][key]) for p in states[0] for key in states[0][p])
    run = seen.watch.run
    assert run.scalar("ntk/norm")[0].tolist() == [0, 3, 6, 9, 12]
    losses = torch.stack(watched.losses).reshape(4, 3).mean(1)
    assert run.scalar("loss")[1].tolist() == pytest.approx(losses.tolist())
    assert run.config["optimizer"]["class"] == "Adam"
    assert run.config["model"]["batch_norm"]
    assert {"features/net.0/centered", "ntk/layers/net.4/share", "lr"} <= set(run.names)
    assert not logger.logged


def test_accumulated_batches_are_one_step(package: ModuleType, tmp_path: Path):
    seen = integration.callback(probe(), tmp_path / "run", every=1, budget=None, quantities=["kernel"])
    net, _ = trained(package, tmp_path, [seen], accumulate_grad_batches=2)
    run = seen.watch.run
    assert run.scalar("ntk/norm")[0].tolist() == list(range(7))
    assert run.scalar("loss")[1].tolist() == pytest.approx(torch.stack(net.losses).reshape(6, 2).mean(1).tolist())


def test_a_part_of_the_module_and_an_exception(package: ModuleType, tmp_path: Path):
    class Stop(package.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 4:
                raise ZeroDivisionError

    seen = integration.callback(probe(), tmp_path / "run", every=100, budget=None, network=lambda module: module.net)
    with pytest.raises(ZeroDivisionError):
        trained(package, tmp_path, [seen, Stop()])
    run = seen.watch.run
    assert run.scalar("ntk/norm")[0].tolist() == [0, 4]
    assert "interrupted" in [event["kind"] for event in run.events]
    assert "ntk/layers/0/share" in run.names


def test_numbers_go_to_the_loggers_of_the_trainer(package: ModuleType, tmp_path: Path):
    logger = importlib.import_module(f"{package.__name__}.loggers").CSVLogger(tmp_path / "logs")
    seen = integration.callback(probe(), tmp_path / "run", every=4, budget=None)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    trainer = package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module(package), DataLoader(data, 8))
    (table,) = (tmp_path / "logs").rglob("metrics.csv")
    assert "ntk/centered_alignment" in table.read_text().splitlines()[0]


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(integration, "_PACKAGES", ("no_such_lightning",))
    with pytest.raises(FeatlearnError, match=r"featlearn\[lightning\]"):
        integration.callback((torch.zeros(2, 2), None), "runs/none")
