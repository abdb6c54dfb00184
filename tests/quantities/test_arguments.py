"""Every bad argument raises an error that says what was given, what was expected and what to do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, UnsupportedModelError
from featlearn.ops import registry

from ..references.jacobian import dense_ntk
from ..zoo.case import Net


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


MODEL = network()
X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_refused(call: Callable[[], object], *words: str) -> None:
    """The call is refused with a FeatlearnError that is a ValueError or TypeError and has these words."""
    with pytest.raises(fl.FeatlearnError) as caught:
        call()
    assert isinstance(caught.value, ValueError | TypeError)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def measures(*without: str) -> list[Callable[..., object]]:
    every = {"ntk": fl.ntk, "plan": fl.plan, "representation_kernels": fl.quantities.representation_kernels}
    return [function for name, function in every.items() if name not in without]


BAD_MODELS = [
    ("a function", lambda x: x, "function"),
    ("a class", nn.Linear, "type"),
    ("nothing", None, "NoneType"),
    ("state", MODEL.state_dict(), "mapping"),
]


@pytest.mark.parametrize("measure", measures())
@pytest.mark.parametrize(("model", "given"), [bad[1:] for bad in BAD_MODELS], ids=[bad[0] for bad in BAD_MODELS])
def test_a_model_is_a_module(measure: Callable[..., object], model: Any, given: str) -> None:
    assert_refused(lambda: measure(model, X), "model is", given, "expected a torch.nn.Module", "wrap")


def nested_tensor() -> Tensor:
    return torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)


BAD_INPUTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a numpy array": (X.numpy, ("numpy.ndarray", "expected a tensor", "torch.as_tensor")),
    "a list": (X.tolist, ("list", "expected a tensor", "tuple", "mapping")),
    "a list of tensors": (lambda: [X], ("list", "expected a tensor", "tuple")),
    "a packed sequence": (lambda: nn.utils.rnn.pack_sequence([X]), ("PackedSequence", "padded", "pack inside")),
    "an empty tuple": (lambda: (), ("a tuple ()", "expected at least one tensor")),
    "an empty mapping": (dict, ("a mapping {}", "expected at least one tensor")),
    "options only": (lambda: {"input": None}, ("input: NoneType", "expected at least one tensor")),
    "a scalar": (lambda: torch.tensor(1.0), ("shape ()", "first axis", "[None]")),
    "a number": (lambda: 3, ("int", "expected a tensor")),
    "a string": (lambda: "digits", ("str", "expected a tensor")),
    "no samples": (lambda: X[:0], ("(0, 4)", "no samples", "expected at least one")),
    "unequal batches": (lambda: (X, X[:4]), ("(5, 4)", "(4, 4)", "expected the same number of samples")),
    "integers": (lambda: torch.ones(5, 4, dtype=torch.long), ("int64 tensor of shape (5, 4)", "failed")),
    "single precision": (X.float, ("torch.float32", "expected torch.float64", "dtype=")),
    "too many features": (lambda: X[:, :3], ("(5, 3)", "failed")),
    "unknown names": (lambda: {"images": X}, ("images", "failed", "unexpected keyword")),
    "a sparse tensor": (lambda: X.to_sparse(), ("sparse", "expected")),
    "a nested tensor": (nested_tensor, ("nested", "expected")),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("measure", measures())
@pytest.mark.parametrize(("make", "words"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_inputs_are_tensors_with_samples_first(measure: Any, make: Callable[[], Any], words: tuple[str, ...]) -> None:
    bad = make()
    assert_refused(lambda: measure(MODEL, bad), *words)
    assert_refused(lambda: measure(MODEL, X, x2=bad), *words)


def test_the_second_probe_is_called_x2_in_messages() -> None:
    assert_refused(lambda: fl.ntk(MODEL, X, x2=X.numpy()), "x2 is numpy.ndarray", "model(*x2)")
    assert_refused(lambda: fl.ntk(MODEL, X, x2=X.float()), "x2 is torch.float32")


def test_both_probes_have_the_same_number_of_outputs() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 2), nn.Flatten()).double()
    assert_refused(
        lambda: fl.ntk(model, X[:, None], x2=X[:3, None, :3]), "3 outputs on x", "2 on x2", "expected the same"
    )


@pytest.mark.parametrize("measure", measures("representation_kernels"))
@pytest.mark.parametrize("bad", ["meen", "MEAN", "", 10, -1, 3, True, 1.5, None, [0], torch.tensor(1)], ids=repr)
def test_outputs_are_one_of_the_modes(measure: Any, bad: Any) -> None:
    expected = "expected an output between 0 and 2" if type(bad) is int else "expected 'mean', 'sum', 'each', 'full'"
    assert_refused(lambda: measure(MODEL, X, outputs=bad), f"outputs={bad!r}", expected)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "3", None], ids=repr)
def test_probes_are_a_positive_number_of_directions(k: Any) -> None:
    assert_refused(lambda: fl.Directions(k), f"k={k!r}", "expected a number of directions >= 1")


@pytest.mark.parametrize("generator", [0, 7, "seed"], ids=repr)
def test_probes_take_a_torch_generator(generator: Any) -> None:
    assert_refused(
        lambda: fl.ntk(MODEL, X, outputs=fl.Directions(2, generator)), "generator", "expected a torch.Generator"
    )


def test_probes_are_drawn_once_from_the_generator_that_is_given() -> None:
    kernel = fl.ntk(MODEL, X, outputs=fl.Directions(3, torch.Generator().manual_seed(7)))
    signs = fl.Directions(3, torch.Generator().manual_seed(7)).signs(3)
    expected = torch.einsum("kc,pqcd,kd->pq", signs, dense_ntk(MODEL, X, outputs="full"), signs) / 3
    torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("measure", measures("representation_kernels"))
@pytest.mark.parametrize("bad", ["layers", "", None, 3, True, ["layer"]], ids=repr)
def test_by_is_one_of_three(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, by=bad), f"by={bad!r}", "expected 'network', 'layer' or 'parameter'")


@pytest.mark.parametrize("measure", [fl.ntk, fl.plan])
@pytest.mark.parametrize("bad", ["yes", 1, None], ids=repr)
def test_verify_is_true_or_false(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, verify=bad), f"verify={bad!r}", "expected True or False")


@pytest.mark.parametrize("measure", measures("representation_kernels"))
@pytest.mark.parametrize("bad", [3, [1], b"0.*", {}, [], (), ["0.*", None], 1.5], ids=repr)
def test_parameters_are_globs(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, parameters=bad), "parameters", repr(bad), "expected a glob")


@pytest.mark.parametrize("bad", ["head.*", ["0.*", "head.*"], ""], ids=repr)
def test_parameters_that_match_nothing_are_refused_with_the_names_there_are(bad: Any) -> None:
    glob = bad if isinstance(bad, str) else "head.*"
    assert_refused(
        lambda: fl.ntk(MODEL, X, parameters=bad), f"parameters={glob!r}", "0.weight, 0.bias, 2.weight, 2.bias"
    )


def test_names_of_modules_are_not_names_of_parameters() -> None:
    assert_refused(lambda: fl.ntk(MODEL, X, parameters="0"), "matches no trainable parameter", "0.weight")


@pytest.mark.parametrize("bad", [3, [1], b"0", [], 1.5], ids=repr)
def test_layers_are_globs(bad: Any) -> None:
    assert_refused(lambda: fl.quantities.representation_kernels(MODEL, X, layers=bad), "layers", repr(bad), "expected")


def test_layers_that_match_nothing_are_refused_with_the_names_there_are() -> None:
    assert_refused(
        lambda: fl.quantities.representation_kernels(MODEL, X, layers=["0", "conv*"]), "layers='conv*'", "0, 1, 2"
    )


def test_a_network_without_layers_of_its_own_has_no_representations() -> None:
    assert_refused(lambda: fl.quantities.representation_kernels(nn.Flatten(), X), "layers=")


@pytest.mark.parametrize("bad", ["in", None, 3, ["input"]], ids=repr)
def test_representations_are_of_input_or_output(bad: Any) -> None:
    assert_refused(
        lambda: fl.quantities.representation_kernels(MODEL, X, of=bad), f"of={bad!r}", "expected 'input' or 'output'"
    )


@pytest.mark.parametrize("measure", measures())
@pytest.mark.parametrize("bad", ["float64", torch.int32, torch.bfloat16, torch.complex64, float, 64], ids=repr)
def test_dtype_is_single_or_double(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, dtype=bad), repr(bad), "expected torch.float32, torch.float64 or None")
    if measure is fl.quantities.representation_kernels:
        # Nothing of this model has a dtype that could differ.
        bare = nn.Sequential(nn.Tanh())
        assert_refused(lambda: measure(bare, X, dtype=bad, layers="0"), repr(bad), "expected torch.float32")


@pytest.mark.parametrize("measure", measures())
@pytest.mark.parametrize("bad", ["lots", "", "2 cows", "-2GiB", "0", "0.1", -1, 0, True, 1.5, [1]], ids=repr)
def test_memory_is_a_number_of_bytes(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, memory=bad), "memory", repr(bad), "expected")


@pytest.mark.parametrize("measure", measures())
def test_what_does_not_fit_is_refused_with_its_size_and_the_budget(measure: Any) -> None:
    words = ("need 736 B", "expected at most 100 B", "layers=")
    if measure is not fl.quantities.representation_kernels:
        words = ("takes 200 B", "expected at most 90 B", "out=", "fl.NTKOperator", "fl.Sketch")
    assert_refused(lambda: measure(MODEL, X, memory="100B"), *words, "memory=")
    with pytest.raises(MemoryBudgetError):
        measure(MODEL, X, memory=260)


@pytest.mark.parametrize("measure", measures("representation_kernels"))
@pytest.mark.parametrize("bad", [3, "last_token", [len]], ids=repr)
def test_a_readout_is_a_function(measure: Any, bad: Any) -> None:
    assert_refused(lambda: measure(MODEL, X, readout=bad), f"readout is {bad!r}", "expected a function")


def test_a_readout_gives_one_row_per_sample() -> None:
    assert_refused(lambda: fl.ntk(MODEL, X, readout=lambda f: f.T), "the readout gives", "(3, 5)", "(P, C) = (5, C)")
    assert_refused(
        lambda: fl.ntk(MODEL, X, readout=lambda f: f.tolist()), "the readout gives list", "expected a tensor"
    )
    assert_refused(lambda: fl.ntk(MODEL, X, readout=lambda f: f["y"]), "readout failed on", "(5, 4)")
    assert_refused(lambda: fl.ntk(MODEL, X, readout=lambda f: f[:, :0]), "no outputs", "C >= 1")


def optimizers() -> dict[str, tuple[Any, tuple[str, ...]]]:
    parameters = list(MODEL.parameters())
    return {
        "a number": (3, ("optimizer is 3", "expected a torch.optim.Optimizer")),
        "a class": (torch.optim.SGD, ("SGD", "expected a torch.optim.Optimizer")),
        "of another model": (torch.optim.SGD(network().parameters(), lr=0.1), ("none of the parameters", "expected")),
        "LBFGS": (torch.optim.LBFGS(parameters), ("LBFGS", "expected exactly one of SGD, Adam")),
        "NAdam": (torch.optim.NAdam(parameters), ("NAdam", "expected exactly one of SGD, Adam")),
        "Adam without state": (torch.optim.Adam(parameters), ("no state for 0.weight", "take one step")),
        "RMSprop without state": (torch.optim.RMSprop(parameters), ("no state for 0.weight", "take one step")),
        "Adagrad without a step": (torch.optim.Adagrad(parameters), ("no state for 0.weight", "take one step")),
        "maximizing": (torch.optim.SGD(parameters, lr=0.1, maximize=True), ("maximizes", "expected one that min")),
    }


@pytest.mark.parametrize("measure", measures("representation_kernels"))
@pytest.mark.parametrize(("bad", "words"), optimizers().values(), ids=optimizers())
def test_an_optimizer_makes_diagonal_updates_of_this_model(measure: Any, bad: Any, words: tuple[str, ...]) -> None:
    assert_refused(lambda: measure(MODEL, X, optimizer=bad), *words)


def test_errors_of_the_model_are_quoted() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        raise KeyError("temperature")

    model = Net(forward, body=nn.Linear(4, 2).double())
    for measure in measures():
        assert_refused(lambda measure=measure: measure(model, X), "(5, 4)", "KeyError: 'temperature'")
    with pytest.raises(UnsupportedModelError):
        fl.ntk(model, X)


BAD_READOUTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "token at no place": (lambda: fl.readouts.token("last"), ("token('last')", "expected")),
    "token at half a place": (lambda: fl.readouts.token(1.5), ("token(1.5)", "expected")),
    "token at True": (lambda: fl.readouts.token(True), ("token(True)", "expected")),
    "token too far": (lambda: fl.readouts.token(4)(X[:, :, None]), ("token(4)", "4 positions")),
    "no positions": (lambda: fl.readouts.last_token(X[:, 0], X), ("(5,)", "expected (P, T, C)")),
    "no tensor": (lambda: fl.readouts.token(0)("text"), ("str", "expected a tensor", "readout")),
    "labels that are missing": (lambda: fl.readouts.correct_logit("y")(X, {"z": X}), ("'y'", "no entry", "pass x=")),
    "labels of a tensor": (lambda: fl.readouts.correct_logit("y")(X, X), ("'y'", "no entry", "pass x=")),
    "labels that are no tensor": (lambda: fl.readouts.correct_logit("y")(X, {"y": 3}), ("'y'", "int", "a tensor")),
    "labels that are real": (lambda: fl.readouts.correct_logit("y")(X, {"y": X[:, 0]}), ("'y'", "float64", "integers")),
    "labels of other shape": (
        lambda: fl.readouts.correct_logit("y")(X, {"y": torch.ones(3, dtype=torch.long)}),
        ("(3,)", "expected integers of shape (5,)", "(5, 4)"),
    ),
    "labels out of range": (
        lambda: fl.readouts.correct_logit("y")(X, {"y": torch.tensor([0, 1, 2, 3, 4])}),
        ("'y'", "4", "expected"),
    ),
    "labels to be ignored": (
        lambda: fl.readouts.correct_logit("y")(X, {"y": torch.tensor([0, 1, 2, 3, -100])}),
        ("'y'", "-100", "expected"),
    ),
    "a misspelled loss": (lambda: fl.readouts.loss("msee", "y"), ("loss='msee'", "did you mean 'mse'")),
    "targets of other length": (
        lambda: fl.readouts.loss(nn.MSELoss(), "y")(X, {"y": X[:3]}),
        ("'y'", "3", "5", "expected"),
    ),
    "a loss per output": (
        lambda: fl.readouts.loss(nn.MSELoss(reduction="none"), "y")(X, {"y": X}),
        ("(1, 4)", "expected one number", "reduction"),
    ),
    "a mask that leaves nothing": (
        lambda: fl.readouts.last_token(X[:, :, None], {"attention_mask": torch.zeros(5, 4)}),
        ("attention_mask", "expected"),
    ),
    "a mask of other length": (
        lambda: fl.readouts.last_token(X[:, :, None], {"attention_mask": torch.ones(5, 3)}),
        ("attention_mask", "(5, 3)", "expected", "(5, 4)"),
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "words"), BAD_READOUTS.values(), ids=BAD_READOUTS)
def test_readouts_say_what_they_need(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    assert_refused(make, *words)


class Double(torch.autograd.Function):
    """x * weight, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).sum(0)


@pytest.fixture
def rules() -> Iterator[dict[str, Any]]:
    before = dict(registry._RULES)
    yield registry._RULES
    registry._RULES.clear()
    registry._RULES.update(before)


def doubled() -> Net:
    torch.manual_seed(0)
    with_weight = nn.Parameter(torch.randn(6, dtype=torch.float64))
    return Net(
        lambda self, x: self.head(Double.apply(torch.tanh(self.body(x)), self.weight)),
        weight=with_weight,
        body=nn.Linear(4, 6).double(),
        head=nn.Linear(6, 3).double(),
    )


@pytest.mark.parametrize("names", [(), (3,), (len,), ("",), ("AddBackward0", None)], ids=repr)
def test_a_rule_is_registered_for_names(names: Any) -> None:
    assert_refused(lambda: fl.ops.register_rule(*names), "register_rule got", "expected names", '@register_rule("')


def test_a_rule_is_a_function(rules: dict[str, Any]) -> None:
    assert_refused(lambda: fl.ops.register_rule("DoubleBackward")(3), "3", "expected a function")  # type: ignore[arg-type]


def test_a_rule_is_replaced_only_on_purpose(rules: dict[str, Any]) -> None:
    assert_refused(lambda: fl.ops.register_rule("AddmmBackward0"), "'AddmmBackward0'", "already", "replace=True")
    fl.ops.register_rule("AddmmBackward0", replace=True)(lambda use: None)
    assert set(fl.plan(MODEL, X).fallbacks) == {name for name, _ in MODEL.named_parameters()}


def test_a_right_rule_is_used(rules: dict[str, Any]) -> None:
    assert "weight" in fl.plan(doubled(), X).fallbacks

    @fl.ops.register_rule("DoubleBackward")
    def double(use: fl.ops.Use) -> fl.ops.Direct | None:
        return fl.ops.Direct(lambda grad: 2 * grad * use.node.saved_tensors[0]) if use.operand == 1 else None

    assert fl.plan(doubled(), X).fallbacks == {}
    kernel = fl.ntk(doubled(), X, by="parameter", verify=True)["weight"]
    torch.testing.assert_close(kernel, dense_ntk(doubled(), X, by="parameter")["weight"], rtol=1e-12, atol=1e-12)


WRONG_RULES: dict[str, Callable[[fl.ops.Use], Any]] = {
    "a factor is missing": lambda use: fl.ops.Direct(lambda grad: grad * use.node.saved_tensors[0]),
    "the wrong sample": lambda use: fl.ops.Direct(lambda grad: 2 * (grad * use.node.saved_tensors[0]).flip(0)),
    "slightly wrong": lambda use: fl.ops.Direct(lambda grad: 2.00001 * grad * use.node.saved_tensors[0]),
    "not a number": lambda use: fl.ops.Direct(lambda grad: grad * float("nan")),
    "of another shape": lambda use: fl.ops.Direct(lambda grad: grad.sum(0)),
    "failing late": lambda use: fl.ops.Direct(lambda grad: grad @ grad @ grad),
    "failing": lambda use: use.saved_tensors,  # type: ignore[attr-defined]
    "not a form": lambda use: use.node.saved_tensors[0],
}


@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES)
def test_a_wrong_rule_is_found_out_and_not_used(rules: dict[str, Any], rule: Callable[..., Any]) -> None:
    fl.ops.register_rule("DoubleBackward")(rule)
    reasons = fl.plan(doubled(), X).fallbacks
    assert set(reasons) == {"weight"}
    assert "DoubleBackward" in reasons["weight"]
    kernels = fl.ntk(doubled(), X, x2=X[:3], outputs="full", by="parameter", verify=True)
    expected = dense_ntk(doubled(), X, X[:3], outputs="full", by="parameter")
    torch.testing.assert_close(kernels, expected, rtol=1e-12, atol=1e-12)


def test_wrong_types_are_type_errors_and_wrong_values_are_value_errors() -> None:
    with pytest.raises(InputTypeError):
        fl.ntk(MODEL, X, memory=1.5)
    with pytest.raises(InputValueError):
        fl.ntk(MODEL, X, memory="lots")
    assert issubclass(InputTypeError, TypeError)
    assert issubclass(InputValueError, ValueError)
