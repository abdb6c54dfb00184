"""Statements and numbers of a page that once misled."""

import math
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.reporting.gauges import gauge, gauges
from featlearn.reporting.groups import groups
from featlearn.reporting.layer_sections import SUMMED, layers
from featlearn.reporting.markup import written
from featlearn.reporting.page import report
from tests.reporting.runs import by_hand


def test_shares_of_the_kernel_are_summed_over_a_block(tmp_path: Path):
    names = [f"blocks.{i}.{part}" for i in range(3) for part in ("a", "b", "c", "d")]
    shares = {name: 0.01 * (i + 1) for i, name in enumerate(names)}
    scalars = {f"ntk/layers/{name}/share": [share, 2 * share] for name, share in shares.items()}
    scalars |= {f"weights/{name}/distance": [0.0, share] for name, share in shares.items()}
    run = by_hand(tmp_path / "run", scalars, [0, 9])
    section = layers(groups(run, points=50))
    chart = next(block for block in section.blocks if block.key == "shares")
    totals = {f"blocks.{i}": sum(shares[name] for name in names if name.startswith(f"blocks.{i}.")) for i in range(3)}
    assert {line.label: list(line.y) for line in chart.lines} == {
        block: pytest.approx([total, 2 * total]) for block, total in totals.items()
    }
    table = next(block for block in section.blocks if block.key == "layer-learning")
    column, moved = table.head.index(SUMMED), table.head.index("weights moved, |W − W₀| / |W₀|")
    cells = {row[0].split()[0]: (row[column].value, row[moved].value) for row in table.body}
    assert cells == {block: (pytest.approx(2 * total), pytest.approx(total / 4)) for block, total in totals.items()}


def test_a_correlation_and_that_of_the_change_are_told_apart(tmp_path: Path):
    scalars = {
        "features/net/uncentered": [0.575, 0.785],
        "features/net/centered": [math.nan, 0.927],
        "features/net/centered_share": [math.nan, 0.3],
        "weights/net/distance": [0.0, 0.553],
    }
    table = layers(groups(by_hand(tmp_path / "run", scalars, [0, 9]), points=50)).blocks[0]
    cells = dict(zip(table.head, table.body[0], strict=True))
    names = ["neural feature correlation at the start", "at the end", "of the change"]
    assert [cells[name].value for name in names] == [0.575, 0.785, 0.927]
    assert cells["weights moved, |W − W₀| / |W₀|"].value == 0.553
    assert not any("weight change" in name for name in table.head)


def test_an_output_layer_has_no_share_of_learning(tmp_path: Path):
    """Its gradients never change, so that the number says nothing."""
    scalars = {
        f"features/{name}/{kind}": [math.nan, 0.9] for name in ("a", "b") for kind in ("centered", "centered_share")
    }
    scalars |= {"features/a/double_centered": [math.nan, 0.5], "features/b/double_centered": [math.nan, math.nan]}
    scalars |= {f"weights/{name}/distance": [0.0, 0.5] for name in ("a", "b")}
    table = layers(groups(by_hand(tmp_path / "run", scalars, [0, 9]), points=50)).blocks[0]
    cells = {row[0]: row[table.head.index("learned")] for row in table.body}
    assert cells["a"].value == 0.9
    assert cells["b"] == "–"


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory):
    """A network that memorizes random labels of noise."""
    torch.manual_seed(0)
    x, y = torch.randn(160, 12), torch.arange(160) % 4
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    out = tmp_path_factory.mktemp("noise") / "noise"
    with fl.watch(
        model, (x[:60], y[:60]), test=(x[60:], y[60:]), out=out, optimizer=optimizer, loss="cross-entropy", budget=None
    ) as watch:
        for _ in range(400):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[:60]), y[:60])
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return watch.run


def test_memory_is_no_success(noise, tmp_path: Path):
    """Training loss falls by memory alone: the page says that the network is not told from chance."""
    found = diagnose(noise)
    assert found.useful.network > 0.6
    assert found.helped == "cannot tell"
    page = report(noise, tmp_path / "noise.html").read_text()
    assert "which 100 test samples cannot tell from a" in page
    accuracy = f"{100 * (1 - found.useful.network):.0f}%"
    assert re.search(rf"Test accuracy is {accuracy} \(chance {100 * (1 - found.useful.constant):.0f}%\)", page)


def test_usefulness_is_drawn_with_network_chance_and_both_kernels(noise):
    found = diagnose(noise)
    shown = next(one for one in gauges(found) if one.title == "Did it help?")
    useful = found.useful
    assert {marker.label: marker.value for marker in shown.markers} == {
        "the network": useful.network,
        "kernel of the start": useful.first,
        "kernel of the end": useful.later,
        "chance": useful.constant,
    }
    assert found.why_helped in shown.about


def test_without_test_points_it_cannot_tell(tmp_path: Path):
    targets = {"targets": [{"y": numpy.eye(3, dtype=numpy.float32)}]}
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.1], "gap/probe": [0.0, 0.9]}, [0, 9], targets)
    assert "Cannot tell: no test data" in report(run, tmp_path / "page.html").read_text()


def test_one_number_has_one_word(noise):
    """The word of a gauge is that of the statement."""
    found = diagnose(noise)
    gauge = next(one for one in gauges(found) if one.title == "Rotation of the kernel")
    (statement,) = [item for item in found.evidence if "the centered kernel rotated by" in item.says]
    assert statement.verdict == gauge.verdict


@pytest.mark.parametrize("gap", [1.08, 79.0])
def test_a_share_above_one_went_elsewhere_and_is_drawn(tmp_path: Path, gap: float):
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.1], "gap/probe": [0.0, gap]}, [0, 9])
    shown = next(one for one in gauges(diagnose(run)) if one.title == "Linearization gap")
    assert "the linear copy went elsewhere" in shown.about
    assert shown.scale.end == gap
    assert shown.scale.outside(gap) == 0
    html = gauge(shown)
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)%" y="50"', html)]
    assert max(places) == 96.0  # the tick of the value


def test_a_loss_that_has_not_fallen_leads_to_no_rich_headline(tmp_path: Path):
    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 1.0, 0.999], "gap/probe": [0.0, 0.6, 0.9]}, [0, 5, 9])
    found = diagnose(run)
    assert found.regime == "cannot tell"
    assert "only to 1 " not in report(run, tmp_path / "page.html").read_text()


def test_few_measurements_are_drawn_as_points(tmp_path: Path):
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    from featlearn.reporting.figures import draw

    run = by_hand(tmp_path / "run", {"probe/loss": [1.0, 0.5, 0.1]}, [0, 10, 1000])
    axes = draw(run, "loss")
    assert [line.get_marker() for line in axes.lines] == ["o"]
    plt.close(axes.get_figure())


def test_large_numbers_have_no_exponent():
    numbers = (1110.4, 1e4, 123456.7, 0.12345, 3.0, -2500.6)
    assert list(map(written, numbers)) == ["1110", "10000", "123457", "0.1235", "3", "-2501"]
    assert not any("e+" in written(float(v)) for v in numpy.geomspace(1, 1e14, 50))
