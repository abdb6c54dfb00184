"""Further measurements of a network. A `Session` has a method of the same name for each of them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn.quantities.feature_change import features_moved as features_moved
    from featlearn.quantities.gradient_products import corrupted_agop as corrupted_agop
    from featlearn.quantities.gradient_products import egop as egop
    from featlearn.quantities.layer_pairs import layer_balance as layer_balance
    from featlearn.quantities.preactivation_kernel import ptk as ptk
    from featlearn.quantities.representation import representation_kernels as representation_kernels
    from featlearn.quantities.sample_gradients import gradients as gradients
    from featlearn.quantities.sample_gradients import ntk_diagonal as ntk_diagonal
    from featlearn.quantities.velocity import feature_speed as feature_speed
    from featlearn.quantities.velocity import ntk_velocity as ntk_velocity

_MODULES = {
    "corrupted_agop": "gradient_products",
    "egop": "gradient_products",
    "feature_speed": "velocity",
    "features_moved": "feature_change",
    "gradients": "sample_gradients",
    "layer_balance": "layer_pairs",
    "ntk_diagonal": "sample_gradients",
    "ntk_velocity": "velocity",
    "ptk": "preactivation_kernel",
    "representation_kernels": "representation",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Load a quantity on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
