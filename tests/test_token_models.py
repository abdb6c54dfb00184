"""Models whose output is not (P, C): default readouts against dense Jacobians, what is stated, and advised lines."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

from .zoo.tokens import VAE, Detector, EncoderDecoder, NanoGPT, Segmentation, Unnamed

NEXT_TOKEN = "next_token: mean log-probability of a sequence's targets"
IGNORED = -100


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(samples: int = 5, length: int = 7) -> Tensor:
    return torch.randint(11, (samples, length), generator=generator(samples))


def built(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(*arguments).double()


def after(tokens: Tensor) -> Tensor:
    """The token after each position; the last one has none."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)


def some_ignored(tokens: Tensor) -> Tensor:
    """Other targets than the ids shifted by one, some of them ignored."""
    targets = (tokens + 1) % 11
    targets[1, 3:], targets[2, 0] = -1, IGNORED
    return targets


def mean_log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """One position after the other; `logits` (P, N, C) and `targets` (P, N)."""
    means = []
    for scores, classes in zip(logits, targets, strict=True):
        terms = [
            s[c] - torch.logsumexp(s, 0) for s, c in zip(scores, classes.tolist(), strict=True) if c not in (-1, -100)
        ]
        means.append(torch.stack(terms).mean())
    return torch.stack(means)


def rows(model: nn.Module, outputs: Callable[[], Tensor]) -> Tensor:
    """The dense Jacobian (P, N) of one output per sample, in eval mode."""
    training, parameters = model.training, list(model.parameters())
    model.eval()
    with torch.enable_grad():
        jacobian = []
        for value in outputs():
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            pairs = zip(parameters, gradients, strict=True)
            jacobian.append(torch.cat([(p * 0 if g is None else g).flatten() for p, g in pairs]).detach())
    model.train(training)
    return torch.stack(jacobian)


def kernel(model: nn.Module, outputs: Callable[[], Tensor]) -> Tensor:
    jacobian = rows(model, outputs)
    return jacobian @ jacobian.T


def assert_close(measured: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(measured, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def assert_first_kernel(run: Any, expected: Tensor) -> None:
    """Runs store kernels in float32."""
    stored = torch.from_numpy(run.array("kernel", 0)["mean"]).double()
    torch.testing.assert_close(stored, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def gpt_log_probability(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    return lambda: mean_log_probability(model(tokens, targets.clamp_min(0))[0], targets)


def test_ids_alone_predict_the_next_token(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = built(NanoGPT), ids()
    random = torch.get_rng_state()
    measured = fl.ntk(model, x)
    (line,) = capsys.readouterr().err.splitlines()
    assert "mean log-probability of a sequence's targets" in line
    assert "ids shifted by one" in line
    assert "readout=fl.readouts.next_token()" in line
    assert_close(measured, kernel(model, gpt_log_probability(model, x, after(x))))
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(fl.ntk(model, x, readout=fl.readouts.next_token()), measured)
    assert capsys.readouterr().err == ""


def test_a_session_states_its_readout_once(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = built(NanoGPT), ids()
    session = fl.Session(model, x)
    measured = session.ntk(), session.ntk(), session.ntk_diagonal()
    assert len(capsys.readouterr().err.splitlines()) == 1
    expected = kernel(model, gpt_log_probability(model, x, after(x)))
    assert_close(measured[1], expected)
    assert_close(measured[2], expected.diagonal())
    other = ids(3)
    assert_close(session.ntk(x=other), kernel(model, gpt_log_probability(model, other, after(other))))
    crossed = rows(model, gpt_log_probability(model, x, after(x)))
    assert_close(session.ntk(other), crossed @ rows(model, gpt_log_probability(model, other, after(other))).T)


@pytest.mark.parametrize("form", ["readout", "shorter readout", "tuple", "mapping"])
def test_targets_of_a_sequence(form: str) -> None:
    model, x = built(NanoGPT), ids()
    targets = some_ignored(x) if form == "readout" else (x + 1) % 11
    measured = {
        "readout": lambda: fl.ntk(model, x, readout=fl.readouts.next_token(targets)),
        "shorter readout": lambda: fl.ntk(model, x, readout=fl.readouts.next_token(x[:, 1:])),
        "tuple": lambda: fl.ntk(model, (x, targets)),
        "mapping": lambda: fl.ntk(model, {"idx": x, "targets": targets}),
    }[form]()
    expected = after(x) if form == "shorter readout" else targets
    assert_close(measured, kernel(model, gpt_log_probability(model, x, expected)))


def test_an_ignored_class() -> None:
    model, x = built(NanoGPT), ids()
    expected = after(x).masked_fill(after(x) == 4, IGNORED)
    measured = fl.ntk(model, x, readout=fl.readouts.next_token(ignore_index=4))
    assert_close(measured, kernel(model, gpt_log_probability(model, x, expected)))


@pytest.mark.parametrize(
    "wrap", [lambda out: SimpleNamespace(logits=out, loss=None), lambda out: out], ids=["object", ""]
)
def test_logits_of_plain_models(wrap: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

        def forward(self, tokens: Tensor) -> Any:
            return wrap(self.head(torch.tanh(self.embedding(tokens).cumsum(1))))

    model, x = built(Model), ids()

    def outputs() -> Tensor:
        logits = model(x)
        return mean_log_probability(getattr(logits, "logits", logits), after(x))

    assert_close(fl.ntk(model, x), kernel(model, outputs))
    assert fl.ntk(model, x, readout=fl.readouts.last_token).shape == (5, 5)


def test_the_readout_is_minus_the_loss_of_a_sequence() -> None:
    logits, targets = torch.randn(5, 7, 11, generator=generator(), dtype=torch.float64), some_ignored(ids())
    values = fl.readouts.next_token(targets)(logits)
    masked = targets.masked_fill(targets < 0, IGNORED)
    expected = [-nn.functional.cross_entropy(a, b) for a, b in zip(logits, masked, strict=True)]
    torch.testing.assert_close(values, torch.stack(expected))
    torch.testing.assert_close(fl.readouts.next_token()(logits, ids()), mean_log_probability(logits, after(ids())))


def watched(model: nn.Module, probe: Any, path: Path, **options: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.02)
    with fl.watch(model, probe=probe, out=path, budget=None, optimizer=optimizer, **options) as watch:
        for step in range(4):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            watch.step(loss=1.0 / (1 + step))
    return watch.run


@pytest.mark.parametrize("readout", [None, fl.readouts.next_token()], ids=["default", "explicit"])
def test_a_watched_gpt(tmp_path: Path, capsys: pytest.CaptureFixture[str], readout: Any) -> None:
    model, x, other = built(NanoGPT), ids(), ids(4)
    targets = some_ignored(x)
    start = kernel(model, gpt_log_probability(model, x, targets))
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    run = watched(model, (x, targets), tmp_path / "run", test=(other, after(other)), readout=readout)
    assert run.config["readout"] == NEXT_TOKEN
    assert ("mean log-probability" in capsys.readouterr().err) == (readout is None)
    assert_first_kernel(run, start)
    gap = fl.linearization_gap(model, x, initial, readout=fl.readouts.next_token(targets))
    assert run.scalar("gap/link")[1][-1] == pytest.approx(float(gap), rel=1e-4)
    assert "ntk/alignment" not in run.names
    on_test = fl.linearization_gap(model, other, initial)
    assert fl.diagnose(run).gap.value.value == pytest.approx(float(on_test), rel=1e-4)


def test_the_gap_of_a_gpt_against_its_dense_linearization() -> None:
    model, x = built(NanoGPT), ids()
    outputs = gpt_log_probability(model, x, after(x))
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    before, first = rows(model, outputs), model.eval() and outputs().detach()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    step = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    change = outputs().detach() - first
    missed = change - before @ step
    expected = (missed - missed.mean()).norm() / (change - change.mean()).norm()
    measured = fl.linearization_gap(model, x, initial, link=False, effective=False)
    assert float(measured) == pytest.approx(float(expected), rel=1e-9)


def test_checkpoints_of_a_gpt(tmp_path: Path) -> None:
    model, x = built(NanoGPT), ids()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    last = {name: value * 1.1 for name, value in first.items()}
    run = fl.watch_checkpoints(model, [(0, first), (5, last)], probe=(x, after(x)), out=tmp_path / "run")
    assert run.config["readout"] == NEXT_TOKEN
    again = fl.watch_checkpoints(model, [(0, first), (5, last)], probe=(x, after(x)), out=tmp_path / "run")
    assert again.config == run.config
    expected = kernel(model, gpt_log_probability(model, x, after(x)))
    assert_first_kernel(run, expected)


def test_integer_targets_of_several_outputs_stay_targets(tmp_path: Path) -> None:
    model, x = built(lambda: nn.Linear(3, 4)), torch.randn(5, 3, dtype=torch.float64, generator=generator())
    run = watched(model, (x, torch.randint(2, (5, 4), generator=generator())), tmp_path / "run")
    assert run.config["readout"] == "output"
    assert run.config["probe"]["outputs"] == 4
    assert "probe/loss" in run.names


def test_operators_and_other_quantities_use_the_same_readout() -> None:
    model, x = built(NanoGPT), ids()
    expected = kernel(model, gpt_log_probability(model, x, after(x)))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    assert_close(fl.NTKOperator(model, x) @ torch.eye(5, dtype=torch.float64), expected)
    assert_close(fl.NTKOperator(model, loader) @ torch.eye(5, dtype=torch.float64), expected)
    y = torch.randn(5, dtype=torch.float64, generator=generator())
    assert fl.estimate_alignment(model, x, y).value == pytest.approx(float(fl.metrics.alignment(expected, y)), rel=1e-9)
    assert set(fl.neural_features(model, x)) >= {"transformer.h.0.c_proj", "transformer.h.1.mlp.2"}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return built(transformers.GPT2LMHeadModel, config)


def hugging_face_batch() -> dict[str, Tensor]:
    """A padded batch with a prompt that is not predicted."""
    x = ids()
    mask = torch.ones_like(x)
    mask[1, 5:] = 0
    labels = x.masked_fill(mask == 0, IGNORED)
    labels[0, :3] = IGNORED
    return {"input_ids": x, "attention_mask": mask, "labels": labels}


def test_a_hugging_face_batch_with_labels(transformers: Any, tmp_path: Path) -> None:
    model, batch = gpt2(transformers), hugging_face_batch()
    expected = kernel(model, lambda: mean_log_probability(model(**batch).logits, after(batch["labels"])))
    assert_close(fl.ntk(model, batch), expected)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    run = watched(model, (inputs, batch["labels"]), tmp_path / "pair")
    assert run.config["readout"] == NEXT_TOKEN
    assert_first_kernel(run, expected)
    model = gpt2(transformers)
    run = watched(model, batch, tmp_path / "batch")
    assert_first_kernel(run, expected)


def test_padding_is_not_predicted(transformers: Any) -> None:
    model, batch = gpt2(transformers), hugging_face_batch()
    del batch["labels"]
    targets = after(batch["input_ids"])
    targets[1, 4:] = IGNORED
    assert_close(fl.ntk(model, batch), kernel(model, lambda: mean_log_probability(model(**batch).logits, targets)))


def test_masked_language_models_are_not_shifted(transformers: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model, x = built(transformers.BertForMaskedLM, config), ids()
    labels = torch.full_like(x, IGNORED)
    labels[:, 2] = x[:, 2]
    batch = {"input_ids": x.index_fill(1, torch.tensor([2]), 10), "labels": labels}
    assert not torch.equal(batch["input_ids"], x)
    assert_close(fl.ntk(model, batch), kernel(model, lambda: mean_log_probability(model(**batch).logits, labels)))


def test_labels_of_an_encoder_decoder(transformers: Any, tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model, labels = built(transformers.T5ForConditionalGeneration, config), ids(5, 4)
    labels[2, 3:] = IGNORED
    batch = {"input_ids": ids(), "labels": labels}
    expected = kernel(model, lambda: mean_log_probability(model(**batch).logits, labels))
    assert_close(fl.ntk(model, batch), expected)
    run = watched(model, (ids(), labels.clamp_min(0)), tmp_path / "run")
    assert run.config["readout"] == NEXT_TOKEN
    with pytest.raises(fl.FeatlearnError, match="an encoder-decoder needs `labels`"):
        fl.ntk(model, ids())


def test_the_decoder_predicts_its_next_token() -> None:
    model, source, target = built(EncoderDecoder), ids(), ids(5, 6)
    expected = kernel(model, lambda: mean_log_probability(model(source, target), after(target)))
    assert_close(fl.ntk(model, (source, target)), expected)
    assert_close(fl.ntk(model, (source, target), readout=fl.readouts.next_token(1)), expected)
    assert_close(fl.ntk(model, {"src": source, "tgt": target}, readout=fl.readouts.next_token("tgt")), expected)


def pixels(scores: Tensor, labels: Tensor) -> Tensor:
    return mean_log_probability(scores.movedim(1, -1).flatten(1, -2), labels.flatten(1))


@pytest.mark.parametrize("wrapped", [False, True], ids=["tensor", "mapping"])
def test_segmentation(tmp_path: Path, wrapped: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = built(Segmentation, 3, wrapped)
    x = torch.randn(5, 2, 4, 6, dtype=torch.float64, generator=generator())
    labels = torch.randint(3, (5, 4, 6), generator=generator())
    labels[0, 0] = IGNORED
    scores = (lambda: model(x)["out"]) if wrapped else (lambda: model(x))
    expected = kernel(model, lambda: pixels(scores(), labels))
    for y in (labels, labels[:, None]):
        assert_close(fl.ntk(model, x, readout=fl.readouts.segmentation(y)), expected)
    assert capsys.readouterr().err == ""
    run = watched(model, (x, labels[:, None]), tmp_path / "run", test=(x[:3], labels[:3]))
    assert run.config["readout"] == "segmentation: mean log-probability of the labeled pixels of an image"
    assert "mean log-probability of the labeled pixels" in capsys.readouterr().err
    assert_first_kernel(run, expected)


def test_a_foreground_of_one_channel(tmp_path: Path) -> None:
    model = built(Segmentation, 1)
    x = torch.randn(5, 2, 4, 6, dtype=torch.float64, generator=generator())
    mask = torch.randint(2, (5, 1, 4, 6), generator=generator()).double()

    def outputs() -> Tensor:
        return -nn.functional.binary_cross_entropy_with_logits(model(x), mask, reduction="none").flatten(1).mean(1)

    expected = kernel(model, outputs)
    assert_close(fl.ntk(model, x, readout=fl.readouts.segmentation(mask)), expected)
    run = watched(model, (x, mask), tmp_path / "run")
    assert_first_kernel(run, expected)


def test_images_with_targets_of_their_shape_are_flattened(tmp_path: Path) -> None:
    model = built(Segmentation, 2)
    x, y = (torch.randn(5, 2, 2, 3, dtype=torch.float64, generator=generator(seed)) for seed in (0, 1))
    run = watched(model, (x, y), tmp_path / "run", loss="mse")
    assert run.config["readout"] == "out.flatten(1)"
    assert run.config["probe"]["outputs"] == 12
    assert run.scalar("probe/loss")[1][0] == pytest.approx(
        float((built(Segmentation, 2)(x) - y).square().flatten(1).sum(1).mean()), rel=1e-9
    )


def advised(error: BaseException) -> Any:
    """The readout on the line that an error says to add."""
    (line,) = re.findall(r"`readout=(.*?)`", str(error))[:1]
    return eval(line, {"fl": fl, "torch": torch})


@pytest.mark.parametrize(
    ("make", "x", "same"),
    [
        (VAE, torch.rand(5, 6), lambda out: out[1]),
        (Detector, torch.rand(5, 6), lambda out: torch.stack([entry["scores"].sum() for entry in out])),
        (Segmentation, torch.rand(3, 2, 2, 3), lambda out: out.flatten(1)),
        (Unnamed, (ids(), ids(5, 6)), lambda out: mean_log_probability(out, after(ids(5, 6)))),
        (lambda: nn.Linear(4, 2), torch.rand(5, 3, 4), lambda out: out.mean(1)),
        (lambda: nn.LSTM(4, 2, batch_first=True), torch.rand(5, 3, 4), lambda out: out[0].mean(1)),
    ],
    ids=["VAE", "detector", "images", "encoder-decoder", "positions", "recurrent"],
)
def test_the_advised_line_works(make: Any, x: Any, same: Callable[[Any], Tensor]) -> None:
    model = built(make)
    x = x if isinstance(x, tuple) else x.double()
    with pytest.raises(fl.FeatlearnError) as caught:
        fl.ntk(model, x)
    measured = fl.ntk(model, x, readout=advised(caught.value), outputs="sum")
    torch.manual_seed(0)

    def outputs() -> Iterator[Tensor]:
        values = same(model(*x) if isinstance(x, tuple) else model(x))
        return values if values.dim() == 1 else values.flatten()

    jacobian = rows(model, outputs)
    samples = len(measured)
    whole = jacobian.reshape(samples, -1, jacobian.shape[1])
    assert_close(measured, torch.einsum("pcn,qcn->pq", whole, whole))


def test_a_sampling_model_is_told_the_cause_first() -> None:
    with pytest.raises(fl.FeatlearnError) as caught:
        fl.ntk(built(VAE), torch.rand(5, 6, dtype=torch.float64))
    assert str(caught.value).startswith("the model draws random numbers in eval mode")
    assert "if self.training else 0" in str(caught.value)
    assert "batch_first" not in str(caught.value)


def test_an_average_of_weights_is_not_the_optimizers(tmp_path: Path) -> None:
    model = nn.Linear(6, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(fl.FeatlearnError, match=r"module\.weight, module\.bias are not the optimizer's.*without opt"):
        fl.watch(average, probe=(torch.rand(5, 6), torch.rand(5, 2)), out=tmp_path, optimizer=optimizer)


@pytest.mark.parametrize(
    ("readout", "text"),
    [
        (fl.readouts.next_token(torch.full((5, 7), 12)), "targets run up to 12, expected classes below 11"),
        (fl.readouts.next_token(torch.full((5, 7), -1)), "have no target at all"),
        (fl.readouts.next_token(ids(5, 4)), r"targets have shape \(.*4\) and the output .*7, 11"),
        (fl.readouts.next_token(ids(4)), "4 targets for 5 samples"),
        (fl.readouts.next_token("labels"), "no tensor 'labels'"),
        (fl.readouts.segmentation(), "no targets for readouts.segmentation"),
    ],
    ids=["classes", "ignored", "positions", "samples", "key", "segmentation"],
)
def test_targets_that_do_not_fit(readout: Any, text: str) -> None:
    with pytest.raises(fl.FeatlearnError, match=text):
        fl.ntk(built(NanoGPT), ids(), readout=readout)


def test_logits_at_the_last_position_alone() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens)[:, -1:]

    with pytest.raises(fl.FeatlearnError) as caught:
        fl.ntk(built(Last), ids())
    assert advised(caught.value) is fl.readouts.last_token
    assert fl.ntk(built(Last), ids(), readout=fl.readouts.last_token).shape == (5, 5)
