"""Readouts: their values by direct indexing, their kernels against the dense Jacobian."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featlearn as fl

from .references.jacobian import dense_ntk
from .zoo.case import Net, default_dtype

LENGTHS = torch.tensor([3, 1, 4, 4, 2])
RIGHT = (torch.arange(4) < LENGTHS[:, None]).long()
LEFT = RIGHT.flip(1)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tagger(**outputs: Any) -> Net:
    """Three logits at each of four positions, each depending on the positions before it."""

    def forward(self: Net, ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        hidden = self.embedding(ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[:, :, None]
        logits = self.head(torch.tanh(hidden.cumsum(1)))
        return SimpleNamespace(logits=logits) if self.wrapped else logits

    torch.manual_seed(0)
    with default_dtype(torch.float64):
        return Net(forward, embedding=nn.Embedding(7, 5), head=nn.Linear(5, 3), **({"wrapped": False} | outputs))


def ids(samples: int = 5) -> Tensor:
    return torch.randint(7, (samples, 4), generator=torch.Generator().manual_seed(samples))


def assert_kernel(model: nn.Module, x: Any, x2: Any, readout: Any) -> None:
    """All pairs of outputs, parameter by parameter."""
    kernels = fl.ntk(model, x, x2=x2, outputs="full", by="parameter", readout=readout)
    expected = dense_ntk(model, x, x2, "full", readout, "parameter")
    assert max(kernel.abs().max() for kernel in expected.values()) > 1e-3
    torch.testing.assert_close(kernels, expected, rtol=1e-11, atol=1e-11)


def test_the_last_token_is_the_last_position_without_a_mask() -> None:
    output = values(5, 4, 3)
    for x in (ids(), (ids(),), {"ids": ids()}, {"ids": ids(), "attention_mask": None}):
        assert torch.equal(fl.readouts.last_token(output, x), output[:, 3])


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float64], ids=str)
def test_the_last_token_is_the_last_one_that_the_mask_leaves(kind: torch.dtype) -> None:
    output = values(5, 4, 3)
    right = fl.readouts.last_token(output, {"attention_mask": RIGHT.to(kind)})
    assert torch.equal(right, torch.stack([output[i, n - 1] for i, n in enumerate(LENGTHS)]))
    left = fl.readouts.last_token(output, {"attention_mask": LEFT.to(kind)})
    assert torch.equal(left, output[:, 3])


def test_the_last_token_is_found_behind_holes_in_the_mask() -> None:
    output, mask = values(2, 4, 3), torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]])
    expected = torch.stack([output[0, 2], output[1, 1]])
    assert torch.equal(fl.readouts.last_token(output, {"attention_mask": mask}), expected)


def test_outputs_are_read_from_objects_mappings_and_tuples() -> None:
    output = values(5, 4, 3)
    for wrapped in (
        SimpleNamespace(loss=None, logits=output),
        SimpleNamespace(last_hidden_state=output),
        {"logits": output},
        {"loss": torch.tensor(0.0), "last_hidden_state": output},
        (output, values(2)),
    ):
        assert torch.equal(fl.readouts.token(1)(wrapped), output[:, 1])


@pytest.mark.parametrize("i", [-4, -1, 0, 2, 3])
def test_a_token_is_counted_from_either_end(i: int) -> None:
    output = values(5, 4, 3)
    assert torch.equal(fl.readouts.token(i)(output), output[:, i])


def test_the_correct_logit_is_that_of_the_label() -> None:
    logits, labels = values(5, 3), torch.tensor([2, 0, 1, 1, 2])
    expected = torch.stack([logits[i, c] for i, c in enumerate(labels)])
    assert torch.equal(fl.readouts.correct_logit("labels")(logits, {"labels": labels}), expected)
    assert torch.equal(fl.readouts.correct_logit(1)(logits, (values(5), labels)), expected)
    assert torch.equal(fl.readouts.correct_logit("labels")(logits, {"labels": labels.int().long()}), expected)


def test_the_correct_logit_of_each_position_is_an_output_of_its_own() -> None:
    logits, labels = values(5, 4, 3), torch.randint(3, (5, 4))
    found = fl.readouts.correct_logit("labels")(logits, {"labels": labels})
    assert found.shape == (5, 4)
    assert found.tolist() == [[logits[i, t, labels[i, t]].item() for t in range(4)] for i in range(5)]


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_may_be_integers_of_any_size(kind: torch.dtype) -> None:
    logits, labels = values(5, 3), torch.tensor([2, 0, 1, 1, 2])
    found = fl.readouts.correct_logit("y")(logits, {"y": labels.to(kind)})
    assert torch.equal(found, logits[torch.arange(5), labels])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_each_sample_alone(reduction: str) -> None:
    output, target = values(5, 3), values(6, 3)[1:]
    found = fl.readouts.loss(nn.MSELoss(reduction=reduction), "target")(output, {"target": target})
    whole = (output - target).square()
    torch.testing.assert_close(found, whole.mean(1) if reduction == "mean" else whole.sum(1))
    labels = torch.tensor([2, 0, 1, 1, 2])
    found = fl.readouts.loss(nn.CrossEntropyLoss(reduction=reduction), 1)((output, None), (output, labels))
    torch.testing.assert_close(found, F.cross_entropy(output, labels, reduction="none"))


def test_the_loss_is_not_divided_by_the_number_of_samples() -> None:
    output, target = values(5, 3), values(6, 3)[1:]
    read = fl.readouts.loss(nn.MSELoss(), "y")
    alone = read(output[:1], {"y": target[:1]})
    torch.testing.assert_close(read(output, {"y": target})[:1], alone)


def inputs(samples: int, mask: Tensor) -> dict[str, Tensor]:
    return {"ids": ids(samples), "attention_mask": mask[:samples]}


@pytest.mark.parametrize("wrapped", [False, True], ids=["a tensor", "an object with logits"])
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right padding", "left padding"])
def test_kernels_of_the_last_token_are_exact(mask: Tensor, wrapped: bool) -> None:
    assert_kernel(tagger(wrapped=wrapped), inputs(5, mask), inputs(3, mask), fl.readouts.last_token)


def test_kernels_of_the_last_token_without_a_mask_are_exact() -> None:
    assert_kernel(tagger(), ids(5), ids(3), fl.readouts.last_token)


@pytest.mark.parametrize("i", [0, -2])
def test_kernels_of_a_token_are_exact(i: int) -> None:
    assert_kernel(tagger(), {"ids": ids(5)}, {"ids": ids(3)}, fl.readouts.token(i))


def test_padding_has_no_part_in_the_kernel_of_the_last_token() -> None:
    model, x = tagger(), inputs(5, RIGHT)
    other = x | {"ids": torch.where(RIGHT.bool(), x["ids"], 6 - x["ids"])}
    assert not torch.equal(other["ids"], x["ids"])
    first, second = (fl.ntk(model, each, readout=fl.readouts.last_token) for each in (x, other))
    torch.testing.assert_close(first, second, rtol=1e-13, atol=0)


def test_kernels_of_the_correct_logit_are_exact_and_chosen_from_all_pairs() -> None:
    labels = torch.tensor([2, 0, 1, 1, 2])
    x, x2 = inputs(5, RIGHT) | {"labels": labels}, inputs(3, RIGHT) | {"labels": labels[:3]}

    def readout(output: Tensor, x: Any) -> Tensor:
        return fl.readouts.correct_logit("labels")(fl.readouts.last_token(output, x), x)

    model = tagger()
    assert_kernel(model, x, x2, readout)
    every = fl.ntk(model, x, x2=x2, outputs="full", readout=fl.readouts.last_token)
    chosen = torch.stack([torch.stack([every[i, j, labels[i], labels[j]] for j in range(3)]) for i in range(5)])
    torch.testing.assert_close(fl.ntk(model, x, x2=x2, readout=readout), chosen, rtol=1e-12, atol=1e-12)


def test_kernels_of_the_correct_logit_at_each_position_are_exact() -> None:
    labels = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(3))
    x, x2 = {"ids": ids(5), "labels": labels}, {"ids": ids(3), "labels": labels[2:]}
    assert fl.ntk(tagger(), x, x2=x2, outputs="each", readout=fl.readouts.correct_logit("labels")).shape == (4, 5, 3)
    assert_kernel(tagger(), x, x2, fl.readouts.correct_logit("labels"))


def test_kernels_of_the_loss_are_the_kernel_between_residuals() -> None:
    model = Net(lambda self, x, y: self.body(x), body=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    model.double()
    x, y, x2, y2 = values(5, 4), values(6, 3)[1:], values(9, 4)[6:], values(9, 3)[6:]
    readout = fl.readouts.loss(nn.MSELoss(reduction="sum"), 1)
    assert_kernel(model, (x, y), (x2, y2), readout)
    full = dense_ntk(model, (x, y), (x2, y2), "full")
    residual, residual2 = 2 * (model(x, y) - y), 2 * (model(x2, y2) - y2)
    expected = torch.einsum("pc,pqcd,qd->pq", residual, full, residual2).detach()
    torch.testing.assert_close(fl.ntk(model, (x, y), x2=(x2, y2), readout=readout), expected, rtol=1e-11, atol=1e-11)


def test_kernels_of_the_loss_of_whole_sequences_are_exact() -> None:
    labels = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(3))
    x, x2 = {"ids": ids(5), "labels": labels}, {"ids": ids(3), "labels": labels[2:]}

    def criterion(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    assert_kernel(tagger(wrapped=True), x, x2, fl.readouts.loss(criterion, "labels"))


def test_readouts_work_chunk_by_chunk() -> None:
    labels = torch.tensor([2, 0, 1, 1, 2])
    model, x = tagger(), {"ids": ids(5), "labels": labels}

    def readout(output: Tensor, x: Any) -> Tensor:
        return fl.readouts.correct_logit("labels")(fl.readouts.token(-1)(output), x)

    budget = 16_000
    assert min(group.chunk for group in fl.plan(model, x, readout=readout, memory=budget).groups) < 5
    expected = dense_ntk(model, x, readout=readout)
    torch.testing.assert_close(fl.ntk(model, x, readout=readout, memory=budget), expected, rtol=1e-12, atol=1e-12)
