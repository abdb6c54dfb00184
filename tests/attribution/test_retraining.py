"""Scores and answers against networks that are retrained on halves of the samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.attribution.attribute import rank_correlation
from featlearn.attribution.trust import RunFacts, forecast_change_error, forecast_reliability

P, Q, STEPS, HALVES = 60, 20, 120, 16


def train(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, watch: Any = None) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if watch is not None:
        watch = watch(optimizer)
        watch.__enter__()
    for _ in range(STEPS):
        loss = (model(x[kept]) - y[kept]).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        if watch is not None:
            watch.step(loss=loss, samples=slice(None))
    if watch is not None:
        watch.__exit__(None, None, None)
        return watch
    return model


@pytest.fixture(scope="module")
def retrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A watched run on odd and even digits, halves of its samples (H, P), outputs of networks trained on them."""
    folder = tmp_path_factory.mktemp("run")
    digits = fl.data.digits()
    x, y = digits.x[: P + Q].float(), (2.0 * (digits.labels[: P + Q] % 2) - 1)[:, None]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    halves = torch.stack([torch.randperm(P) < P // 2 for _ in range(HALVES)])
    outputs = []
    for kept in halves:
        outputs.append(train(copy.deepcopy(model), x[:P], y[:P], kept)(x[P:]).detach())

    def watch(optimizer: Any) -> Any:
        train_data = x[:P], y[:P]
        options: Any = {"optimizer": optimizer, "loss": "mse", "replay": train_data, "quantities": ["gap"]}
        return fl.watch(model, train_data, out=folder / "r", test=(x[P:], y[P:]), **options)

    watched = train(model, x[:P], y[:P], torch.ones(P, dtype=torch.bool), watch)
    return watched.run, halves, torch.stack(outputs)[:, :, 0].T, y[P:, 0]


def test_scores_agree_with_retraining(retrained: Any):
    run, halves, outputs, y = retrained
    actual = outputs * y[:, None]  # (Q, H) margins
    found = {}
    for kernel in ("first", "last", "path"):
        attribution = fl.attribute(run, kernel=kernel)
        found[kernel] = float(rank_correlation(attribution.scores @ halves.T.float(), actual).mean())
        if kernel != "first":
            assert abs(found[kernel] - float(attribution.reliability)) < 2 * float(attribution.reliability.stderr)
    assert run.scalar("gap/link")[1][-1] > 0.4  # the network learned features
    assert found["path"] > 0.75
    assert found["path"] > found["first"] + 0.1


def test_answers_agree_with_retraining(retrained: Any):
    run, halves, outputs, _ = retrained
    replay = fl.replay(run)
    for half, actual in zip(halves[:4], outputs.T[:4], strict=True):
        answer = replay.without((~half).nonzero()[:, 0])
        error = (answer.outputs[:, 0] - actual).norm() / (replay.outputs[:, 0] - actual).norm()
        assert error < 0.75  # 1: nothing changes


def test_forecasts_fall_with_the_gap():
    gaps = (0.0, 0.3, 0.6, 0.9, float("nan"))
    for optimizer in ("SGD", "momentum", "adaptive"):
        facts = [RunFacts(gap, optimizer, 0.1) for gap in gaps]
        values = [float(forecast_reliability(0.95, fact)) for fact in facts]
        assert values == sorted(values, reverse=True)
        assert 0 <= values[-1] <= values[0] <= 0.95
        for kind in ("samples", "stop", "rate"):
            errors = [float(forecast_change_error(kind, fact)) for fact in facts]
            assert errors == sorted(errors)
            assert 0 <= errors[0] <= errors[-1] <= 1
    assert 0 < float(forecast_reliability(0.9, None)) < 0.9
