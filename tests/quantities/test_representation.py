"""Representation kernels against Gram matrices of activations recorded by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputValueError, MemoryBudgetError, UnsupportedModelError

from ..references.jacobian import call, eval_mode
from ..zoo.case import Net, default_dtype


def built(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return make()


def recorded(model: nn.Module, x: Any, layer: str, of: str) -> list[Any]:
    """What one layer takes (args, kwargs) or gives, call by call."""
    seen: list[Any] = []
    part = model.get_submodule(layer)
    handle = (
        part.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        if of == "input"
        else part.register_forward_hook(lambda module, args, output: seen.append(output))
    )
    with eval_mode(model), torch.no_grad():
        call(model, x)
    handle.remove()
    return seen


def gram(h: Tensor, h2: Tensor | None = None) -> Tensor:
    """Samples first; everything else is summed over."""
    return h.flatten(1).double() @ (h if h2 is None else h2).flatten(1).double().T


def assert_close(kernel: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert kernel.shape == expected.shape
    assert expected.abs().max() > 1e-6
    assert (kernel - expected).abs().max() <= tolerance * expected.abs().max()


def mlp() -> nn.Sequential:
    return built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)))


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_inputs_and_outputs_of_a_perceptron_are_those_written_by_hand() -> None:
    model, x = mlp(), data(7, 4)
    hidden = torch.tanh(x @ model[0].weight.T + model[0].bias).detach()
    taken = fl.quantities.representation_kernels(model, x)
    assert list(taken) == ["0", "3"]
    assert_close(taken["0"], gram(x))
    assert_close(taken["3"], gram(hidden))
    given = fl.quantities.representation_kernels(model, x, of="output")
    assert list(given) == ["0", "3"]
    assert_close(given["0"], gram((x @ model[0].weight.T + model[0].bias).detach()))
    assert_close(given["3"], gram((hidden @ model[3].weight.T + model[3].bias).detach()))


def test_the_kernel_is_not_divided_by_the_width() -> None:
    assert fl.quantities.representation_kernels(nn.Linear(9, 2), torch.ones(3, 9))[""].tolist() == [[9.0] * 3] * 3


@pytest.mark.parametrize("of", ["input", "output"])
def test_positions_of_a_convolution_are_summed_over(of: str) -> None:
    layers = [nn.Conv2d(2, 5, 3, stride=2), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 2), nn.Flatten()]
    model = built(lambda: nn.Sequential(*layers, nn.Linear(6, 2)).double())
    x, x2 = data(4, 2, 7, 6), data(3, 2, 7, 6, seed=2)
    kernels = fl.quantities.representation_kernels(model, x, x2=x2, of=of)
    assert list(kernels) == ["0", "1", "3", "5"]
    for name, kernel in kernels.items():
        h, h2 = (recorded(model, each, name, of)[0] for each in (x, x2))
        h, h2 = (h, h2) if of == "output" else (h[0][0], h2[0][0])
        assert_close(kernel, gram(h, h2))


@pytest.mark.parametrize("samples", [4, 5], ids=["as many positions as samples", "fewer positions"])
def test_samples_are_found_where_the_sequence_comes_first(samples: int) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1))[0].mean(0))

    model = built(lambda: Net(forward, body=nn.GRU(3, 6), head=nn.Linear(6, 2)))
    x, x2 = data(samples, 4, 3), data(3, 4, 3, seed=2)
    kernels = fl.quantities.representation_kernels(model, x, x2=x2)
    assert_close(kernels["body"], gram(x, x2))
    assert_close(fl.quantities.representation_kernels(model, x)["body"], gram(x))
    (output, _), *_ = recorded(model, x, "body", "output")
    assert_close(fl.quantities.representation_kernels(model, x, of="output")["body"], gram(output.transpose(0, 1)))


def test_rows_of_all_positions_in_one_axis_are_told_apart() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        by_position = self.first(x.transpose(0, 1).flatten(0, 1))
        return self.second(by_position.reshape(3, len(x), -1).sum(0))

    model = built(lambda: Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)))
    x = data(5, 3, 4)
    assert_close(fl.quantities.representation_kernels(model, x)["first"], gram(x))
    output = (x @ model.first.weight.T + model.first.bias).detach()
    assert_close(fl.quantities.representation_kernels(model, x, of="output")["first"], gram(output))


@pytest.mark.parametrize("of", ["input", "output"])
def test_a_layer_called_twice_counts_both_calls_and_no_cross_terms(of: str) -> None:
    model = built(lambda: Net(lambda self, x: self.head(self.body(torch.tanh(self.body(x)))), body=nn.Linear(4, 4)))
    model.head = nn.Linear(4, 2).double()
    x, x2 = data(5, 4), data(3, 4, seed=2)
    first, second = (recorded(model, each, "body", of) for each in (x, x2))
    pairs = [(a, b) if of == "output" else (a[0][0], b[0][0]) for a, b in zip(first, second, strict=True)]
    assert len(pairs) == 2
    expected = gram(*pairs[0]) + gram(*pairs[1])
    assert_close(fl.quantities.representation_kernels(model, x, x2=x2, of=of)["body"], expected)


def test_a_value_that_is_written_over_later_is_kept_as_it_was() -> None:
    layers = [nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)]
    model, x = built(lambda: nn.Sequential(*layers).double()), data(5, 4)
    expected = gram((x @ model[0].weight.T + model[0].bias).detach())
    assert_close(fl.quantities.representation_kernels(model, x, of="output")["0"], expected)


def test_layers_are_chosen_by_globs() -> None:
    model = built(lambda: nn.Sequential(mlp(), mlp_of(3)))
    x = data(5, 4)
    assert list(fl.quantities.representation_kernels(model, x)) == ["0.0", "0.3", "1.0", "1.2"]
    assert list(fl.quantities.representation_kernels(model, x, layers="1.*")) == ["1.0", "1.1", "1.2"]
    assert list(fl.quantities.representation_kernels(model, x, layers=["1.1", "0"])) == ["0", "1.1"]
    assert list(fl.quantities.representation_kernels(model, x, layers="")) == [""]
    assert_close(fl.quantities.representation_kernels(model, x, layers="")[""], gram(x))
    with eval_mode(model):
        expected = gram(torch.tanh(model[1][0](model[0](x))).detach())
    assert_close(fl.quantities.representation_kernels(model, x, layers="1.1", of="output")["1.1"], expected)


def mlp_of(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_attention_is_a_layer_whose_projection_is_never_called() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    model = built(lambda: Net(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2)))
    x = data(5, 3, 4)
    assert "attention.out_proj" in dict(model.named_modules())
    kernels = fl.quantities.representation_kernels(model, x)
    assert list(kernels) == ["attention", "head"]
    assert_close(kernels["attention"], gram(x))
    (output, _), *_ = recorded(model, x, "attention", "output")
    assert_close(fl.quantities.representation_kernels(model, x, of="output")["attention"], gram(output))
    with pytest.raises(InputValueError, match=r"attention\.out_proj is not called.*layers="):
        fl.quantities.representation_kernels(model, x, layers="attention.*")


def test_a_layer_that_was_asked_for_and_is_never_called_is_an_error() -> None:
    model = built(lambda: Net(lambda self, x: self.body(x), body=nn.Linear(4, 2), spare=nn.Linear(4, 2)))
    assert list(fl.quantities.representation_kernels(model, data(5, 4))) == ["body"]
    with pytest.raises(InputValueError, match="spare is not called in the forward pass, expected"):
        fl.quantities.representation_kernels(model, data(5, 4), layers=["body", "spare"])


def test_modules_called_with_keywords_only_are_measured() -> None:
    def block(self: Net, *, mask: Tensor | None = None, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.body(hidden)

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(hidden=x, scale=2.0)).mean(1))

    inner = built(lambda: Net(block, body=nn.Linear(4, 6)))
    model = built(lambda: Net(forward, block=inner, head=nn.Linear(6, 2)))
    x = data(5, 3, 4)
    kernels = fl.quantities.representation_kernels(model, x, layers=["block", "block.body", "head"])
    assert_close(kernels["block"], gram(x))
    assert_close(kernels["block.body"], gram(x))
    output = 2.0 * (x @ inner.body.weight.T + inner.body.bias).detach()
    assert_close(fl.quantities.representation_kernels(model, x, layers="block", of="output")["block"], gram(output))


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).double()
    return model, {"input_ids": torch.randint(11, (4, 5)), "decoder_input_ids": torch.randint(11, (4, 3))}


def test_layers_of_a_t5_agree_with_what_they_were_called_with() -> None:
    model, x = t5()
    kernels = fl.quantities.representation_kernels(
        model, x, layers=["*SelfAttention.q", "*EncDecAttention.k", "*.wo", "lm_head"]
    )
    assert len(kernels) == 4 + 2 + 4 + 1
    for name, kernel in kernels.items():
        ((h,), _), *_ = recorded(model, x, name, "input")
        assert_close(kernel, gram(h))
    whole = fl.quantities.representation_kernels(model, x, layers="*.SelfAttention", of="output")
    assert len(whole) == 4
    for name, kernel in whole.items():
        assert_close(kernel, gram(recorded(model, x, name, "output")[0][0]))


def test_tables_that_no_sample_enters_do_not_spoil_the_other_layers() -> None:
    model, x = t5()
    kernels = fl.quantities.representation_kernels(model, x)
    assert {"encoder.embed_tokens", "lm_head", "decoder.block.1.layer.2.DenseReluDense.wi"} <= set(kernels)
    assert not [name for name in kernels if name.endswith("relative_attention_bias")]
    with pytest.raises(UnsupportedModelError, match=r"relative_attention_bias has no axis along which the samples lie"):
        fl.quantities.representation_kernels(model, x, layers="*.relative_attention_bias")


def test_tokens_count_as_numbers_at_the_input_of_an_embedding() -> None:
    model = built(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)))
    tokens = torch.randint(7, (5, 3))
    kernels = fl.quantities.representation_kernels(model, tokens)
    assert_close(kernels["0"], gram(tokens))
    assert_close(kernels["2"], gram(model[0](tokens).detach()))


@pytest.mark.parametrize("budget", [9_000, 5_000, 4_100], ids=repr)
def test_budgets_that_force_blocks_give_the_same_kernels(budget: int) -> None:
    model = built(lambda: nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 2)))
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    x, x2 = data(11, 4), data(6, 4, seed=2)
    expected, cross = (
        fl.quantities.representation_kernels(model, x),
        fl.quantities.representation_kernels(model, x, x2=x2),
    )
    assert_close(expected["2"], gram(model[1](model[0](x)).detach()))
    calls.clear()
    kernels = fl.quantities.representation_kernels(model, x, memory=budget)
    assert max(calls[2:]) < 11
    for name, kernel in kernels.items():
        assert_close(kernel, expected[name])
    for name, kernel in fl.quantities.representation_kernels(model, x, x2=x2, memory=budget).items():
        assert_close(kernel, cross[name])


def test_what_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"kernels of 2 layers .* need 1.1 KiB, expected at most 500 B.*layers=.*memory="
    ):
        fl.quantities.representation_kernels(mlp(), data(7, 4), memory=500)


def test_double_measures_a_copy() -> None:
    model, x = mlp().float(), data(7, 4).float()
    single, double = (
        fl.quantities.representation_kernels(model, x),
        fl.quantities.representation_kernels(model, x, dtype=torch.float64),
    )
    assert {kernel.dtype for kernel in single.values()} == {torch.float32}
    assert {kernel.dtype for kernel in double.values()} == {torch.float64}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.double()
    for name, kernel in double.items():
        ((h,), _), *_ = recorded(model, x.double(), name, "input")
        assert_close(kernel, gram(h))
        assert_close(single[name].double(), kernel, tolerance=1e-5)


def test_half_precision_is_accumulated_in_single() -> None:
    kernel = fl.quantities.representation_kernels(
        nn.Linear(400, 1).bfloat16(), torch.ones(3, 400, dtype=torch.bfloat16)
    )[""]
    assert kernel.dtype == torch.float32
    assert kernel.tolist() == [[400.0] * 3] * 3


def test_one_sample_and_identical_samples_are_measured() -> None:
    model, x = mlp(), data(7, 4)
    assert_close(fl.quantities.representation_kernels(model, x[:1])["0"], gram(x[:1]))
    same = x[:1].repeat(6, 1)
    assert_close(fl.quantities.representation_kernels(model, same)["0"], gram(same))


def test_frozen_layers_and_models_without_gradients_have_representations() -> None:
    model, x = mlp().requires_grad_(False), data(5, 4)
    assert_close(fl.quantities.representation_kernels(model, x)["0"], gram(x))
    with torch.inference_mode():
        assert_close(fl.quantities.representation_kernels(model, x)["0"], gram(x))


def test_the_same_function_of_parameters_is_not_a_representation_of_samples() -> None:
    model = built(lambda: Net(lambda self, x: x @ self.table(torch.arange(4)), table=nn.Embedding(4, 3)))
    with pytest.raises(UnsupportedModelError, match=r"of table has no axis along which the samples lie.*layers="):
        fl.quantities.representation_kernels(model, data(5, 4), layers="table")


def test_the_last_input_kernel_is_the_tangent_kernel_of_a_linear_head() -> None:
    model, x, x2 = mlp(), data(7, 4), data(3, 4, seed=2)
    head = fl.ntk(model, x, x2=x2, outputs="mean", parameters="3.weight")
    assert_close(fl.quantities.representation_kernels(model, x, x2=x2)["3"], head)
