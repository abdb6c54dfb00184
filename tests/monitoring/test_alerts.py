"""Planted faults raise their alert, healthy runs raise none, and an alert reaches every place that it should."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import FeatlearnError
from featlearn.monitoring.alerts import AlertRules, sideways, stability_share
from featlearn.monitoring.probe_data import ProbeData, WatchedNetwork
from featlearn.monitoring.records import Record

from .alert_runs import FAULTS, HEALTHY, alerts, data, watched

QUICK = {"perceptron, SGD", "squared error, Adam", "gates from zero", "BatchNorm"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_within_one_doubling(name: str, tmp_path: Path) -> None:
    kind, begins, make = FAULTS[name]
    torch.manual_seed(0)
    found = alerts(watched(make(), tmp_path / "run"))
    kinds = [alert["kind"] for alert in found]
    assert len(kinds) == len(set(kinds)), "each once"
    (alert,) = [alert for alert in found if alert["kind"] == kind]
    fell_by_half = {"lazy": 256}  # laziness shows once half of the loss is gone
    assert begins <= alert["step"] <= max(2 * begins, begins + 16, fell_by_half.get(kind, 0))
    assert alert["text"]
    assert alert["action"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HEALTHY])
def test_a_healthy_run_raises_none(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert alerts(watched(HEALTHY[name](), tmp_path / "run")) == []


class Numbers:
    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged |= metrics


class Alerts(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.alerts: list[Mapping[str, Any]] = []

    def log_alert(self, alert: Mapping[str, Any]) -> None:
        self.alerts.append(alert)


def forgotten(path: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    return watched(FAULTS["forgotten layer"][2](), path, **options)


def test_an_alert_is_printed_recorded_and_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, own = Numbers(), Alerts()
    run = forgotten(tmp_path / "run", alerts=True, sinks=[plain, own])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "featlearn: alert" in line]
    assert line.startswith("featlearn: alert at step 8: layer 0 has not moved since step 0. Give its parameters to the")
    events = [json.loads(text) for text in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "frozen_layer"]
    assert {"step", "kind", "number", "text", "action"} <= event.keys()
    assert (event["step"], event["number"]) == (8, 1.0)
    assert plain.logged["alert/frozen_layer"] == 1.0
    assert [alert["kind"] for alert in own.alerts] == ["frozen_layer"]
    assert "alert/frozen_layer" not in own.logged
    assert not any(name.startswith("alert") for name in run.names)


def test_a_function_gets_the_alert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got: list[Mapping[str, Any]] = []
    forgotten(tmp_path / "run", alerts=got.append)
    assert [(alert["kind"], alert["step"], alert["number"]) for alert in got] == [("frozen_layer", 8, 1.0)]
    assert "featlearn: alert" not in capsys.readouterr().err


def test_a_function_that_raises_stops_nothing(tmp_path: Path) -> None:
    def broken(alert: Mapping[str, Any]) -> None:
        raise OSError("no network")

    with pytest.warns(UserWarning, match="the function for alerts failed: no network"):
        run = forgotten(tmp_path / "run", alerts=broken)
    assert run.config["finished"]
    assert [alert["kind"] for alert in alerts(run)] == ["frozen_layer"]


def test_alerts_change_no_number(tmp_path: Path) -> None:
    with_alerts, without = forgotten(tmp_path / "a", alerts=True), forgotten(tmp_path / "b", alerts=False)
    assert repr([line["values"] for line in with_alerts.lines]) == repr([line["values"] for line in without.lines])
    assert not alerts(without)


def test_only_functions_and_flags_are_alerts(tmp_path: Path) -> None:
    with pytest.raises(FeatlearnError, match="alerts='yes', expected True, False, or a function"):
        forgotten(tmp_path / "run", alerts="yes")


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.7}, {"momentum": 0.7, "nesterov": True}])
def test_the_largest_stable_rate_of_a_linear_model(settings: dict[str, Any]) -> None:
    """Descent on a quadratic loss converges below it and diverges above, for outputs that share their features."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)

    def final_loss(lr: float) -> tuple[float, float]:
        model = nn.Linear(5, 3, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr, **settings)
        kernel = fl.ntk(model, x)
        share = stability_share(kernel, model(x).detach(), y, "mse", optimizer)
        for _ in range(4000):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return share, float(loss.detach())

    share, _ = final_loss(1e-3)
    below, above = final_loss(0.98e-3 / share), final_loss(1.02e-3 / share)
    assert below[0] == pytest.approx(0.98)
    assert above[0] == pytest.approx(1.02)
    assert below[1] < 1 < 100 < above[1]


@pytest.mark.parametrize("name", ["cross-entropy", "bce", "mse", "mean"])
def test_the_rate_is_at_most_that_of_the_dense_hessian(name: Any) -> None:
    """Gauss-Newton matrix of a linear model, which is its Hessian: the share is a lower bound within a factor of 2."""
    torch.manual_seed(0)
    x = torch.randn(12, 6, dtype=torch.float64)
    y: Tensor = torch.randint(4, (12,)) if name == "cross-entropy" else torch.rand(12, 4, dtype=torch.float64)
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def loss(weight: Tensor) -> Tensor:
        return fl.losses.function(name)(x @ weight.T, y)

    hessian = torch.autograd.functional.hessian(loss, model.weight.detach()).reshape(24, 24)
    exact = 0.3 * float(torch.linalg.eigvalsh(hessian)[-1]) / 2
    share = stability_share(fl.ntk(model, x), model(x).detach(), y, name, optimizer)
    assert exact / 2 < share < 1.0000001 * exact


def test_a_rate_that_is_not_known() -> None:
    x, y = data("digits")
    model = nn.Linear(64, 10)
    kernel, outputs = fl.ntk(model, x[:5]), model(x[:5]).detach()
    rates = [
        stability_share(kernel, outputs, y[:5], "cross-entropy", torch.optim.Adam(model.parameters())),
        stability_share(kernel, outputs, y[:5].float(), None, torch.optim.SGD(model.parameters(), 1.0)),
        stability_share(kernel, outputs, y[:5], "sum-half", torch.optim.SGD(model.parameters(), 1.0)),
    ]
    assert all(rate != rate for rate in rates)


def test_decay_alone_is_no_movement() -> None:
    torch.manual_seed(0)
    first, other = torch.randn(2, 40, dtype=torch.float64)
    other -= other @ first / (first @ first) * first
    for shrunk, turned in ((0.7, 0.0), (0.7, 0.3), (1.0, 1e-3)):
        now = shrunk * first + turned * other
        distance = float((now - first).norm() / first.norm())
        moved = sideways(float(now.norm() / first.norm()), distance)
        assert moved == pytest.approx(turned * float(other.norm() / first.norm()), abs=1e-7)


def test_a_resumed_run_repeats_no_alert(tmp_path: Path) -> None:
    """And it knows the first loss: that of the first process."""
    forgotten(tmp_path / "run", alerts=True)
    run = forgotten(tmp_path / "run", alerts=True, resume=True)
    assert [alert["kind"] for alert in alerts(run)] == ["frozen_layer"]
    rules = AlertRules(WatchedNetwork(nn.Linear(2, 2), ProbeData(torch.zeros(2, 2), None)))
    rules.resume(run)
    losses = run.scalar("probe/cross_entropy")[1]
    (alert,) = rules.after(900, Record({"probe/cross_entropy": 1.2 * losses[0], "probe/loss": 1e9}))
    assert (alert.kind, alert.number) == ("unstable", pytest.approx(1.2 * losses[0] / min(losses)))
