"""A copy of a network with another state, that of its initialization say."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.network.checks import unwrapped
from featlearn.network.precision import copied


class _Holder(nn.Module):
    """A copy of a wrapped model under the names it has in its wrapper."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        (inner,) = self.children()
        return inner(*args, **kwargs)


def network_at(model: nn.Module, initial: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model as it was at initialization."""
    if not isinstance(initial, Mapping):
        raise InputTypeError(f"initial is {type(initial).__name__}, expected the state_dict() at initialization")
    inner = unwrapped(model)
    now = {tensor.data_ptr() for tensor in inner.parameters()} - {0}
    if any(isinstance(tensor, Tensor) and tensor.data_ptr() in now for tensor in initial.values()):
        raise InputValueError(
            "initial shares its memory with the model: it has moved along with it; expected a copy from before "
            "training, {name: value.clone() for name, value in model.state_dict().items()}"
        )
    twin = copied(inner, None)
    expected = set(inner.state_dict())
    # What is spread over ranks is gathered.
    state = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in initial.items()}
    while state and set(state) != expected:  # names from inside a wrapper: module., _orig_mod.
        (prefix, *more) = {name.partition(".")[0] for name in state}
        if more or prefix not in ("module", "_orig_mod"):
            break
        state = {name.partition(".")[2]: value for name, value in state.items()}
    try:
        twin.load_state_dict(state)
    except Exception as error:
        raise InputValueError(
            f"initial does not fit the model: {error}; expected its state_dict(), cloned before training"
        ) from error
    prefix = next((name for name, part in model.named_modules() if part is inner), "")
    for name in reversed(prefix.split(".") if prefix else []):
        twin = _Holder(name, twin)
    return twin
