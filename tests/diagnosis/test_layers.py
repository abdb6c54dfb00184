"""Mechanisms by construction: two layers of 004 whose output is too small, too large, or parallel."""

import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import LEARNED
from featlearn.diagnosis.layers import layer_learning, mechanisms
from featlearn.diagnosis.run_data import RunData
from featlearn.diagnosis.statements import learned_in
from featlearn.record import Run, RunWriter, open_run
from featlearn.theory import latent
from tests.diagnosis.recording import record


def network(u: torch.Tensor, w: torch.Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(w.shape[1], len(u), bias=False), nn.Linear(len(u), 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(w)
        model[1].weight.copy_(u[None])
    return model


@pytest.mark.parametrize(
    ("overlap", "y", "name"), [(0.0, 2.0, "alignment"), (0.97, 2.0, "disalignment"), (1.0, 6.0, "rescaling")]
)
def test_the_mechanism_is_that_of_the_exact_solution(tmp_path: Path, overlap: float, y: float, name: str):
    generator = torch.Generator().manual_seed(0)
    u, other = torch.randn(2, 40, dtype=torch.float64, generator=generator)
    u *= 2 / u.norm()
    other -= (other @ u) / (u @ u) * u
    w = (2 * overlap * u / u.norm() + 2 * math.sqrt(1 - overlap**2) * other / other.norm())[:, None]
    if overlap == 1:
        w = u[:, None].clone()  # parallel to the last digit
    x, targets = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64)
    run = record(tmp_path / "run", network(u, w), x, targets, lr=0.003, steps=1000, loss="mean")
    found = mechanisms(RunData(run))["0--1"]
    assert found.name == name
    theory = latent.solve(u, w, x[0], y, times=torch.tensor([0.0, 3.0], dtype=torch.float64))
    assert theory.mechanism == name
    zeta = theory.layer_alignment
    assert found.start == pytest.approx(abs(float(zeta[0])), rel=1e-5, abs=1e-6)
    assert found.end == pytest.approx(float(zeta[-1]), rel=2e-3)  # steps, not a flow
    if overlap > 0:  # the output keeps its sign, and its change is the sum
        change = math.log(float(theory.output[-1] / theory.output[0]))
        assert found.alignment + found.first_norm + found.second_norm == pytest.approx(change, rel=1e-2)


def test_nothing_happens_in_a_lazy_network_and_layers_are_ranked(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 30, bias=False), nn.ReLU(), nn.Linear(30, 30, bias=False), nn.ReLU(), nn.Linear(30, 1, bias=False)
    ).double()
    x = torch.randn(9, 4, dtype=torch.float64)
    start = model(x).detach()
    run = record(tmp_path / "run", model, x, start + 1e-3 * torch.randn(9, 1, dtype=torch.float64), lr=0.05, steps=60)
    found = diagnose(run)
    assert {one.name for one in found.mechanism.values()} == {"none"}
    assert set(found.layers) == {"0", "2", "4"}
    distances = [one.distance for one in found.layers.values()]
    assert distances == sorted(distances, reverse=True)


def written(path: Path, layers: dict[str, tuple[float, float, float, float]], **more: float) -> Run:
    """Layer -> distance of its weight, centered correlation and share, double-centered correlation; of its parts."""
    writer = RunWriter(path, {"name": path.name})
    for step in (0, 1, 9):
        values = {"probe/loss": 1.0 - 0.1 * step, **({"gap/probe": 0.9} if step else {})}
        for layer, (distance, centered, share, double) in layers.items():
            part = {"centered": centered, "centered_share": share, "double_centered": double}
            values |= {f"features/{layer}/{name}": value if step else math.nan for name, value in part.items()}
            values[f"features/{layer}/uncentered"] = 0.95
            values[f"weights/{layer.removesuffix('.q').removesuffix('.k')}/distance"] = distance * step / 9
        writer.scalars(step, values | more)
    writer.close()
    return open_run(path)


def where(run: Run) -> list:
    return [item for item in diagnose(run).evidence if item.topic == "where features are learned"]


def test_layers_learn_where_training_made_the_agreement_whatever_the_correlation_was_before(tmp_path: Path):
    """All of them begin at a correlation of 0.95, and readouts, whose gradients never change, always agree."""
    run = written(
        tmp_path / "run",
        {
            "a": (0.9, 0.8, 0.6, 0.5),
            "b": (1.5, 0.7, 0.9, 0.5),
            "still": (0.05, 0.97, 1e-4, 0.6),
            "head": (8.0, 1.0, 1.0, math.nan),
        },
    )
    found = diagnose(run)
    assert [*found.layers] == ["head", "b", "a", "still"]
    assert [name for name, one in found.layers.items() if one.readout] == ["head"]
    assert learned_in(found.layers) == ["b", "a"]
    moved, learned = where(run)
    assert moved.verdict == "head, b, a"
    assert learned.says == (
        "share of the agreement of weights and gradients that is due to training: layer b 90%, layer a 60%, "
        "layer still less than 0.1%"
    )
    assert (learned.verdict, learned.value) == ("b, a", 0.9)
    assert learned.threshold == f"above {LEARNED.high:g} features are learned there"


def test_fused_projections_count_as_measured_for_their_layer(tmp_path: Path):
    run = written(
        tmp_path / "run",
        {
            "blocks.0.qkv.q": (0.3, 0.4, 0.02, 0.5),
            "blocks.0.qkv.k": (0.3, 0.8, 0.4, 0.5),
            "mlp": (0.3, 0.8, 0.2, 0.5),
        },
        **{"weights/lstm/distance": 0.2},
    )
    found = layer_learning(RunData(run))
    assert (found["blocks.0.qkv"].centered_share, found["blocks.0.qkv"].correlation) == (0.4, 0.8)
    _, learned = where(run)
    assert "layer blocks.0.qkv 40%, layer mlp 20% (not measured: lstm)" in learned.says
    assert learned.verdict == "blocks.0.qkv, mlp"


def test_what_was_not_recorded_of_layers_is_named(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run"})
    writer.array("targets", 0, y=numpy.eye(3)[[0, 1, 2, 0, 1]])
    for step in (0, 10):
        writer.scalars(
            step,
            {
                "probe/loss": 1.0 - 0.09 * step,
                "features/body/centered": 0.3,
                "features/body/centered_share": 0.01 * step,
                "layers/v--out/alignment": 0.2 + 0.01 * step,
                "layers/a--b/alignment": 0.2,
                "weights/out/norm": 1.0,
                **{f"weights/{layer}/distance": 0.1 * step for layer in ("body", "v", "lstm")},
            },
        )
    writer.close()
    found = diagnose(tmp_path / "run")
    text = " ".join(found.full.split())
    assert "layer body 10% (not measured: v and lstm)" in text or "layer body 10% (not measured: lstm and v)" in text
    assert "v--out: alignment; ln |U W| changed by +0.41 (alignment, 0.2 to 0.3) [none below" in text
    assert found.mechanism["a--b"].name == "cannot tell"
    assert "nan" not in text


@pytest.mark.parametrize("outputs", [2, 30])
def test_in_a_watched_run_the_readout_is_known_and_qkv_is_measured(tmp_path: Path, outputs: int):
    """Many outputs are measured along random directions, which must not make a readout look as if it learned."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.head = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.head(torch.tanh(self.out(mixed)).mean(1))

    torch.manual_seed(0)
    model, x, y = Attention(), torch.randn(12, 4, 6), torch.randn(12, outputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fl.watch(
        model,
        (x, y),
        out=tmp_path / "run",
        optimizer=optimizer,
        budget=None,
        every=10,
        quantities=["weights", "features"],
    ) as watch:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    found = layer_learning(RunData(watch.run))
    assert {name for name, one in found.items() if one.readout} == {"head"}
    assert math.isfinite(found["qkv"].centered_share)
    assert "(not measured" not in str(diagnose(watch.run))
    assert "head" not in where(watch.run)[1].says
