"""Reading state dicts from untrusted files: no code in them is run, and what does not fit the model is refused."""

import importlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import CheckpointError, FeatlearnError
from featlearn.monitoring.checkpoint_files import INDEX, PICKLED, SAFE, WEIGHTS, Checkpoint, weights_in
from featlearn.monitoring.probe_data import kept_state
from featlearn.network.copies import copied

NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which checkpoints of trainers keep the state dict."""
PREFIXES = ("module", "_orig_mod", "model")
"""First parts of names that wrappers add."""
LARGEST_INDEX = 2**28
_OBJECTS = re.compile("GLOBAL|Unsupported class|unrecognized function")  # in torch's words
SHOWN = 5

Load = Callable[[nn.Module, Any], Any]
"""(model, path): loads the checkpoint into the model, or returns a state dict."""


class CheckpointReader:
    """Reads checkpoints for one network, by a function of the user's if there is one."""

    def __init__(self, network: nn.Module, load: Load | None) -> None:
        self._load = load
        # The user's function gets a copy: if it fails half-way, what is measured is not touched.
        self._twin = None if load is None else copied(network, None)

    def put(self, checkpoint: Checkpoint, network: nn.Module) -> None:
        """Give the network the weights of a checkpoint, all of them or, with an error, none."""
        where = str(checkpoint)
        found = read_state(checkpoint.source, where) if self._load is None else self._loaded(checkpoint, where)
        state = fitted_state(found, network, where)
        before = kept_state(network)
        try:
            network.load_state_dict(state)
        except Exception as error:
            network.load_state_dict(before)
            raise CheckpointError(f"{where} cannot be loaded into the model: {_first_line(error)}") from error

    def _loaded(self, checkpoint: Checkpoint, where: str) -> Any:
        assert self._load is not None
        assert self._twin is not None
        try:
            returned = self._load(self._twin, checkpoint.source)
        except Exception as error:
            raise CheckpointError(f"load(model, path) failed on {where}: {_first_line(error)}") from error
        if isinstance(returned, nn.Module) and returned is not self._twin:
            raise CheckpointError(
                f"load(model, path) returned another {type(returned).__name__} for {where}, expected it to load into "
                "the model it is given, or to return a state dict"
            )
        return returned if isinstance(returned, Mapping) else self._twin.state_dict()


def read_state(source: Any, where: str) -> Any:
    """What a file, a folder or a mapping holds; nothing in it is executed."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        inside = weights_in(path)
        if inside is None:
            raise CheckpointError(f"{where} holds none of {', '.join(WEIGHTS)}, expected one of them; or pass load=")
        path = inside
    if not path.is_file():
        raise CheckpointError(f"{where} is no file or folder, expected one")
    with _damage(where):
        return _divided(path, where) if path.name.endswith(INDEX) else _whole(path, where)


def _whole(path: Path, where: str) -> Any:
    """The content of one file."""
    if path.name.endswith(SAFE):
        try:
            return importlib.import_module("safetensors.torch").load_file(path, device="cpu")
        except ImportError as error:
            raise CheckpointError(
                f"{SAFE} files need the package safetensors ({error}); pip install safetensors"
            ) from error
    if path.suffix not in PICKLED:
        raise CheckpointError(
            f"{where} ends in {path.suffix!r}, expected {', '.join((*PICKLED, SAFE))}; for another format pass load="
        )
    _refuse_packed(path, where)
    return torch.load(path, map_location="cpu", weights_only=True)


def _divided(path: Path, where: str) -> dict[str, Any]:
    """The content of all files that an index names, which must lie beside it."""
    if path.stat().st_size > LARGEST_INDEX:
        raise CheckpointError(f"{where} has an index of more than {LARGEST_INDEX} bytes, expected a list of names")
    index = json.loads(path.read_text(encoding="utf-8"))
    places = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(places, Mapping) or not places or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{where} has an index without a weight_map, expected names of files by names of weights")
    found: dict[str, Any] = {}
    for file in sorted(set(places.values())):
        if file != os.path.basename(file) or file in (".", "..") or "\\" in file or not (path.parent / file).is_file():
            raise CheckpointError(f"{where} has an index with {file[:80]!r}, expected a file beside it")
        part = _whole(path.parent / file, where)
        if not isinstance(part, Mapping):
            raise CheckpointError(
                f"{where} has a part {file[:80]!r} that holds {type(part).__name__}, expected tensors"
            )
        found |= part
    lost = places.keys() - found.keys()
    if lost:
        raise CheckpointError(f"{where} lacks weights that its index names: {_some(lost)}; copy it again")
    return found


def _refuse_packed(path: Path, where: str) -> None:
    """A small file that unpacks to a huge one; torch writes its archives without compression."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise CheckpointError(f"{where} unpacks to more than its size, expected a file that torch.save wrote")


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """Whatever goes wrong while a file is read becomes a `CheckpointError` that names it."""
    try:
        yield
    except FeatlearnError:
        raise
    except pickle.UnpicklingError as error:
        if _OBJECTS.search(str(error)):
            raise CheckpointError(
                f"{where} holds code or objects besides tensors, which are not loaded (weights_only=True); save "
                "model.state_dict() alone, or, if you trust the file, pass load= to read it yourself"
            ) from error
        raise CheckpointError(f"{where} is damaged or no checkpoint: {_first_line(error)}") from error
    except Exception as error:
        raise CheckpointError(f"{where} is damaged or no checkpoint: {_first_line(error)}") from error


def fitted_state(found: Any, network: nn.Module, where: str) -> dict[str, Any]:
    """The state dict under the names of the network, every entry checked against it."""
    expected = network.state_dict()
    state = _renamed(_weights(found, where), expected, where)
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for name, wanted in expected.items():
        if isinstance(wanted, Tensor):
            _refuse_misfit(state[name], wanted, name in parameters, f"{name} in {where}")
    _refuse_untied(state, expected, where)
    return state


def _weights(found: Any, where: str) -> Mapping[str, Any]:
    """The state dict itself, or the one inside the checkpoint of a trainer."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} holds {type(found).__name__}, expected a state dict: tensors by name")
    inside = [key for key in NESTED if isinstance(found.get(key), Mapping)]
    if len(inside) > 1:
        raise CheckpointError(f"{where} has {' and '.join(inside)}, expected one state dict; pass load= to choose")
    state = found[inside[0]] if inside else found
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{where} has keys that are no names, expected a state dict: tensors by name")
    return state


def _renamed(state: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The state under the expected names: without the prefixes of wrappers, tied weights that were left out added."""
    tried, current = [], dict(state)
    while True:
        complete = _with_tied(current, expected)
        if complete.keys() == expected.keys():
            return complete
        tried.append(complete)
        first = {name.partition(".")[0] for name in current if "." in name}
        if len(first) != 1 or not all("." in name for name in current) or first.isdisjoint(PREFIXES):
            break
        current = {name.partition(".")[2]: value for name, value in current.items()}
    nearest = min(tried, key=lambda one: len(one.keys() ^ expected.keys()))
    missing, strange = expected.keys() - nearest.keys(), nearest.keys() - expected.keys()
    parts = [f"lacks {_some(missing)}" if missing else "", f"has besides {_some(strange)}" if strange else ""]
    raise CheckpointError(
        f"{where} does not fit the model: it {' and '.join(filter(None, parts))}; expected the names of "
        "model.state_dict(). Pass the model that was trained, or load= to load it yourself"
    )


def _with_tied(state: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The state in the order expected, with weights that are the same tensor in the model as one that is there."""
    given = {_identity(expected[name]): state[name] for name in expected.keys() & state.keys()}
    found = {}
    for name, tensor in expected.items():
        if name in state:
            found[name] = state[name]
        elif _identity(tensor) in given:
            found[name] = given[_identity(tensor)]
    return found | {name: value for name, value in state.items() if name not in expected}


def _identity(tensor: Any) -> object:
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _refuse_untied(state: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Different values for what is one tensor in the model: the last would win."""
    first: dict[object, str] = {}
    for name, wanted in expected.items():
        other = first.setdefault(_identity(wanted), name)
        if other == name or not isinstance(wanted, Tensor):
            continue
        if not torch.equal(state[name].to(wanted.dtype), state[other].to(wanted.dtype)):
            raise CheckpointError(
                f"{where} has different values for {other!r} and {name!r}, which are one tensor in the model; pass the "
                "model that was trained"
            )


def _refuse_misfit(value: Any, wanted: Tensor, parameter: bool, where: str) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(f"{where} is {_kind(value)}, expected a dense tensor of shape {tuple(wanted.shape)}")
    kinds = [(t.is_floating_point(), t.is_complex()) for t in (value, wanted)]
    if value.shape != wanted.shape or kinds[0] != kinds[1]:
        raise CheckpointError(f"{where} is {_kind(value)}, expected {_kind(wanted)}; pass the model that was trained")
    # A buffer may hold infinities, of a mask say; a weight may not.
    wrong = int((~value.isfinite() if parameter else value.isnan()).sum())
    if wrong:
        raise CheckpointError(
            f"{where} has {wrong} entries that are nan or infinite, expected finite weights; if training diverged "
            "there, leave this and later checkpoints out"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in sorted(names)[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:200]
