"""Fingerprints, shares and groups, in one process."""

import pytest
import torch

from featlearn.contraction.factors import Dense, Factor, Factors, as_dense
from featlearn.distributed.exchange import TensorKind, contents, fill_gradients, kinds, map_tensors_of
from featlearn.distributed.group import RankGroup, sendable
from featlearn.errors import InputTypeError, InputValueError
from featlearn.network import fingerprint as fingerprints
from featlearn.quantities.ntk import ntk

from .networks import inputs, perceptron


def fingerprint(tensor: torch.Tensor) -> int:
    return int(fingerprints.fingerprint(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_changes_with_every_bit_and_place(dtype: torch.dtype):
    tensor = (torch.arange(3000).reshape(30, 100) % 7).to(dtype)
    seen = {fingerprint(tensor), fingerprint(tensor.flip(0))}
    for place in (0, 1, 999, 2999):
        other = tensor.clone()
        other.view(-1)[place] = other.view(-1)[place].logical_not() if dtype == torch.bool else 8
        seen.add(fingerprint(other))
    assert len(seen) == 6
    assert fingerprint(tensor.mT.contiguous().mT) == fingerprint(tensor)
    assert fingerprint(torch.zeros(2).double()) != fingerprint(-torch.zeros(2).double())


def test_pieces_of_a_large_tensor_count_by_their_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("featlearn.network.fingerprint._PIECE", 7)
    tensor = torch.randn(30)
    swapped = torch.cat([tensor[7:14], tensor[:7], tensor[14:]])
    assert fingerprint(swapped) != fingerprint(tensor) == fingerprint(tensor.clone())


def test_sparse_tensors_have_the_number_of_what_they_hold():
    dense = torch.eye(4)
    assert fingerprint(dense.to_sparse()) == fingerprint(dense.to_sparse_csr()) == fingerprint(dense)
    assert fingerprint((2 * dense).to_sparse()) != fingerprint(dense)


def test_flipped_signs_are_seen():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        tensor = torch.randn(40, generator=generator, dtype=dtype)
        seen = {fingerprint(tensor)}
        for count in range(2, 40, 2):
            signs = torch.where(torch.arange(40) < count, -1.0, 1.0)[torch.randperm(40, generator=generator)]
            seen.add(fingerprint(tensor * signs.to(dtype)))
        assert len(seen) == 20


@pytest.mark.parametrize("samples", [0, 1, 2, 5, 9, 12])
def test_shares_are_those_of_chunk(samples: int):
    group = RankGroup()
    group.size = 4
    shares = [range(samples)[share] for share in group.shares(samples)]
    chunks = torch.arange(samples).chunk(4) if samples else ()
    assert [list(share) for share in shares if len(share)] == [chunk.tolist() for chunk in chunks]
    assert len(shares) == 4


@pytest.mark.parametrize(
    ("group", "kind", "word"),
    [
        ("world", InputValueError, "without an initialized process group"),
        ("all", InputValueError, "expected 'world'"),
        (3, InputTypeError, "for a DeviceMesh, pass"),
    ],
)
def test_a_group_that_is_none_is_refused(group: object, kind: type[Exception], word: str):
    with pytest.raises(kind, match=word):
        ntk(perceptron(), inputs(3, 5), group=group)


def test_gradients_are_what_they_were_after_a_journey():
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(4, 3, 2, 5, generator=generator).transpose(1, 2).contiguous().transpose(1, 2)
    grads = torch.randn(2, 1, 3, 2, 6, generator=generator).expand(2, 4, 3, 2, 6)
    order = torch.randperm(60, generator=generator)
    factors = Factors((Factor(held, grads, True, 5),), 2, 5, 6, ("view",), order)
    for gradients in (factors, as_dense(factors)):
        skeleton = kinds(gradients)
        sent = [kind.sent(tensor) for kind, tensor in zip(contents(skeleton), contents(gradients), strict=True)]
        assert all(tensor.is_contiguous() for tensor in sent)
        if gradients is factors:
            assert sent[1].numel() == grads.numel() // 4, "what all samples share is sent once"
        arrived = [kind.received(tensor.clone()) for kind, tensor in zip(contents(skeleton), sent, strict=True)]
        found = fill_gradients(skeleton, arrived, order)
        assert torch.equal(as_dense(found).gradient, as_dense(gradients).gradient)
        strides = [[t.stride() for t in contents(one)] for one in (found, gradients)]
        assert strides[0] == strides[1]
    assert isinstance(map_tensors_of(as_dense(factors), TensorKind.of), Dense)


@pytest.mark.parametrize(
    ("kind", "backends", "expected"),
    [
        ("cpu", "cpu:gloo,cuda:gloo", True),
        ("cuda", "cpu:gloo,cuda:gloo", False),  # a pointer into a GPU would end the process
        ("cuda", "cpu:gloo,cuda:nccl", True),
        ("cuda", "cuda:nccl", True),
        ("cpu", "cuda:nccl", False),
        ("xpu", "cpu:gloo,cuda:gloo,xpu:gloo", False),
    ],
)
def test_tensors_are_sent_from_where_a_backend_can_reach_them(kind: str, backends: str, expected: bool):
    assert sendable(kind, backends) is expected
