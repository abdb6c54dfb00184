"""Kernels in files: equal to those in memory, continued with the same bits, and refused where they are others."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.kernel import stored_tiles
from featlearn.linalg import conjugate_gradients, stored_kernel
from featlearn.planning import plan as planning
from tests.references.jacobian import dense_ntk


def perceptron(outputs: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, outputs)).to(dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.outer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x, x, x)[0].mean(1))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "perceptron": (perceptron, (5,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).double(),
        (2, 6, 6),
    ),
    "attention": (lambda: Attention().double(), (4, 6)),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of at most 16 samples."""
    monkeypatch.setattr(stored_tiles, "LARGEST_TILE", 16)


def samples(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_holds_the_kernel(name: str, tmp_path: Path):
    make, shape = NETWORKS[name]
    torch.manual_seed(1)
    model, x, x2 = make(), samples(37, *shape), samples(23, *shape, seed=1)
    stored = fl.ntk(model, x, out=tmp_path / "k.npy")
    crossed = fl.ntk(model, x, x2=x2, outputs=1, out=tmp_path / "c.npy")
    assert stored.done
    assert stored.shape == (37, 37)
    assert crossed.shape == (37, 23)
    assert not crossed.symmetric
    torch.testing.assert_close(stored[:], dense_ntk(model, x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(stored[:], fl.ntk(model, x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(crossed[:], fl.ntk(model, x, x2=x2, outputs=1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(crossed[3:7, [2, 19]], fl.ntk(model, x, x2=x2, outputs=1)[3:7, [2, 19]])
    places = torch.tensor([1, 5, 36])
    assert torch.equal(stored[places, places], stored.diagonal[places])
    numpy.testing.assert_array_equal(numpy.load(tmp_path / "k.npy"), stored.numpy())
    again = fl.StoredKernel(tmp_path / "k.npy")
    assert torch.equal(again[:], stored[:])
    assert again.rounding == 0.0
    assert repr(again).endswith("k.npy', 37 x 37 float64)")


@pytest.mark.usefixtures("small_tiles")
def test_parts_rates_and_directions(tmp_path: Path):
    model, x = perceptron(), samples(37, 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model(x).sum().backward()
    optimizer.step()
    options: dict[str, Any] = {"by": "layer", "optimizer": optimizer, "outputs": fl.Directions(2), "verify": True}
    stored, expected = fl.ntk(model, x, out=tmp_path / "k.npy", **options), fl.ntk(model, x, **options)
    assert list(stored) == list(expected) == ["0", "2"]
    for name, kernel in expected.items():
        torch.testing.assert_close(stored[name][:], kernel, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(fl.StoredKernel(tmp_path / "k.npy", name)[5], kernel[5], rtol=1e-12, atol=1e-15)
    with pytest.raises(fl.FeatlearnError, match=r"part='', expected one of the 2 kernels .*'0', '2'"):
        fl.StoredKernel(tmp_path / "k.npy")


@pytest.mark.usefixtures("small_tiles")
def test_a_session_stores_and_its_model_may_change_mode(tmp_path: Path):
    model, x = perceptron(), samples(37, 5)
    session = fl.Session(model, x[:9])
    session.ntk()
    model.append(nn.Linear(3, 2).double())
    torch.testing.assert_close(session.ntk(x=x, out=tmp_path / "k.npy")[:], fl.ntk(model, x))


@pytest.mark.usefixtures("small_tiles")
def test_a_stopped_call_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x = perceptron(), samples(53, 5)
    fl.ntk(model, x, out=tmp_path / "whole.npy", memory="1GB")
    write, written = stored_kernel.KernelFile.write, []

    def stopping(file: Any, number: int, kernels: Any) -> None:
        if len(written) in (2, 5):
            written.append(-1)
            raise KeyboardInterrupt
        write(file, number, kernels)
        written.append(number)

    monkeypatch.setattr(stored_kernel.KernelFile, "write", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fl.ntk(model, x, out=tmp_path / "k.npy", memory="1GB")
    partial = fl.StoredKernel(tmp_path / "k.npy")
    assert not partial.done
    assert "4 of 10 tiles written" in repr(partial)
    for read in (lambda: partial[0, 0], partial.numpy, lambda: fl.metrics.alignment(partial, torch.ones(53))):
        with pytest.raises(fl.FeatlearnError, match=r"4 of 10 tiles, expected all: call fl.ntk with the same"):
            read()
    with (tmp_path / "k.npy.manifest").open("a") as file:
        file.write('{"tile": 7, "lo')  # killed while it wrote this
    done = fl.ntk(model, x, out=tmp_path / "k.npy", memory="1GB")
    assert [number for number in written if number >= 0] == list(range(10))
    assert (tmp_path / "k.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert torch.equal(done[:], fl.StoredKernel(tmp_path / "whole.npy")[:])
    fl.ntk(model, x, out=tmp_path / "k.npy", memory="1GB")
    assert len(written) == 12  # nothing more


PROGRAM = """if True:
    import os, sys, torch, featlearn as fl
    from featlearn.kernel import stored_tiles
    stored_tiles.LARGEST_TILE = 25
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4))
    x = torch.randn(500, 9)
    print("begun", flush=True)
    fl.ntk(model, x, out=sys.argv[1], memory="1GB")
"""


@pytest.mark.slow
def test_kill_loses_nothing_and_writes_nothing_twice(tmp_path: Path):
    """SIGKILL at ten moments that follow from no step of the program."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}

    def start(name: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    assert start("whole.npy").wait() == 0
    manifest, before, killed = tmp_path / "k.npy.manifest", "", 0
    generator = numpy.random.default_rng()
    for _ in range(40):
        process = start("k.npy")
        time.sleep(float(generator.uniform(0.05, 0.4)))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() != 0
        text = manifest.read_text() if manifest.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        assert whole.startswith(before)
        before = whole
        if killed == 10:
            break
    assert start("k.npy").wait() == 0
    lines = manifest.read_text().splitlines()[1:]
    numbers = [json.loads(line)["tile"] for line in lines]
    assert sorted(numbers) == list(range(20 * 21 // 2))
    assert killed >= 5
    assert (tmp_path / "k.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


@pytest.mark.usefixtures("small_tiles")
def test_another_call_is_refused_by_name(tmp_path: Path):
    model, x, out = perceptron(), samples(37, 5), tmp_path / "k.npy"
    fl.ntk(model, x, out=out)
    content = out.read_bytes()
    moved, scaled = perceptron(), perceptron()
    with torch.no_grad():
        moved[2].bias[1] += 1e-9  # type: ignore[index]
    scaled.register_forward_hook(lambda *passed: 2 * passed[-1])
    differing = {
        "the weight or buffer 2.bias": lambda: fl.ntk(moved, x, out=out),
        "x": lambda: fl.ntk(model, x.flip(0), out=out),
        "x2": lambda: fl.ntk(model, x, x2=x[:3], out=out),
        "outputs": lambda: fl.ntk(model, x, outputs="sum", out=out),
        "by": lambda: fl.ntk(model, x, by="layer", out=out),
        "parameters": lambda: fl.ntk(model, x, parameters="2.*", out=out),
        "memory": lambda: fl.ntk(model, x, memory="1GB", out=out),
        "out_dtype": lambda: fl.ntk(model, x, out=out, out_dtype=torch.float32),
        "the rate of 0.weight": lambda: fl.ntk(model, x, out=out, optimizer=torch.optim.SGD(model.parameters(), 0.1)),
    }
    for name, call in differing.items():
        with pytest.raises(fl.FeatlearnError, match=f"begun by another call: {name} differs"):
            call()
    with pytest.raises(fl.FeatlearnError, match=r"the model.s outputs differ for the same weights and samples"):
        fl.ntk(scaled, x, out=out)
    assert out.read_bytes() == content


def test_what_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x, out = perceptron(), samples(37, 5), tmp_path / "k.npy"
    for options, words in (
        ({"outputs": "each"}, "outputs='each' with out="),
        ({"outputs": "full"}, "outputs='full' with out="),
        ({"sketch": fl.Sketch(16)}, "sketch= with out="),
        ({"out_dtype": torch.int8}, "out_dtype=torch.int8, expected torch.float16"),
        ({"out": tmp_path / "none" / "k.npy"}, "expected a file named .npy in a folder that exists"),
        ({"out": tmp_path / "k.bin"}, "expected a file named .npy"),
        ({"out": 3}, "out is int, expected a path"),
        ({"out": None, "out_dtype": torch.float16}, "out_dtype=... without out="),
    ):
        with pytest.raises(fl.FeatlearnError, match=words):
            fl.ntk(model, x, **{"out": out, **options})
    monkeypatch.setattr(stored_kernel, "free_disk", lambda path: 10_000)
    with pytest.raises(fl.FeatlearnError, match=r"takes 1.11e-05 GB and 1e-05 GB are free .*float16 takes half"):
        fl.ntk(model, x, out=out)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()

    def failing(code: int) -> Callable[..., None]:
        def reserve(*_: int) -> None:
            raise OSError(code, "no")

        return reserve

    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EDQUOT), raising=False)
    with pytest.raises(fl.FeatlearnError, match="expected room for all of it"):
        fl.ntk(model, x, out=out)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP), raising=False)
    assert fl.ntk(model, x, out=tmp_path / "unreserved.npy").done
    for file in tmp_path.iterdir():
        file.unlink()
    out.write_text("mine")
    with pytest.raises(fl.FeatlearnError, match="exists and has no manifest, expected a new file; remove it first"):
        fl.ntk(model, x, out=out)
    assert out.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(fl.FeatlearnError, match=r"k.npy.manifest does not exist, expected a kernel that fl.ntk"):
        fl.StoredKernel(out)
    out.unlink()
    with pytest.raises(fl.FeatlearnError, match="for a single sample"):
        fl.ntk(model, x[:8], out=out, memory=900)
    assert not fl.StoredKernel(out).done
    fl.ntk(model, x[:8], out=out)  # no tile was written by the call before
    out.write_bytes(out.read_bytes()[:-1])
    with pytest.raises(fl.FeatlearnError, match="missing or has another size"):
        fl.ntk(model, x[:8], out=out)


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_one_process_writes(tmp_path: Path):
    model, x, out = perceptron(), samples(37, 5), tmp_path / "k.npy"
    fl.ntk(model, x, out=out)
    import fcntl

    with (tmp_path / "k.npy.manifest").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(fl.FeatlearnError, match="another process is writing"):
            fl.ntk(model, x, out=out)
    fl.ntk(model, x, out=out)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_half_precision_states_its_error(size: float, tmp_path: Path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 2)), size * samples(53, 5).float()
    exact = fl.ntk(model, x)
    stored = fl.ntk(model, x, out=tmp_path / "k.npy", out_dtype=torch.float16)
    assert stored.numpy().dtype == numpy.float16
    assert stored[:].dtype == torch.float32
    torch.testing.assert_close(stored[:], torch.from_numpy(stored.numpy().astype("float32")) * stored.scale)
    off = float((stored[:].double() - exact.double()).norm() / exact.double().norm())
    assert 1e-5 < stored.rounding < 4e-4
    assert stored.rounding == pytest.approx(off, rel=1e-3)
    x[41] *= 1000 * max(1.0, 1 / size)  # none of the samples that the scale is chosen from
    with pytest.raises(fl.FeatlearnError, match="entries that float16 cannot hold"):
        fl.ntk(model, x, out=tmp_path / "other.npy", out_dtype=torch.float16)


@pytest.mark.usefixtures("small_tiles")
def test_metrics_read_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x, test = perceptron(), samples(53, 5), samples(19, 5, seed=2)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    K, K_test = fl.ntk(model, x), fl.ntk(model, test, x2=x)
    stored, crossed = fl.ntk(model, x, out=tmp_path / "k.npy"), fl.ntk(model, test, x2=x, out=tmp_path / "c.npy")
    monkeypatch.setattr(stored_kernel, "BLOCK", 400)  # seven rows
    assert [rows.stop - rows.start for rows, _ in stored.blocks()] == [7] * 7 + [4]
    for metric in (fl.metrics.alignment, fl.metrics.centered_alignment):
        for targets in (y, y[:, 0]):
            torch.testing.assert_close(metric(stored, targets), metric(K, targets), rtol=1e-12, atol=0.0)
        assert metric(stored, torch.zeros(53)).isnan()
    torch.testing.assert_close(stored @ y, K @ y)
    for centered in (False, True):
        some, whole = (fl.metrics.spectrum(k, y, centered=centered, top=4) for k in (stored, K))
        assert some.residuals is not None
        assert float(some.residuals.max()) < 1e-6 * float(some.eigenvalues[0])
        torch.testing.assert_close(some.eigenvalues, whole.eigenvalues, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(some.cumulative_power, whole.cumulative_power, rtol=1e-6, atol=0.0)
        complete = fl.metrics.spectrum(K, y, centered=centered)
        torch.testing.assert_close(complete.cumulative_power[:4], whole.cumulative_power)
        torch.testing.assert_close(complete.cumulative_power[-1], torch.ones((), dtype=torch.float64))
    start, test_start = samples(53, 2, seed=3), samples(19, 2, seed=4)
    for ridge in (1.0, 1e-3):
        for known in (crossed, K_test):
            f = fl.dynamics.kernel_regression(stored, y, known, ridge=ridge, f0=start, f0_test=test_start)
            expected = fl.dynamics.kernel_regression(K, y, K_test, ridge=ridge, f0=start, f0_test=test_start)
            torch.testing.assert_close(f, expected, rtol=0.0, atol=1e-4)
    single = fl.dynamics.kernel_regression(stored, y[:, 0], crossed, ridge=1.0, tolerance=1e-12)
    torch.testing.assert_close(single, K_test @ torch.linalg.solve(K + torch.eye(53).double(), y[:, 0]))


def test_the_residual_is_reached_or_said():
    torch.manual_seed(0)
    factor, y = torch.randn(80, 60, dtype=torch.float64), torch.randn(80, 3, dtype=torch.float64)
    kernel = factor @ factor.T
    weights = conjugate_gradients.solution(kernel.__matmul__, y, 0.1, 1e-9, 1e-16)
    residual = (kernel @ weights + 0.1 * weights - y).norm(dim=0) / y.norm(dim=0)
    assert float(residual.max()) <= 1e-9
    torch.testing.assert_close(
        weights, torch.linalg.solve(kernel + 0.1 * torch.eye(80).double(), y), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(fl.FeatlearnError, match=r"reached the residual .*, expected 1e-06; pass a larger ridge="):
        conjugate_gradients.solution(kernel.__matmul__, y, 0.0, 1e-6, 1e-16)  # y is not in the range


@pytest.mark.usefixtures("small_tiles")
def test_risk_of_a_stored_kernel(tmp_path: Path):
    model, x = perceptron(), samples(300, 5)
    y = x[:, 0].sin() + 0.3 * samples(300, seed=5)
    K, stored = fl.ntk(model, x), fl.ntk(model, x, out=tmp_path / "k.npy")
    exact, risk = fl.metrics.predicted_risk(K, y, 1.0), fl.metrics.predicted_risk(stored, y, 1.0)
    assert abs(float(risk.effective_dimension - exact.effective_dimension)) < 3 * risk.dimension_stderr
    assert 0 < risk.dimension_stderr < 0.05 * float(exact.effective_dimension)
    assert exact.dimension_stderr == 0
    assert float(risk.leave_one_out) == pytest.approx(float(exact.leave_one_out), rel=0.05)
    assert abs(float(risk.leave_one_out) - float(exact.leave_one_out)) < float(risk.leave_one_out.stderr)
    assert float(risk.gcv) == pytest.approx(float(exact.gcv), rel=0.05)
    assert risk.condition is None
    for ridge in (None, 0.0):
        with pytest.raises(fl.FeatlearnError, match="expected a positive number for a stored kernel"):
            fl.metrics.predicted_risk(stored, y, ridge)


def test_cross_kernels_and_missing_tops_are_refused(tmp_path: Path):
    model, x = perceptron(), samples(21, 5)
    crossed, square = fl.ntk(model, x, x2=x[:13], out=tmp_path / "c.npy"), fl.ntk(model, x, out=tmp_path / "k.npy")
    y = torch.ones(21)
    for call in (
        lambda: fl.metrics.alignment(crossed, y),
        lambda: fl.metrics.centered_alignment(crossed, y),
        lambda: fl.metrics.spectrum(crossed, top=2),
        lambda: fl.metrics.predicted_risk(crossed, y, 1.0),
        lambda: fl.dynamics.kernel_regression(crossed, y, square),
    ):
        with pytest.raises(fl.FeatlearnError, match="K is a cross kernel of shape"):
            call()
    with pytest.raises(fl.FeatlearnError, match=r"K is StoredKernel, expected a tensor; .*read it into memory, K\[:\]"):
        fl.metrics.effective_rank(square)  # type: ignore[arg-type]
    with pytest.raises(fl.FeatlearnError, match="top=None, expected the number of eigenvalues"):
        fl.metrics.spectrum(square)
    for top in (0, 22, True):
        with pytest.raises(fl.FeatlearnError, match="expected a number of eigenvalues between 1 and P = 21"):
            fl.metrics.spectrum(square, top=top)
    with pytest.raises(fl.FeatlearnError, match=r"K_test has shape \(21, 13\), expected \(P2, P\) = \(P2, 21\)"):
        fl.dynamics.kernel_regression(square, y, crossed)
    with pytest.raises(fl.FeatlearnError, match=r"y has shape \(20,\)"):
        fl.metrics.alignment(square, y[:20])


@pytest.mark.usefixtures("small_tiles")
def test_the_plan_is_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x, out = perceptron(), samples(53, 5), tmp_path / "k.npy"
    plan = fl.plan(model, x, out=out, out_dtype=torch.float32, memory="1GB")
    assert (plan.tile, plan.tiles, plan.captured, plan.parts) == (14, 10, 53 * 4, 1)
    assert plan.file_bytes == 4 * 53**2
    assert plan.seconds > 0
    assert "each sample is captured 4 times" in str(plan)
    assert "on this machine" in str(plan)
    taken: list[int] = []
    take = stored_tiles.ModelWithInputs.take
    monkeypatch.setattr(
        stored_tiles,
        "_some",
        lambda batch, part, some=stored_tiles._some: taken.append(part.stop - part.start) or some(batch, part),
    )
    fl.ntk(model, x, out=out, out_dtype=torch.float32, memory="1GB")
    assert sum(taken) == plan.captured
    assert take is stored_tiles.ModelWithInputs.take
    assert out.stat().st_size == plan.file_bytes + 128
    several = fl.plan(model, x, x2=x[:9], by="layer", out=tmp_path / "c.npy", ranks=4, device="A100")
    assert several.parts == 2
    assert several.file_bytes == 2 * 8 * 53 * 9
    assert "4 A100" in str(several)
    half = fl.plan(model, x, x2=x[:9], by="layer", out=tmp_path / "c.npy", ranks=8, device="A100")
    assert half.seconds == pytest.approx(several.seconds / 2)
    assert not (tmp_path / "c.npy").exists()


def test_progress_of_tiles(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(planning.time, "monotonic", lambda: now[0])
    with (
        planning.ProgressLine("k.npy", 4, logged=True) as outer,
        planning.ProgressLine("tangent kernel", 1, logged=True) as inner,
    ):
        for seconds in (2.0, 61.0, 70.0, 130.0):
            now[0] = seconds
            inner.advance()
            outer.advance()
    assert capsys.readouterr().err == "k.npy  50%, about 61 s left\nk.npy 100%, about 0 s left\n"


@pytest.mark.slow
def test_twenty_thousand_samples_in_little_memory(tmp_path: Path):
    """20,000 square, 1.6 GB, under 512 MiB: CPU time of an entry at most 1.3 times that of a kernel in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    x = torch.randn(20_000, 784)
    fl.ntk(model, x[:100])
    begun = time.process_time()
    part = fl.ntk(model, x[:8000])
    in_memory = (time.process_time() - begun) / 8000**2
    begun = time.process_time()
    stored = fl.ntk(model, x, out=tmp_path / "k.npy", memory="512MiB")
    ratio = (time.process_time() - begun) / 20_000**2 / in_memory
    assert torch.allclose(stored[:8000, :8000], part, rtol=1e-4, atol=1e-4 * float(part.max()))
    assert ratio < 1.3, ratio
