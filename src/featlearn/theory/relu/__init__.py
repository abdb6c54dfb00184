"""Two-layer ReLU networks: how the two parts of their kernel grow.

See Shan & Bordelon 2021b, Sec. 6, App. D; Shan & Bordelon 2021a, Sec. 6.

f(x) = sum_i V_i relu(w_i . x), trained by df/dt = -rate K (f - y). K = K_V + K_W: `readout` is the part of V,
phi phi^T, `hidden` that of W, x . x' sum_i V_i^2 D_i D_i', D the gates (1 where the unit is on).

Assumptions: gates stay as they are (wide networks); training inputs are orthonormal (not for `weight_growth_rates` and
`from_network`, which take any); gates at one sample and V phi at
another are uncorrelated, the *ansatz* sum_i D_i^mu V_i phi_i^nu = f_nu / 2 for mu != nu (Eq. 59; f_nu for mu = nu). The
rates are exact given the first two and Q = sum_i D^mu V phi^nu, which `ansatz` measures. At the sizes of the paper 4
to 8 % of the gates flip, and growth falls short of theory by 10 to 20 % (one output), 30 to 40 % (mixtures).

- `growth_rates`, `growth`: of both parts, along the target and on average, from known outputs;
- `weight_growth_rates`: the same from the weights, for any inputs; `from_network`: the whole path;
- `solve`: outputs and kernel together, from the initial kernel;
- `ansatz`: how well Eq. 59 holds in a network;
- `mixture_rates`, `mixture_readout_rates`, `mixture_geometry`: several outputs, classes of a Gaussian mixture;
- `split_kernel`: both parts from the weights.

    parts = fl.ntk(model, x, by="layer")
    relu.solve(parts["2"], parts["0"], y, times=times, rate=fl.dynamics.rate(lr, "mean", P)).overlay(measured)
"""

from featlearn.theory.relu.ansatz import Ansatz, ansatz
from featlearn.theory.relu.ansatz_solution import solve
from featlearn.theory.relu.kernel_growth import Growth, GrowthRates, growth, growth_rates, weight_growth_rates
from featlearn.theory.relu.mixture import MixtureGeometry, mixture_geometry, mixture_rates, mixture_readout_rates
from featlearn.theory.relu.network_path import from_network
from featlearn.theory.relu.split_kernel import SplitKernel, split_kernel

__all__ = [
    "Ansatz",
    "Growth",
    "GrowthRates",
    "MixtureGeometry",
    "SplitKernel",
    "ansatz",
    "from_network",
    "growth",
    "growth_rates",
    "mixture_geometry",
    "mixture_rates",
    "mixture_readout_rates",
    "solve",
    "split_kernel",
    "weight_growth_rates",
]
