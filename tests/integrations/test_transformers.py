"""The Trainer of transformers trains as it does without the callback, and the run is recorded."""

from pathlib import Path
from typing import Any

import pytest
import torch

import featlearn as fl
from featlearn.integrations import transformers as integration

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(11, (24, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trained(path: Path, callbacks: list[Any], attach: bool = False, **options: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    args = transformers.TrainingArguments(
        output_dir=str(path / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        logging_steps=3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, args, train_dataset=Tokens(), callbacks=callbacks)
    if attach:
        callbacks[0].trainer = trainer
    trainer.train()
    return trainer


def watched(path: Path, **options: Any) -> Any:
    x = torch.randint(11, (5, 6), generator=torch.Generator().manual_seed(1))
    given = {"every": 4, "budget": None, "readout": fl.readouts.last_token, **options}
    return integration.callback(({"input_ids": x}, torch.arange(5)), path / "run", **given)


def test_a_watched_training_is_the_training_itself(tmp_path: Path):
    plain = trained(tmp_path, [])
    random = torch.get_rng_state()
    seen = watched(tmp_path)
    assert isinstance(seen, transformers.TrainerCallback)
    other = trained(tmp_path, [seen])
    assert torch.equal(torch.get_rng_state(), random)
    weights = other.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in plain.model.state_dict().items())
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (plain, other)]
    assert losses[0] == losses[1]
    states = [t.optimizer.state_dict()["state"] for t in (plain, other)]
    assert states[0]
    assert all(torch.equal(states[0][p][key], states[1][p][key]) for p in states[0] for key in states[0][p])
    run = seen.finished.run
    assert run.scalar("ntk/norm")[0].tolist() == [0, 4, 8, 12]
    assert run.scalar("loss")[0].tolist() == [3, 6, 9, 12]
    assert run.scalar("loss")[1].tolist() == losses[0]
    assert run.config["optimizer"]["class"] == "AdamW"
    assert run.config["model"]["dropout"]
    assert any(name.startswith("features/transformer.h.0.attn.c_attn.q/") for name in run.names)


def test_numbers_go_through_the_log_of_the_trainer(tmp_path: Path):
    seen = watched(tmp_path, quantities=["kernel"], every=6)
    plain, trainer = trained(tmp_path, []), trained(tmp_path, [seen], attach=True)
    losses = [[e for e in t.state.log_history if "loss" in e] for t in (plain, trainer)]
    assert [e["loss"] for e in losses[0]] == [e["loss"] for e in losses[1]]
    steps = [entry["step"] for entry in trainer.state.log_history if "ntk/norm" in entry]
    assert steps == [0, 6, 12]
    assert seen.finished.run.scalar("loss")[0].tolist() == [3, 6, 9, 12], "its own numbers do not come back"


def test_numbers_of_an_earlier_step_are_not_logged_as_those_of_now(tmp_path: Path):
    seen = watched(tmp_path, quantities=["kernel"], every=6)

    class Log(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                seen.log_metrics({"ntk/norm": 7.5}, 0)
                seen.log_metrics({"ntk/trace": 2.5}, 4)

    trainer = trained(tmp_path, [seen, Log()], attach=True)
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "ntk/norm" in entry] == [0, 6, 12]
    assert 7.5 not in [entry.get("ntk/norm") for entry in history]
    assert [entry["step"] for entry in history if entry.get("ntk/trace") == 2.5] == [4]


def test_the_last_measurement_can_be_made_after_an_exception(tmp_path: Path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ZeroDivisionError

    seen = watched(tmp_path, quantities=["kernel"], every=100)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, [seen, Stop()])
    seen.close()
    seen.close()
    assert seen.finished.run.scalar("ntk/norm")[0].tolist() == [0, 2]
