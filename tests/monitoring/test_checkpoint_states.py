"""State dicts of every form are read; damaged, hostile and misfitting ones are refused with the name of their file."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featlearn.errors import CheckpointError
from featlearn.monitoring import checkpoint_states as states_module
from featlearn.monitoring.checkpoint_files import Checkpoint
from featlearn.monitoring.checkpoint_states import CheckpointReader

safetensors = pytest.importorskip("safetensors.torch")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight


def put(source: Any, model: nn.Module | None = None) -> nn.Module:
    """A model with other weights, after it was given those of the source."""
    model = network(seed=1) if model is None else model
    CheckpointReader(model, None).put(Checkpoint(7, source), model)
    return model


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "itself": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model_state_dict": lambda state: {"model_state_dict": state, "optimizer": {"lr": 0.1}},
    "model": lambda state: {"model": state},
    "DDP": lambda state: prefixed(state, "module."),
    "compiled": lambda state: prefixed(state, "_orig_mod."),
    "compiled DDP of a trainer": lambda state: {"state_dict": prefixed(state, "model.module._orig_mod.")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_state_dicts_of_torch_are_read_in_every_form(form: str, suffix: str, tmp_path: Path):
    state = network().state_dict()
    torch.save(FORMS[form](state), tmp_path / f"step7{suffix}")
    assert same(put(tmp_path / f"step7{suffix}"), state)


def test_old_files_of_torch_are_read(tmp_path: Path):
    state = network().state_dict()
    torch.save(state, tmp_path / "step7.pt", _use_new_zipfile_serialization=False)
    assert same(put(tmp_path / "step7.pt"), state)


def test_folders_of_hugging_face_are_read(tmp_path: Path):
    state = network().state_dict()
    parts = [dict(list(state.items())[:3]), dict(list(state.items())[3:])]
    for kind, save in (("model.safetensors", safetensors.save_file), ("pytorch_model.bin", torch.save)):
        whole, divided = tmp_path / f"whole {kind}", tmp_path / f"divided {kind}"
        whole.mkdir()
        divided.mkdir()
        save(state, whole / kind)
        places = {}
        for number, part in enumerate(parts):
            name = kind.replace(".", f"-0000{number}-of-00002.")
            save(part, divided / name)
            places |= dict.fromkeys(part, name)
        (divided / f"{kind}.index.json").write_text(json.dumps({"weight_map": places}))
        assert same(put(whole), state)
        assert same(put(divided), state)


def test_a_model_of_transformers_is_read_as_it_saves_itself(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=1, n_head=2)
    torch.manual_seed(0)
    saved = transformers.GPT2LMHeadModel(config)
    for name, options in (("whole", {}), ("divided", {"max_shard_size": "1KB"})):
        saved.save_pretrained(tmp_path / name, **options)
        assert (tmp_path / name / "model.safetensors.index.json").exists() == (name == "divided")
        found = put(tmp_path / name, transformers.GPT2LMHeadModel(config))
        assert same(found, saved.state_dict())


def test_tied_weights_may_be_left_out_and_must_not_differ(tmp_path: Path):
    weight = torch.randn(5, 3)
    assert torch.equal(put({"tokens.weight": weight}, Tied()).head.weight, weight)
    both = {"tokens.weight": weight, "head.weight": weight.clone()}
    assert torch.equal(put(both, Tied()).head.weight, weight)
    assert torch.equal(put({**both, "head.weight": weight.double()}, Tied()).head.weight, weight)
    both["head.weight"] += 1
    with pytest.raises(CheckpointError, match=r"different values for 'tokens.weight' and 'head.weight'"):
        put(both, Tied())


def test_half_precision_is_read_into_single_precision():
    state = {
        name: value.half() if value.is_floating_point() else value for name, value in network().state_dict().items()
    }
    assert torch.equal(put(state)[0].weight, state["0.weight"].float())


def refused(source: Any, said: str, model: nn.Module | None = None) -> str:
    """The error, after a check that the model kept its weights."""
    model = network(seed=1) if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=said) as error:
        put(source, model)
    assert same(model, before)
    assert "step 7 (" in str(error.value) or "needs the package" in said
    return str(error.value)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path):
    state = {**network().state_dict(), "extra": Hostile(tmp_path / "made")}
    torch.save(state, tmp_path / "step7.pt", _use_new_zipfile_serialization=zipped)
    said = refused(tmp_path / "step7.pt", "holds code or objects besides tensors")
    assert "step7.pt" in said
    assert not (tmp_path / "made").exists()
    (tmp_path / "plain7.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    refused(tmp_path / "plain7.bin", "plain7.bin")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 3, 8, 100, -200, -1])
def test_truncated_files_are_refused(suffix: str, kept: int, tmp_path: Path):
    path = tmp_path / f"step7{suffix}"
    (torch.save if suffix == ".pt" else safetensors.save_file)(network().state_dict(), path)
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, r"step7.* is damaged or no checkpoint")


def test_noise_is_refused(tmp_path: Path):
    for suffix in (".pt", ".bin", ".safetensors"):
        (tmp_path / f"step7{suffix}").write_bytes(bytes(range(256)) * 20)
        refused(tmp_path / f"step7{suffix}", "is damaged or no checkpoint")


def test_archives_that_unpack_to_more_than_their_size_are_refused(tmp_path: Path):
    torch.save(network().state_dict(), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "step7.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    refused(tmp_path / "step7.pt", "unpacks to more than its size")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"0.weight": torch.zeros(4, 5)}, r"0.weight in .* of shape \(4, 5\), expected float32 of shape \(4, 3\)"),
        ({"0.weight": torch.full((4, 3), torch.nan)}, r"0.weight in .* has 12 entries that are nan or infinite"),
        ({"2.bias": torch.tensor([1.0, torch.inf])}, r"2.bias in .* has 1 entries"),
        ({"1.running_var": torch.full((4,), torch.nan)}, "1.running_var in .* has 4 entries"),
        ({"0.weight": torch.zeros(4, 3, dtype=torch.int64)}, r"int64 of shape \(4, 3\), expected float32"),
        ({"0.weight": torch.zeros(4, 3, dtype=torch.complex64)}, "complex64"),
        ({"0.weight": torch.zeros(4, 3).to_sparse()}, "expected a dense tensor"),
        ({"0.weight": torch.zeros(4, 3, device="meta")}, "expected a dense tensor"),
        ({"0.weight": 3}, "0.weight in .* is int, expected a dense tensor"),
        ({"0.weight": None}, "0.weight in .* is NoneType"),
        ({"9.weight": torch.zeros(2)}, "it has besides '9.weight'"),
        ({3: torch.zeros(2)}, "has keys that are no names"),
    ],
)
def test_entries_that_do_not_fit_are_refused(change: dict[Any, Any], said: str):
    refused({**network().state_dict(), **change}, said)


def test_an_infinite_buffer_is_fine():
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("mask", torch.zeros(2, 2))
    state = {**model.state_dict(), "mask": torch.full((2, 2), -torch.inf)}
    assert bool(put(state, model).mask.isneginf().all())


def test_missing_and_unexpected_names_are_told():
    state = network().state_dict()
    del state["0.weight"], state["2.bias"]
    said = refused({**state, "other.weight": torch.zeros(1)}, "does not fit the model: it lacks '0.weight', '2.bias'")
    assert "has besides 'other.weight'" in said
    refused({f"net.{name}": value for name, value in network().state_dict().items()}, "'net.0.weight'")
    many = refused({}, "lacks '0.bias', '0.weight', '1.bias', '1.num_batches_tracked', '1.running_mean' and 4 more")
    assert "besides" not in many


@pytest.mark.parametrize("content", [3, [torch.zeros(2)], torch.zeros(2), None])
def test_what_is_no_mapping_is_refused(content: Any, tmp_path: Path):
    torch.save(content, tmp_path / "step7.pt")
    refused(tmp_path / "step7.pt", "expected a state dict: tensors by name")


def test_two_state_dicts_in_one_file_are_refused(tmp_path: Path):
    state = network().state_dict()
    torch.save({"model": state, "state_dict": state}, tmp_path / "step7.pt")
    refused(tmp_path / "step7.pt", "has state_dict and model, expected one state dict; pass load= to choose")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "is damaged or no checkpoint"),
        ("[]", "without a weight_map"),
        ('{"weight_map": {}}', "without a weight_map"),
        ('{"weight_map": {"0.weight": 3}}', "without a weight_map"),
        ('{"weight_map": {"0.weight": "../outside.bin"}}', "expected a file beside it"),
        ('{"weight_map": {"0.weight": ".."}}', "expected a file beside it"),
        ('{"weight_map": {"0.weight": "gone.bin"}}', "expected a file beside it"),
        ('{"weight_map": {"0.weight": "part.bin", "lost": "part.bin"}}', "lacks weights that its index names: 'lost'"),
        ('{"weight_map": {"0.weight": "number.bin"}}', "'number.bin' that holds int"),
        ('{"weight_map": {"0.weight": "config.json"}}', "ends in '.json'"),
    ],
)
def test_an_index_leads_nowhere_else(index: str, said: str, tmp_path: Path):
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    torch.save(network().state_dict(), tmp_path / "outside.bin")
    torch.save(network().state_dict(), folder / "part.bin")
    torch.save(3, folder / "number.bin")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin.index.json").write_text(index)
    refused(folder, said)


def test_files_of_unknown_kind_are_refused(tmp_path: Path):
    (tmp_path / "step7.onnx").write_bytes(b"")
    refused(tmp_path / "step7.onnx", r"ends in '.onnx', expected .pt, .pth, .bin, .ckpt, .safetensors; .* load=")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "holds none of model.safetensors")
    os.mkfifo(tmp_path / "pipe.pt")
    refused(tmp_path / "pipe.pt", "is no file or folder")


def test_without_the_package_safetensors_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    safetensors.save_file(network().state_dict(), tmp_path / "step7.safetensors")

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(states_module.importlib, "import_module", missing)
    with pytest.raises(CheckpointError, match=r"need the package safetensors .* pip install safetensors"):
        put(tmp_path / "step7.safetensors")


class Refusing(nn.Linear):
    """Takes its weight, and then refuses."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state, prefix, *others)
        if bool((state[f"{prefix}weight"] == 7).all()):
            raise RuntimeError("not this one\nmore")


def test_a_model_that_refuses_a_state_keeps_the_one_before():
    model = nn.Sequential(nn.Linear(2, 3), Refusing(3, 2))
    state = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    refused(state, "cannot be loaded into the model: RuntimeError: not this one", model)
