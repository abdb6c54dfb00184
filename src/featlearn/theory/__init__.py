"""Exact theories of training: functions of numbers and matrices, in float64.

`from_network` of `deep_linear`, `latent`, `relu` and `early` reads what its theory needs from a module, `ofe.from_run`
from a watched run; `which` tries all of them on one network. Everything else here needs no network.
"""

from featlearn.theory import deep_linear, early, infinite_width, latent, ofe, phases, relu, transfer
from featlearn.theory.applicability import which
from featlearn.theory.network_path import NetworkPath

__all__ = [
    "NetworkPath",
    "deep_linear",
    "early",
    "infinite_width",
    "latent",
    "ofe",
    "phases",
    "relu",
    "transfer",
    "which",
]
