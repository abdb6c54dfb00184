"""What cannot be measured exactly is refused, with the place, what was given, what was expected and what to do."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import featlearn as fl
from featlearn.errors import CoupledSamplesError, InputTypeError, InputValueError, UnsupportedModelError

from ..zoo.awkward import CASES
from ..zoo.case import Case, Net, default_dtype
from ..zoo.refused import REFUSED

by_name = {case.name: case for case in REFUSED}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_the_kernel_is_refused(case: Case) -> None:
    model, x, _, readout = case.build()
    with pytest.raises(fl.FeatlearnError) as caught:
        fl.ntk(model, x, readout=readout)
    assert isinstance(caught.value, ValueError | TypeError)
    assert ("coupled" in case.flags) <= isinstance(caught.value, CoupledSamplesError)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_the_plan_is_refused(case: Case) -> None:
    model, x, _, readout = case.build()
    with pytest.raises(fl.FeatlearnError):
        fl.plan(model, x, outputs="each", by="parameter", readout=readout)


@pytest.mark.parametrize("case", [case for case in REFUSED if case.name != "empty_batch"], ids=lambda case: case.name)
def test_a_second_probe_is_refused_as_the_first_is(case: Case) -> None:
    model, x, x2, readout = case.build()
    with pytest.raises(fl.FeatlearnError):
        fl.ntk(model, x2, x2=x, readout=readout)


SAYS: dict[str, tuple[type[Exception], tuple[str, ...]]] = {
    "batch_norm_without_running_statistics": (CoupledSamplesError, ("1 (BatchNorm1d)", "expected", "running stat")),
    "attention_over_the_batch": (CoupledSamplesError, ("attention (MultiheadAttention)", "f(x)[i]")),
    "centered_by_a_detached_mean": (CoupledSamplesError, ("the model itself (Net)", "other samples")),
    "neighbors_mixed": (CoupledSamplesError, ("second (Linear)",)),
    "dropout_always_on": (fl.FeatlearnError, ("random numbers in eval mode",)),
    "checkpoint_reentrant": (UnsupportedModelError, ("reentrant", "use_reentrant=False")),
    "checkpoint_reentrant_on_the_first_layer": (UnsupportedModelError, ("reentrant", "use_reentrant=False")),
    "embedding_with_max_norm": (UnsupportedModelError, ("0 (Embedding)", "max_norm=0.5", "expected max_norm=None")),
    "embedding_bag_with_max_norm": (UnsupportedModelError, ("0 (EmbeddingBag)", "max_norm=0.5")),
    "embedding_scaled_by_frequency": (UnsupportedModelError, ("0 (Embedding)", "scale_grad_by_freq=True", "expected")),
    "lazy_module": (UnsupportedModelError, ("0 (LazyLinear)", "not initialized", "run the model once")),
    "everything_frozen": (InputValueError, ("no trainable parameters", "requires_grad=True")),
    "no_parameters": (InputValueError, ("no trainable parameters", "expected at least one")),
    "detached_output": (InputValueError, ("no gradient", "detached", "expected")),
    "complex_output": (InputTypeError, ("complex128", "(5, 2)", "expected real")),
    "three_axes_without_readout": (InputValueError, ("(5, 3, 2)", "expected (P,) = (5,)", "readout=")),
    "tuple_without_a_tensor": (InputTypeError, ("a tuple (a tuple (a float64 tensor", "expected a tensor", "readout=")),
    "scalar_loss_output": (InputValueError, ("shape ()", "(P, C) = (5, C)", "readout=")),
    "integer_output": (InputTypeError, ("int64", "expected real floating point")),
    "nan_output": (InputValueError, ("not finite", "samples 0")),
    "infinite_output": (InputValueError, ("not finite", "samples 1 of")),
    "fewer_outputs_than_samples": (InputValueError, ("(3, 2) for 6 samples", "(P, C) = (6, C)")),
    "more_outputs_than_samples": (InputValueError, ("(15, 2)", "5 samples", "(P, C) = (5, C)")),
    "inputs_that_differ_by_one_sample": (InputValueError, ("(5, 4)", "(4, 4)", "the same number of samples")),
    "empty_batch": (InputValueError, ("(0, 4)", "no samples", "expected at least one")),
}


@pytest.mark.parametrize("name", SAYS)
def test_the_message_says_what_was_given_and_what_was_expected(name: str) -> None:
    model, x, _, readout = by_name[name].build()
    kind, words = SAYS[name]
    with pytest.raises(kind) as caught:
        fl.ntk(model, x, readout=readout)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.mark.parametrize("place", ["0", "body.1.norm"])
def test_coupling_is_ascribed_to_the_layer_that_couples(place: str) -> None:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        inner = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"norm": norm}), nn.Linear(4, 2))
        deep = Net(lambda self, x: self.body[2](self.body[1]["norm"](self.body[0](x))), body=inner)
        model = nn.Sequential(norm, nn.Linear(4, 2)) if place == "0" else deep
        x = torch.randn(6, 4)
    with pytest.raises(CoupledSamplesError, match=rf"first seen in {place} \(BatchNorm1d\)"):
        fl.ntk(model, x)


def test_samples_that_are_coupled_only_in_training_mode_are_welcome() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).double().train()
    assert fl.ntk(model, torch.randn(5, 4).double()).shape == (5, 5)


def test_an_input_of_batch_size_one_is_shared_by_all_samples() -> None:
    case = next(case for case in CASES if case.name == "input_shared_by_all_samples")
    model, x, x2, _ = case.build()
    repeated = x | {"position_ids": x["position_ids"].repeat(5, 1)}
    repeated2 = x2 | {"position_ids": x2["position_ids"].repeat(3, 1)}
    torch.testing.assert_close(fl.ntk(model, x, x2=x2), fl.ntk(model, repeated, x2=repeated2), rtol=1e-12, atol=1e-12)


def test_a_model_that_rewrites_a_weight_is_refused_and_named() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.body.weight.add_(0.0)
        return self.body(x)

    with pytest.raises(UnsupportedModelError, match=r"rewrites body\.weight.*expected"):
        fl.ntk(Net(forward, body=nn.Linear(4, 2)), torch.randn(5, 4))


def test_an_error_of_the_model_is_quoted_with_what_it_was_called_with() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError) as caught:
        fl.ntk(model, {"input": torch.randn(5, 3)})
    assert "a mapping {input: a float32 tensor of shape (5, 3)}" in str(caught.value)
    assert "RuntimeError: mat1 and mat2 shapes" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_in_the_backward_pass_of_the_model_is_a_refusal() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("no derivative here")

    model = Net(lambda self, x: Broken.apply(self.body(x)), body=nn.Linear(4, 2))
    with pytest.raises(fl.FeatlearnError, match="no derivative here"):
        fl.ntk(model, torch.randn(5, 4))


def test_weights_on_the_meta_device_are_refused_and_named() -> None:
    model = nn.Sequential(nn.Linear(4, 2, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"0 \(Linear\) is on the meta device.*load them"):
        fl.ntk(model, torch.randn(5, 4))


def test_weights_that_are_not_finite_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    nn.init.constant_(model[0].weight, float("nan"))
    with pytest.raises(InputValueError, match=r"not finite, at least for samples 0, 1, 2, 3, 4"):
        fl.ntk(model, torch.randn(5, 4))


def test_gradients_that_are_not_finite_are_refused() -> None:
    model = Net(lambda self, x: self.body(x).abs().sqrt(), body=nn.Linear(4, 2, bias=False))
    nn.init.zeros_(model.body.weight)
    with pytest.raises(InputValueError, match=r"kernel of body\.weight is not finite"):
        fl.ntk(model, torch.ones(5, 4), by="parameter")


def test_logits_that_are_missing_are_asked_for() -> None:
    model = Net(lambda self, x: SimpleNamespace(score=self.body(x)), body=nn.Linear(4, 2))
    with pytest.raises(InputTypeError, match=r"SimpleNamespace, expected a tensor.*\.logits; pass readout="):
        fl.ntk(model, torch.randn(5, 4))


def test_activations_that_vanish_but_for_rounding_are_no_coupling():
    generator = torch.Generator().manual_seed(0)
    half, x = (torch.randn(size, 40, generator=generator) for size in (400, 6))
    model = nn.Sequential(nn.Linear(80, 400), nn.ReLU(), nn.Linear(400, 1))
    with torch.no_grad():
        # Terms of size one cancel down to the bias: in single precision the sign depends on the order of summation,
        # and so on the batch.
        model[0].weight.copy_(torch.cat([half, -half], 1))
        model[0].bias.copy_(1e-7 * torch.randn(400, generator=generator))
    inputs = torch.cat([x, x], 1)
    kernel = fl.ntk(model, inputs, parameters="2.*")
    exact = fl.ntk(model, inputs, parameters="2.*", dtype=torch.float64)
    assert torch.allclose(kernel.double(), exact, atol=1e-9)


class Tokens(nn.Module):
    """An embedding and a layer; inputs are token numbers, or embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = tokens if tokens.is_floating_point() else self.embed(tokens)
        outputs: Tensor = self.head(torch.tanh(embedded)).sum(1)
        return outputs


@pytest.mark.parametrize("measure", [fl.ntk, fl.quantities.ntk_diagonal, fl.neural_features, fl.NTKOperator])
def test_inputs_computed_from_the_weights_are_refused_and_the_weights_named(measure: Callable[..., object]) -> None:
    model, tokens = Tokens(), torch.randint(7, (5, 4))
    with pytest.raises(fl.FeatlearnError, match=r"x was computed from the model's own embed.weight.*x.detach\(\)"):
        measure(model, model.embed(tokens))


def test_a_weight_as_input_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(fl.FeatlearnError, match="x2 was computed from the model's own weight"):
        fl.ntk(model, torch.randn(4, 3), x2=model.weight)


def test_inputs_computed_from_weights_that_do_not_count_are_constants() -> None:
    model, tokens = Tokens().double(), torch.randint(7, (5, 4))
    embedded = model.embed(tokens)
    kernel = fl.ntk(model, embedded, parameters="head.*")
    torch.testing.assert_close(kernel, fl.ntk(model, tokens, parameters="head.*"))
    torch.testing.assert_close(kernel, fl.ntk(model, embedded.detach()))
    other = Tokens().double()
    torch.testing.assert_close(fl.ntk(other, embedded), fl.ntk(other, embedded.detach()))


@pytest.mark.parametrize("fake", ["all", "inputs", "mode"])
def test_fake_tensors_are_refused(fake: str) -> None:
    def made() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(4, 3)

    (model, x), mode = made(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model, x = (model if fake != "all" else made()[0]), (x if fake == "mode" else made()[1])
    refused = pytest.raises(UnsupportedModelError, match="outside of FakeTensorMode")
    with mode if fake != "inputs" else nullcontext(), refused:
        fl.ntk(model, x)
