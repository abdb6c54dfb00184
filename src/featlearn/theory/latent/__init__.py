"""The latent-variable model: a two-layer linear network on one sample, solved exactly at every width.

See Xu & Ziyin 2024, Sec. 3.

f(x) = scale u . W x with readout u (d,) and input layer W (d, d0), loss (f(x) - y)^2, gradient flow with a learning
rate for each layer. In p = (sqrt(rate_u) W x / rho + sqrt(rate_w) u) / 2 and q, the same with a minus, training is one
function of time: p grows by sqrt(alpha), q shrinks by it. Feature learning is what alpha does to the layers: it turns
them toward each other, away from each other, or stretches them; the kernel regime is alpha = 1.

- `solve`: weights, output, loss, kernel, layer alignment, norms, time scale, mechanism: everything, exactly;
- `reduce_line`: samples on a line through the origin are one sample (Prop. 1);
- `integrate`: the flow for any samples, numerically;
- `scales`, `initial_statistics`: the same for a start known by P and Q alone, and what random starts have.

    path = latent.solve(u, W, x, y, times=torch.linspace(0, 5, 100), scale=0.1, rate_u=0.3, rate_w=0.8)
    path.mechanism, path.time_scale, path.final.layer_alignment
    path.overlay({"loss": (steps, losses)})
"""

from featlearn.theory.latent.feature_growth import Scales, StartStatistics, initial_statistics, scales
from featlearn.theory.latent.latent_flow import Flow, integrate
from featlearn.theory.latent.line_reduction import Line, reduce_line
from featlearn.theory.latent.mechanism import Attribution, Mechanism, Rescaling
from featlearn.theory.latent.network_path import from_network
from featlearn.theory.latent.start import Start
from featlearn.theory.latent.trajectory import Latent, Norms, State, solve

__all__ = [
    "Attribution",
    "Flow",
    "Latent",
    "Line",
    "Mechanism",
    "Norms",
    "Rescaling",
    "Scales",
    "Start",
    "StartStatistics",
    "State",
    "from_network",
    "initial_statistics",
    "integrate",
    "reduce_line",
    "scales",
    "solve",
]
