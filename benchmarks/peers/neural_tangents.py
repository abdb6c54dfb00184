"""neural-tangents, in an environment of its own (jax 0.4.25, numpy 1.26); the better of two implementations.

Run as a script by `benchmarks/kernels.py`: weights and inputs come as an .npz file. tensorflow, which the library
imports but does not need for this, is stubbed.
"""

import argparse
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from peak import Peak

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")


class Stub(types.ModuleType):
    """Stands for a module that is imported and never used."""

    def __getattr__(self, name: str) -> "Stub":
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


sys.path.pop(0)  # this folder, whose modules have the names of the libraries
for missing in ("tensorflow", "tf2jax", "jax.experimental.jax2tf"):
    sys.modules[missing] = Stub(missing)

import jax  # noqa: E402
import numpy  # noqa: E402
from jax import numpy as jnp  # noqa: E402

Weights = dict[str, Any]


def mlp(w: Weights, x: Any) -> Any:
    """784-500-500-outputs."""
    for i in (0, 2):
        x = jax.nn.relu(x @ w[f"{i}.weight"])
    return x @ w["4.weight"]


def convolved(x: Any, weight: Any, stride: int = 1, padding: int = 0) -> Any:
    """Channels in the second axis, as torch has them."""
    return jax.lax.conv_general_dilated(
        x, weight, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def cnn(w: Weights, x: Any) -> Any:
    """Two convolutions, global average."""
    for i in (0, 2):
        x = jax.nn.relu(convolved(x, w[f"{i}.weight"]) + w[f"{i}.bias"][:, None, None])
    return x.mean((2, 3)) @ w["6.weight"] + w["6.bias"]


def wide_resnet(w: Weights, x: Any) -> Any:
    """WideResNet-16-2."""
    x = convolved(x, w["0.weight"], padding=1)
    for i in range(1, 7):
        active, stride = jax.nn.relu(x), 2 if i in (3, 5) else 1
        branch = jax.nn.relu(convolved(active, w[f"{i}.first.weight"], stride, 1))
        branch = convolved(branch, w[f"{i}.second.weight"], 1, 1)
        shortcut = f"{i}.shortcut.weight"
        x = branch + (convolved(active, w[shortcut], stride) if shortcut in w else x)
    return jax.nn.relu(x).mean((2, 3)) @ w["10.weight"] + w["10.bias"]


def normalized(w: Weights, name: str, x: Any) -> Any:
    """Layer norm."""
    centered = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return centered * scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w: Weights, name: str, x: Any) -> Any:
    """With bias."""
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def gpt(w: Weights, ids: Any) -> Any:
    """Three blocks, four heads."""
    x = w["symbol.weight"][ids] + w["places.table"]
    batch, tokens, width = x.shape
    later = jnp.triu(jnp.ones((tokens, tokens), bool), 1)
    for i in range(3):
        block = f"blocks.{i}"
        split = linear(w, f"{block}.attention.into", normalized(w, f"{block}.norm", x))
        q, k, v = split.reshape(batch, tokens, 3, 4, width // 4).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) / (width // 4) ** 0.5
        mixed = jax.nn.softmax(jnp.where(later, -jnp.inf, scores)) @ v
        x = x + linear(w, f"{block}.attention.out", mixed.swapaxes(1, 2).reshape(batch, tokens, width))
        raised = jax.nn.gelu(linear(w, f"{block}.up", normalized(w, f"{block}.norm2", x)), approximate=True)
        x = x + linear(w, f"{block}.down", raised)
    return (normalized(w, "norm", x)[:, -1] @ w["head.weight"])[:, :1]


NETWORKS: dict[str, Callable[[Weights, Any], Any]] = {
    "W1": mlp,
    "W2": mlp,
    "W3": cnn,
    "W4": wide_resnet,
    "W5": gpt,
}


def kernel(workload: str, weights: Weights, x: Any, mode: str, implementation: int) -> Callable[[], Any]:
    """A compiled call that gives the kernel."""
    import neural_tangents

    traced, diagonal = ((-1,), ()) if mode == "traced" else ((), (-1,) if mode == "each" else ())
    function = neural_tangents.empirical_ntk_fn(
        NETWORKS[workload.partition("-")[0]],
        trace_axes=traced,
        diagonal_axes=diagonal,
        vmap_axes=0,
        implementation=implementation,
    )
    compiled = jax.jit(lambda inputs, parameters: function(inputs, None, parameters))
    return lambda: jax.block_until_ready(compiled(x, weights))


def main() -> None:
    """Read, compute twice, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("mode")
    parser.add_argument("given")
    parser.add_argument("out")
    parser.add_argument("--implementation", type=int, default=1)
    options = parser.parse_args()
    given = numpy.load(options.given)
    double = given["x"].dtype == numpy.float64 or any(given[name].dtype == numpy.float64 for name in given.files)
    jax.config.update("jax_enable_x64", bool(double))
    # Weights stand on the right here, (in, out): a transpose would keep the structured rules from applying.
    turned = {name for name in given.files if given[name].ndim == 2 and name.endswith("weight")} - {"symbol.weight"}
    weights = {
        name: jnp.asarray(given[name].T if name in turned else given[name]) for name in given.files if name != "x"
    }
    call = kernel(options.workload, weights, jnp.asarray(given["x"]), options.mode, options.implementation)
    peak = Peak()
    found = call()  # compiles
    begin = time.process_time()
    found = call()
    seconds = time.process_time() - begin
    size = peak.bytes()
    found = numpy.asarray(found)
    if options.mode == "each":
        found = numpy.moveaxis(found, -1, 0)
    elif options.mode == "traced":
        found = found.reshape(len(given["x"]), len(given["x"]))
    numpy.save(options.out, found)
    import neural_tangents

    version = f"neural-tangents {neural_tangents.__version__}, jax {jax.__version__}"
    print(json.dumps({"seconds": seconds, "bytes": size, "version": version}))


if __name__ == "__main__":
    main()
