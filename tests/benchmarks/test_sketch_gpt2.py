"""The script runs small, and its alignment is that of the exact kernel within its error."""

from pathlib import Path

import pytest
import torch

import featlearn as fl

SMALL = [
    "--sequences",
    "9",
    "--length",
    "7",
    "--layers",
    "1",
    "--width",
    "64",
    "--vocabulary",
    "70",
    "--k",
    "64",
    "--repeats",
    "6",
    "--check",
    "5",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("text", [False, True])
def test_the_alignment_of_a_small_gpt_2(text: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    pytest.importorskip("transformers")
    from benchmarks import sketch_gpt2

    exact = []
    words = list(SMALL)
    if text:
        (tmp_path / "input.txt").write_text(
            "ABC:\nspeaks to D.\n\nD:\nanswers it all.\n\nE:\nis silent here and waits." * 20
        )
        words += ["--data", str(tmp_path)]

    def measured(model, x, y, *, centered, readout, memory, sketch):
        kernel = fl.ntk(model, x, readout=readout, dtype=torch.float64)
        metric = fl.metrics.centered_alignment if centered else fl.metrics.alignment
        exact.append(float(metric(kernel, y.double())))
        return estimate(model, x, y, centered=centered, readout=readout, memory=memory, sketch=sketch)

    estimate = fl.estimate_alignment
    monkeypatch.setattr(fl, "estimate_alignment", measured)
    found = sketch_gpt2.main(words)
    assert abs(float(found) - exact[0]) < 4 * float(found.stderr)
    assert float(found.stderr) < 0.5 * abs(exact[0])
    said = capsys.readouterr().out
    assert "5 sequences: error" in said
    assert "9 x 9 samples -> 6 sketches of 64 numbers a sample" in said
    assert f"alignment {found}" in said
