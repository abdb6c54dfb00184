"""The dynamics against equations integrated on their own: random kernels of every form, and networks really trained."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn
from torch.nn import functional as F

import featlearn as fl
from tests.references.jacobian import dense_jacobian, dense_ntk

KINDS = ("shared", "each", "full")
CLOSE = 1e-8
Field = Callable[[float, np.ndarray], np.ndarray]


def close(value: Tensor | None, expected: np.ndarray, tolerance: float = CLOSE) -> None:
    """Equal up to `tolerance`, absolute and relative; a float64 tensor of the same shape."""
    assert value is not None
    assert value.dtype == torch.float64
    assert value.shape == np.shape(expected)
    np.testing.assert_allclose(value.numpy(), expected, rtol=tolerance, atol=tolerance)


def cases(count: int) -> Iterator[np.random.Generator]:
    for seed in range(count):
        yield np.random.default_rng([20240712, seed])


def integrated(field: Field, start: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The solution at `times`, (T, ...), of a system in any shape, from `times[0]`."""
    solution = solve_ivp(
        lambda t, flat: field(t, flat.reshape(start.shape)).flatten(),
        (times[0], times[-1]),
        start.flatten(),
        method="DOP853",
        t_eval=times,
        rtol=1e-12,
        atol=1e-13,
    )
    assert solution.success
    return solution.y.T.reshape(len(times), *start.shape)


class Problem:
    """A random kernel on P samples with P2 others and C outputs, and the same as four axes (P + P2, P, C, C)."""

    def __init__(
        self, random: np.random.Generator, kind: str, single: bool = False, loss: str = "mse", rank: int | None = None
    ) -> None:
        self.samples, self.tests, self.outputs = 5, 3, 1 if single else 4
        everything, outputs = self.samples + self.tests, self.outputs
        # ranks below P make kernels singular, and leave part of the task unlearned
        rank = rank or int(random.integers(2, 9))
        if kind == "full":
            rows = random.normal(size=(everything, outputs, rank * outputs)) / math.sqrt(rank * outputs)
            self.pairs = np.einsum("acr,bdr->abcd", rows, rows[: self.samples])
            given = self.pairs
            self.K, self.K_test = given[: self.samples], given[self.samples :]
        else:
            count = outputs if kind == "each" else 1
            rows = random.normal(size=(count, everything, rank)) * np.exp(random.normal(size=(count, 1, 1)) / 2)
            stack = rows @ np.swapaxes(rows, 1, 2) / rank
            self.pairs = np.zeros((everything, self.samples, outputs, outputs))
            for c in range(outputs):
                self.pairs[:, :, c, c] = stack[c if kind == "each" else 0][:, : self.samples]
            given = stack[:, :, : self.samples]
            self.K, self.K_test = given[:, : self.samples], given[:, self.samples :]
            if kind == "shared":
                self.K, self.K_test = self.K[0], self.K_test[0]
        self.y = random.normal(size=(self.samples, outputs)) * 2 - 0.5
        if loss == "cross-entropy":
            # rows of probabilities, the first two one-hot
            self.y = np.exp(self.y) / np.exp(self.y).sum(1, keepdims=True)
            self.y[:2] = np.eye(outputs)[[1, outputs - 1]]
        self.f0 = random.normal(size=(everything, outputs))
        self.rate = float(random.uniform(0.2, 1.5))
        self.single = single

    def force(self, f: np.ndarray, loss: str = "mse") -> np.ndarray:
        """-K (f - y), or -K (softmax(f) - y), on all samples: entry by entry."""
        residual = f[: self.samples]
        if loss == "cross-entropy":
            residual = np.exp(residual) / np.exp(residual).sum(1, keepdims=True)
        residual = residual - self.y
        moved = np.zeros_like(f)
        for c in range(self.outputs):
            for d in range(self.outputs):
                moved[:, c] -= self.pairs[:, :, c, d] @ residual[:, d]
        return moved

    def tensors(self) -> dict[str, Tensor]:
        """What `kernel_descent` takes; targets and outputs without their last axis where there is one output."""
        y, f0 = (self.y[:, 0], self.f0[:, 0]) if self.single else (self.y, self.f0)
        given = {"K": self.K, "y": y, "f0": f0[: self.samples], "K_test": self.K_test, "f0_test": f0[self.samples :]}
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in given.items()}

    def compare(
        self, found: fl.dynamics.Trajectory, expected: np.ndarray, loss: str = "mse", tolerance: float = CLOSE
    ) -> None:
        train, test = expected[:, : self.samples], expected[:, self.samples :]
        if loss == "cross-entropy":
            logs = train - np.log(np.exp(train).sum(-1, keepdims=True))
            close(found.loss, np.array([-np.sum(self.y * logs[t]) for t in range(len(train))]), tolerance)
        else:
            close(found.loss, np.array([np.sum((train[t] - self.y) ** 2) for t in range(len(train))]), tolerance)
        close(found.outputs, train[..., 0] if self.single else train, tolerance)
        close(found.test_outputs, test[..., 0] if self.single else test, tolerance)


# --- a frozen kernel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_is_its_differential_equation(kind: str, single: bool):
    for random in cases(4):
        problem = Problem(random, kind, single)
        times = np.concatenate([[0.0], np.cumsum(random.uniform(0.05, 1.5, size=6))])
        expected = integrated(lambda _, f, p=problem: p.rate * p.force(f), problem.f0, times)
        found = fl.dynamics.kernel_descent(**problem.tensors(), times=times.tolist(), rate=problem.rate)
        problem.compare(found, expected)
        close(found.times, times)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("kind", KINDS)
def test_descent_is_its_loop(kind: str, loss: str):
    for random in cases(4):
        problem = Problem(random, kind, loss=loss)
        problem.rate *= 0.1
        steps = [0, 1, 2, 7, 40]
        f, expected = problem.f0, {}
        for step in range(steps[-1] + 1):
            expected[step] = f
            f = f + problem.rate * problem.force(f, loss)
        found = fl.dynamics.kernel_descent(
            **problem.tensors(), times=steps, rate=problem.rate, discrete=True, loss=loss
        )
        problem.compare(found, np.stack([expected[step] for step in steps]), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_of_cross_entropy_is_its_differential_equation(kind: str):
    for random in cases(3):
        problem = Problem(random, kind, loss="cross-entropy")
        times = np.concatenate([[0.0], np.cumsum(random.uniform(0.1, 2, size=5))])
        expected = integrated(lambda _, f, p=problem: p.rate * p.force(f, "cross-entropy"), problem.f0, times)
        found = fl.dynamics.kernel_descent(
            **problem.tensors(), times=torch.from_numpy(times), rate=problem.rate, loss="cross-entropy"
        )
        problem.compare(found, expected, "cross-entropy")


@pytest.mark.parametrize("discrete", [False, True])
def test_test_points_move_along_what_the_kernel_does_not_see(discrete: bool):
    """A residual that the kernel does not see never shrinks; test points that see it move on at a constant speed."""
    steps, rate = [0, 1, 6, 30], 0.03
    for random in cases(4):
        rows, cross = random.normal(size=(6, 2)), random.normal(size=(4, 6))
        K, y = rows @ rows.T, random.normal(size=6)
        f, g, expected = np.zeros(6), np.zeros(4), []
        if discrete:
            for step in range(steps[-1] + 1):
                if step in steps:
                    expected.append(g)
                f, g = f - rate * K @ (f - y), g - rate * cross @ (f - y)
        else:
            both = np.concatenate([K, cross])
            path = integrated(
                lambda _, z, both=both, y=y: -rate * both @ (z[:6] - y), np.zeros(10), np.array(steps, dtype=float)
            )
            expected = list(path[:, 6:])
        found = fl.dynamics.kernel_descent(
            torch.from_numpy(K),
            torch.from_numpy(y),
            times=steps,
            rate=rate,
            discrete=discrete,
            K_test=torch.from_numpy(cross),
        )
        close(found.test_outputs, np.stack(expected))


@pytest.mark.parametrize("discrete", [False, True])
def test_a_start_of_zero_is_the_default(discrete: bool):
    for random in cases(3):
        problem = Problem(random, "each")
        given = problem.tensors()
        zeros = {"f0": torch.zeros_like(given["f0"]), "f0_test": torch.zeros_like(given["f0_test"])}
        common = {"times": [0, 1, 3], "rate": 0.05, "discrete": discrete}
        explicit = fl.dynamics.kernel_descent(**{**given, **zeros}, **common)
        left_out = fl.dynamics.kernel_descent(given["K"], given["y"], K_test=given["K_test"], **common)
        torch.testing.assert_close(left_out.outputs, explicit.outputs, rtol=0, atol=0)
        torch.testing.assert_close(left_out.test_outputs, explicit.test_outputs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_is_integrated_in_double(kind: str):
    """Of a kernel that is not singular; the rounding of a singular one is known from its format, and cut off."""
    random = next(cases(1))
    problem = Problem(random, kind, rank=9)
    coarse = {name: value.float() for name, value in problem.tensors().items()}
    fine = {name: value.double() for name, value in coarse.items()}
    times = [0.0, 0.4, 3.0]
    found, expected = (fl.dynamics.kernel_descent(**given, times=times) for given in (coarse, fine))
    close(found.outputs, expected.outputs.numpy(), 1e-10)
    close(found.test_outputs, expected.test_outputs.numpy(), 1e-10)
    given = [coarse, fine]
    regressed = [fl.dynamics.kernel_regression(**g, ridge=0.01) for g in given]
    close(regressed[0], regressed[1].numpy(), 1e-9)


# --- a kernel that moves --------------------------------------------------------------------------------------------


def along(kernels: np.ndarray, times: np.ndarray, y: np.ndarray, f0: np.ndarray, rate: float) -> np.ndarray:
    """Outputs at `times` under kernels (T, P + P2, P) linear in between, one integration per stretch."""
    path = [f0]
    for begin, end, first, last in zip(times, times[1:], kernels, kernels[1:], strict=False):

        def field(
            t: float, f: np.ndarray, b: float = begin, e: float = end, K0: np.ndarray = first, K1: np.ndarray = last
        ) -> np.ndarray:
            share = (t - b) / (e - b)
            return -rate * ((1 - share) * K0 + share * K1) @ (f[: len(y)] - y)

        path.append(integrated(field, path[-1], np.array([begin, end]))[-1])
    return np.stack(path)


@pytest.mark.parametrize("outputs", [None, 3])
def test_an_evolving_kernel_is_linear_between_its_measurements(outputs: int | None):
    for random in cases(5):
        samples, tests, moments = 5, 4, 6
        rows = random.normal(size=(moments, samples + tests, int(random.integers(2, 9))))
        kernels = (rows @ np.swapaxes(rows, 1, 2) / 4)[:, :, :samples]
        times = np.cumsum(random.uniform(0.1, 1.0, size=moments)) - 0.3
        shape = () if outputs is None else (outputs,)
        y, f0 = random.normal(size=(samples, *shape)) - 1, random.normal(size=(samples + tests, *shape))
        rate = float(random.uniform(0.3, 1.5))
        expected = along(kernels, times, y, f0, rate)
        found = fl.dynamics.evolving_kernel_descent(
            torch.from_numpy(kernels[:, :samples]),
            torch.from_numpy(times),
            torch.from_numpy(y),
            kernels_test=torch.from_numpy(kernels[:, samples:]),
            rate=rate,
            f0=torch.from_numpy(f0[:samples]),
            f0_test=torch.from_numpy(f0[samples:]),
        )
        close(found.outputs, expected[:, :samples])
        close(found.test_outputs, expected[:, samples:])
        close(found.loss, np.array([np.sum((f[:samples] - y) ** 2) for f in expected]))
        close(found.times, times)


# --- regression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_regression_is_one_linear_system(kind: str, single: bool, ridge: float):
    for random in cases(8):
        problem = Problem(random, kind, single)
        samples, outputs = problem.samples, problem.outputs
        # the system of all samples and outputs together, entry by entry
        system = np.zeros((samples * outputs, samples * outputs))
        cross = np.zeros((problem.tests * outputs, samples * outputs))
        for c in range(outputs):
            for d in range(outputs):
                for b in range(samples):
                    for a in range(samples):
                        system[a * outputs + c, b * outputs + d] = problem.pairs[a, b, c, d]
                    for a in range(problem.tests):
                        cross[a * outputs + c, b * outputs + d] = problem.pairs[samples + a, b, c, d]
        residual = (problem.y - problem.f0[:samples]).flatten()
        inverse = np.linalg.pinv(system + ridge * np.eye(len(system)), rcond=1e-11, hermitian=True)
        expected = problem.f0[samples:] + (cross @ inverse @ residual).reshape(problem.tests, outputs)
        found = fl.dynamics.kernel_regression(**problem.tensors(), ridge=ridge)
        close(found, expected[:, 0] if single else expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_ends_in_the_regression(kind: str):
    """With singular kernels too: what the kernel does not see, neither learns."""
    for random in cases(4):
        given = Problem(random, kind).tensors()
        end = fl.dynamics.kernel_descent(**given, times=[1e7])
        torch.testing.assert_close(end.test_outputs[0], fl.dynamics.kernel_regression(**given), rtol=1e-7, atol=1e-7)


# --- networks -------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum-half": lambda f, y: 0.5 * (f - y).square().sum(),
    "mean": lambda f, y: (f - y).square().sum() / len(f),
    "mean-half": lambda f, y: (f - y).square().sum() / (2 * len(f)),
    "mean-over-outputs": nn.functional.mse_loss,
}


class Features(nn.Module):
    """Linear in its parameters, so that its kernel never moves; outputs share them, so that the kernel is full."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("mixing", torch.randn(6, 20, 3, dtype=torch.float64, generator=generator) / 4)
        self.theta = nn.Parameter(torch.randn(20, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("pi,inc,n->pc", torch.tanh(x), self.mixing, self.theta)


def trained(model: nn.Module, x: Tensor, objective: Callable[[Tensor], Tensor], lr: float, steps: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(model(x)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("loss", LOSSES)
def test_rates_are_those_of_a_trainer(loss: str):
    """A model linear in its parameters is predicted for good: train and test samples, after many large steps."""
    random = next(cases(1))
    x, x_test = (torch.from_numpy(random.normal(size=(samples, 6))) for samples in (7, 4))
    y = torch.from_numpy(random.normal(size=(7, 3)) - 1)
    model = Features(3)
    lr = {"sum-half": 0.02, "mean": 0.07, "mean-half": 0.14, "mean-over-outputs": 0.2}[loss]
    given = {
        "K": fl.ntk(model, x, outputs="full"),
        "K_test": fl.ntk(model, x_test, x2=x, outputs="full"),
        "y": y,
        "f0": model(x).detach(),
        "f0_test": model(x_test).detach(),
    }
    rate = fl.dynamics.rate(lr, loss, P=7, C=3)
    found = fl.dynamics.kernel_descent(**given, times=[30], rate=rate, discrete=True)
    trained(model, x, lambda f: LOSSES[loss](f, y), lr, 30)
    close(found.outputs[0], model(x).detach().numpy(), 1e-10)
    close(found.test_outputs[0], model(x_test).detach().numpy(), 1e-10)
    assert float((found.outputs[0] - given["f0"]).norm()) > 0.5


def test_the_rate_of_cross_entropy_is_that_of_a_trainer():
    random = next(cases(1))
    x, x_test = (torch.from_numpy(random.normal(size=(7, 6))), torch.from_numpy(random.normal(size=(4, 6))))
    labels = torch.from_numpy(random.integers(0, 3, size=7))
    model = Features(4)
    given = {
        "K": fl.ntk(model, x, outputs="full"),
        "K_test": fl.ntk(model, x_test, x2=x, outputs="full"),
        "y": F.one_hot(labels, 3).double(),
        "f0": model(x).detach(),
        "f0_test": model(x_test).detach(),
    }
    rate = fl.dynamics.rate(0.3, "mean-half", P=7, C=3)
    found = fl.dynamics.kernel_descent(**given, times=[0, 25], rate=rate, discrete=True, loss="cross-entropy")
    trained(model, x, lambda f: nn.functional.cross_entropy(f, labels), 0.3, 25)
    close(found.outputs[1], model(x).detach().numpy(), 1e-10)
    close(found.test_outputs[1], model(x_test).detach().numpy(), 1e-10)
    with torch.no_grad():
        mean = float(nn.functional.cross_entropy(model(x), labels))
    assert float(found.loss[1]) == pytest.approx(7 * mean, rel=1e-10)


def perceptron(seed: int, features: int = 4, outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs)
        ).double()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_network_leaves_its_kernel_at_second_order(loss: str):
    """Four tiny steps: kernel descent is right to first order, so its error falls fourfold with half the rate."""
    random = next(cases(1))
    x, x_test = (torch.from_numpy(random.normal(size=(samples, 4))) for samples in (6, 5))
    y = torch.from_numpy(random.normal(size=(6, 3)) - 1)
    errors = []
    for lr in (2e-3, 1e-3):
        model = perceptron(11)
        found = fl.dynamics.kernel_descent(
            fl.ntk(model, x, outputs="full"),
            y,
            times=[4],
            rate=fl.dynamics.rate(lr, loss, P=6, C=3),
            discrete=True,
            f0=model(x).detach(),
            K_test=fl.ntk(model, x_test, x2=x, outputs="full"),
            f0_test=model(x_test).detach(),
        )
        start = model(x_test).detach()
        trained(model, x, lambda f: LOSSES[loss](f, y), lr, 4)
        moved, predicted = model(x_test).detach() - start, found.test_outputs[0] - start
        errors.append(float((moved - predicted).norm()))
        assert errors[-1] < 0.05 * float(moved.norm())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_kernels_measured_along_a_run_predict_it():
    """Kernels between test and training samples, measured along real training, move the test outputs as it does."""
    random = next(cases(1))
    x, x_test = (torch.from_numpy(random.normal(size=(samples, 4))) for samples in (6, 5))
    y = torch.from_numpy(random.normal(size=6) - 1)
    lr, every, moments = 2e-3, 20, 21
    model = perceptron(12, outputs=1)
    start, start_test = model(x)[:, 0].detach(), model(x_test)[:, 0].detach()
    kernels, tests = [fl.ntk(model, x)], [fl.ntk(model, x_test, x2=x)]
    for _ in range(moments - 1):
        trained(model, x, lambda f: LOSSES["sum-half"](f[:, 0], y), lr, every)
        kernels.append(fl.ntk(model, x))
        tests.append(fl.ntk(model, x_test, x2=x))
    last = model(x_test)[:, 0].detach()
    times = torch.arange(moments) * every
    rate = fl.dynamics.rate(lr, "sum-half")
    found = fl.dynamics.evolving_kernel_descent(
        torch.stack(kernels), times, y, kernels_test=torch.stack(tests), rate=rate, f0=start, f0_test=start_test
    )
    frozen = fl.dynamics.kernel_descent(
        kernels[0], y, times=times, rate=rate, f0=start, K_test=tests[0], f0_test=start_test
    )
    assert found.test_outputs is not None
    assert frozen.test_outputs is not None
    moved = float((last - start_test).norm())
    error = float((found.test_outputs[-1] - last).norm()) / moved
    assert error < 0.01  # what is left is that of steps against the flow, and of lines between kernels
    assert float((frozen.test_outputs[-1] - last).norm()) / moved > 20 * error


@pytest.mark.parametrize("outputs", ["mean", "each", "full"])
def test_regression_with_kernels_of_a_network(outputs: str):
    """Two probes of unequal size, against brute force kernels and a solver of dense systems."""
    random = next(cases(1))
    x, x_test = (torch.from_numpy(random.normal(size=(samples, 4))) for samples in (7, 5))
    model = perceptron(13)
    y = torch.from_numpy(random.normal(size=(7, 3)))
    f0, f0_test = model(x).detach(), model(x_test).detach()
    found = fl.dynamics.kernel_regression(
        fl.ntk(model, x, outputs=outputs),
        y,
        fl.ntk(model, x_test, x2=x, outputs=outputs),
        f0=f0,
        f0_test=f0_test,
        ridge=0.1,
    )
    K = dense_ntk(model, x, outputs="full").numpy()
    cross = dense_ntk(model, x_test, x, outputs="full").numpy()
    residual, expected = (y - f0).numpy(), f0_test.numpy().copy()
    if outputs == "full":
        flat = K.transpose(0, 2, 1, 3).reshape(21, 21) + 0.1 * np.eye(21)
        expected += (cross.transpose(0, 2, 1, 3).reshape(15, 21) @ np.linalg.solve(flat, residual.flatten())).reshape(
            5, 3
        )
    for c in range(3 if outputs != "full" else 0):
        own = range(3) if outputs == "mean" else [c]
        square = sum(K[:, :, d, d] for d in own) / len(own)
        other = sum(cross[:, :, d, d] for d in own) / len(own)
        expected[:, c] += other @ np.linalg.solve(square + 0.1 * np.eye(7), residual[:, c])
    close(found, expected)


# --- velocities and rates of a step, by closed forms ------------------------------------------------------------------


def two_layers(random: np.random.Generator, features: int = 4, width: int = 5, outputs: int = 3) -> nn.Sequential:
    """f = V W x, without biases: its kernel and how it moves are a few products of matrices."""
    model = nn.Sequential(nn.Linear(features, width, bias=False), nn.Linear(width, outputs, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=parameter.shape)))
    return model


@pytest.mark.parametrize("loss", [*LOSSES, "cross-entropy"])
def test_velocities_of_a_linear_network_are_products_of_matrices(loss: str):
    for random in cases(4):
        model = two_layers(random)
        W, V = (parameter.detach().numpy() for parameter in model.parameters())
        X, y = random.normal(size=(6, 4)), random.normal(size=(6, 3)) - 1
        f = X @ W.T @ V.T
        if loss == "cross-entropy":
            y = np.exp(y) / np.exp(y).sum(1, keepdims=True)
            error = (np.exp(f) / np.exp(f).sum(1, keepdims=True) - y) / 6
        else:
            error = (f - y) * {"sum-half": 1, "mean": 2 / 6, "mean-half": 1 / 6, "mean-over-outputs": 2 / 18}[loss]
        dV, dW = -error.T @ X @ W.T, -V.T @ error.T @ X
        # K = (x W^T W x') I + (x . x') V V^T
        hidden = X @ (dW.T @ W + W.T @ dW) @ X.T
        expected = np.einsum("ab,cd->abcd", hidden, np.eye(3)) + np.einsum("ab,cd->abcd", X @ X.T, dV @ V.T + V @ dV.T)
        x, task = torch.from_numpy(X), torch.from_numpy(y)
        close(fl.quantities.ntk_velocity(model, x, task, loss=loss, outputs="full"), expected, 1e-9)
        own = np.stack([expected[:, :, c, c] for c in range(3)])
        close(fl.quantities.ntk_velocity(model, x, task, loss=loss, outputs="each"), own, 1e-9)
        close(fl.quantities.ntk_velocity(model, x, task, loss=loss, outputs="sum"), own.sum(0), 1e-9)
        close(fl.quantities.ntk_velocity(model, x, task, loss=loss), own.sum(0) / 3, 1e-9)


def test_the_speed_of_features_is_that_of_the_print():
    """|J'| |f - y|^2 / (|J| |J^T (f - y)|^2), the right side of 002 Eq. 88, with the Jacobian of V W x written out.

    It is twice the ratio of the rates |J'| / |J| and |dL/dt| / L, which has |f - y|^2 / 2 for L.
    """
    for random in cases(4):
        model = two_layers(random)
        W, V = (parameter.detach().numpy() for parameter in model.parameters())
        X, y = random.normal(size=(6, 4)), random.normal(size=(6, 3)) - 1
        error = X @ W.T @ V.T - y
        dV, dW = -error.T @ X @ W.T, -V.T @ error.T @ X
        # df_c / dV_ci = (W x)_i, df_c / dW_ij = V_ci x_j
        size = 3 * np.sum((X @ W.T) ** 2) + np.sum(V**2) * np.sum(X**2)
        moved = 3 * np.sum((X @ dW.T) ** 2) + np.sum(dV**2) * np.sum(X**2)
        slope = np.sum(dV**2) + np.sum(dW**2)
        expected = math.sqrt(moved / size) * np.sum(error**2) / slope
        assert fl.quantities.feature_speed(model, torch.from_numpy(X), torch.from_numpy(y)) == pytest.approx(
            expected, rel=1e-9
        )


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "lr": 0.02}]),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.9), eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.3), eps=1e-5, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.8), eps=1e-2, weight_decay=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.7, eps=1e-3),
    "centered rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.7, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rates_of_a_step_are_read_off_the_step(name: str):
    """Without momentum a step moves every entry by its rate times its gradient: the division gives the rates."""
    random = next(cases(1))
    model = perceptron(14)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    x, y = torch.from_numpy(random.normal(size=(6, 4))), torch.from_numpy(random.normal(size=(6, 3)))
    for taken in range(4):
        optimizer.zero_grad()
        LOSSES["mean"](model(x), y).backward()
        if taken < 3:
            optimizer.step()
    jacobian = dense_jacobian(model, x)
    K = fl.ntk(model, x, outputs="full", optimizer=optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    expected = np.zeros((6, 6, 3, 3))
    for n, p in model.named_parameters():
        rates = ((before[n] - p.detach()) / gradients[n]).flatten().numpy()
        J = jacobian[n].numpy()
        for j in range(J.shape[-1]):
            expected += rates[j] * np.einsum("ac,bd->abcd", J[:, :, j], J[:, :, j])
    close(K, expected)


# --- Taylor models --------------------------------------------------------------------------------------------------


def test_order_two_is_exact_where_the_network_is_a_product_of_two():
    """V W x is quadratic in its weights: the second order is the network itself, the first lacks dV dW x."""
    for random in cases(4):
        model = two_layers(random)
        x = torch.from_numpy(random.normal(size=(6, 4)))
        W, V = (parameter.detach().clone() for parameter in model.parameters())
        steps = [torch.from_numpy(random.normal(size=p.shape)) for p in model.parameters()]
        exact = x @ (W + steps[0]).T @ (V + steps[1]).T
        for order, expected in ((1, exact - x @ steps[0].T @ steps[1].T), (2, exact)):
            taylor = fl.dynamics.linearize(model, order=order)
            with torch.no_grad():
                for parameter, step in zip(taylor.parameters(), steps, strict=True):
                    parameter.add_(step)
            close(taylor(x).detach(), expected.numpy(), 1e-11)


def test_the_orders_of_a_cubic_network_are_its_polynomial():
    """U V W x along a straight line of weights is a cubic; its coefficients are found by solving for them."""
    random = next(cases(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((4, 5), (5, 6), (6, 2)))).double()
    x = torch.from_numpy(random.normal(size=(7, 4)))
    steps = [torch.from_numpy(random.normal(size=p.shape)) for p in model.parameters()]
    start = [p.detach().clone() for p in model.parameters()]

    def outputs(share: float) -> np.ndarray:
        W, V, U = (p + share * s for p, s in zip(start, steps, strict=True))
        return (x @ W.T @ V.T @ U.T).numpy()

    points = np.array([-1.0, 0.0, 1.0, 2.0])
    values = np.stack([outputs(p).flatten() for p in points])
    coefficients = np.linalg.solve(np.vander(points, increasing=True), values).reshape(4, 7, 2)
    for order in (1, 2):
        taylor = fl.dynamics.linearize(model, order=order)
        with torch.no_grad():
            for parameter, step in zip(taylor.parameters(), steps, strict=True):
                parameter.add_(1.7 * step)
        close(taylor(x).detach(), sum(coefficients[k] * 1.7**k for k in range(order + 1)), 1e-10)
