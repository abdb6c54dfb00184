"""A batch that is run by the calls of a proved pass must treat each sample as that pass does.

Soundness is asked of every pass here that is taken for a repetition: its rows are those of the few samples, whatever
the number of samples, and a change of one sample changes no row but its own.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CoupledSamplesError
from featlearn.separation import ProvedPass, RepeatedPass, SeparationProof
from tests.ops import test_sample_flow as ops
from tests.references.jacobian import dense_ntk
from tests.separation.test_proof import NETWORKS, UNPROVED, assert_separate, block
from tests.zoo.case import Net, default_dtype


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


Function = Callable[[Tensor], Tensor]


def proved(function: Function, x: Tensor, held: list[Tensor] | None = None) -> ProvedPass | None:
    proof, given = SeparationProof(held or [], len(x)), x.clone()
    with proof.noting([given]):
        outputs = function(given)
    return proof.proved(outputs)


def is_repeated(known: ProvedPass, function: Function, x: Tensor, held: list[Tensor] | None = None) -> bool:
    repeated, given = RepeatedPass(known, held or [], len(x)), x.clone()
    with repeated.noting([given]):
        outputs = function(given)
    return repeated.holds(outputs)


def soundly_repeated(function: Function, few: int, x: Tensor, held: list[Tensor] | None = None) -> bool:
    """Whether a pass over x is taken for that of the first few samples; if so it must be."""
    torch.manual_seed(1)
    known = proved(function, x[:few], held)
    if known is None:
        return False
    torch.manual_seed(1)
    if not is_repeated(known, function, x, held):
        return False
    torch.manual_seed(1)
    alone = function(x[:few].clone())
    torch.manual_seed(1)
    assert torch.allclose(function(x.clone())[:few], alone, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert_separate(function, x)
    return True


@settings(max_examples=4, derandomize=True, deadline=None)
@given(arrange=st.sampled_from(ops.ARRANGEMENTS), samples=st.sampled_from([2, 5, 8, 21]))
@pytest.mark.parametrize("name", ops.ENTRY_BY_ENTRY)
def test_ops_that_keep_entries_in_place(name: str, arrange: Any, samples: int):
    def function(x: Tensor) -> Tensor:
        t, axis, outer = arrange(x)
        return ops.read_out(ops.ENTRY_BY_ENTRY[name](t), axis, outer, len(x))

    soundly_repeated(function, 7, torch.randn(max(samples, 7), 7, 4)[:, :samples].transpose(0, 1))
    soundly_repeated(function, 7, torch.randn(max(samples, 9), 3, 4))


@pytest.mark.parametrize("seed", range(12))
def test_random_passes(seed: int):
    choice, count = random.Random(seed), 0
    for number in range(60):
        sizes = choice.choice([(5, 3, 4), (4, 4, 4), (3, 2, 3), (6, 2, 3), (3, 3, 2, 3), (3, 3)])
        seeds, last = [f"{seed} {number} {k}" for k in range(choice.randrange(2, 7))], choice.randrange(4)

        def function(x: Tensor, seeds: list[str] = seeds, last: int = last) -> Tensor:
            t = earlier = x.sin()
            for own in list(seeds):
                try:
                    found = ops.random_op(random.Random(own), t, earlier)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    seeds.remove(own)  # shapes that do not fit
                    continue
                if 1 < found.numel() < 4000 and found.dim() > 1 and not found.is_complex():
                    t, earlier = found, t
            t = t.movedim(last % t.dim(), 0)
            return torch.tanh(0.3 * t.reshape(len(x), -1)) if t.numel() % len(x) == 0 else x.mean() + x.flatten(1)

        x = torch.randn(2 * sizes[0] + number % 3, *sizes[1:])
        function(x[: sizes[0]])
        function(x)
        count += soundly_repeated(function, sizes[0], x)
    assert count > 1


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("few", [2, 5, 7])
def test_usual_networks_repeat_their_pass(name: str, few: int):
    model, x = NETWORKS[name]()
    model.eval()
    assert soundly_repeated(model, few, x, [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("name", UNPROVED)
def test_nothing_is_taken_for_a_repetition(name: str):
    """A few samples were run by other code."""
    known = proved(lambda x: x.tanh(), torch.randn(4, 3))
    assert known is not None
    assert not is_repeated(known, UNPROVED[name], torch.randn(6, 3))


TABLE = torch.tensor([[0.3, -1.2, 0.7]], dtype=torch.float64)
SCALE = torch.zeros((), dtype=torch.float64)


def written_into_a_row(x: Tensor) -> Tensor:
    table = torch.zeros(1, 3)
    row = table[0]
    row += torch.ones(len(x)).sum()
    return x.sin() + table


def written_through_a_slice(x: Tensor) -> Tensor:
    table = torch.zeros(40, 3)
    table[: len(x)].add_(1.0)
    return x.sin() + table[10]


def written_by_index(x: Tensor) -> Tensor:
    table = torch.zeros(1, 3)
    table[0, 1] = torch.ones(len(x)).sum()
    return x.sin() + table


BY_NUMBER: dict[str, Function] = {
    "written into a row": written_into_a_row,
    "written through a slice": written_through_a_slice,
    "written by index": written_by_index,
    "number that is read": lambda x: x.sin() * torch.ones(len(x)).sum().item(),
    "numbers that are read": lambda x: x.sin() * torch.arange(len(x)).tolist()[-1],
    "branch on a number": lambda x: x.sin() if bool(torch.ones(len(x)).sum() < 9) else x.cos(),
    "size of a constant": lambda x: x.sin() * torch.arange(len(x))[:, None].shape[0],
    "constant of as many rows": lambda x: x.sin() + torch.zeros(len(x), 3),
    "factor": lambda x: x.sin() * len(x),
    "factor that is zero": lambda x: x.sin() + SCALE * len(x),
    "sum of an expanded table": lambda x: x.sin() + TABLE.expand(len(x), -1).sum(0),
    "norm of an expanded table": lambda x: x.sin() * TABLE.expand(len(x), -1).norm(),
    "expanded table in a product": lambda x: x.sin() + torch.einsum("pd,nd->p", x, TABLE.expand(len(x), -1))[:, None],
    "ones": lambda x: x.sin() * torch.ones(len(x)).sum(),
    "arange": lambda x: x.sin() + torch.arange(len(x)).max(),
    "full": lambda x: x.sin() * torch.full((3,), 1.0 / len(x)),
    "tensor": lambda x: x.sin() * torch.tensor([float(len(x))]),
    "branch": lambda x: x.sin() if len(x) < 9 else x.cos(),
    "coupled in large batches": lambda x: x.sin() if len(x) < 9 else x - x.mean(0),
    "one call more": lambda x: x.sin() if len(x) < 9 else x.sin().flip(0),
    "argument": lambda x: F.softplus(x, beta=float(len(x))),
    "keyword": lambda x: torch.clamp(x, max=0.01 * len(x)),
    "power": lambda x: x.abs() ** (1 / len(x)),
    "dimension": lambda x: x[:, :, None].expand(-1, -1, 2).sum(1 if len(x) < 9 else 2)[:, :2],
    "first rows": lambda x: torch.cat([x[:7].sin(), x[7:].cos()]),
    "size of a view": lambda x: x.reshape(-1).reshape(6, -1).sin().reshape(-1, 3),
    "mean over all but the first": lambda x: x.sin() / x.shape[0],
    "other order in a view": lambda x: (x.reshape(len(x), 3) if len(x) < 9 else x.T.reshape(len(x), 3)).sin(),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_what_depends_on_the_number_of_samples_is_no_repetition(name: str):
    function = BY_NUMBER[name]
    known = proved(function, torch.randn(6, 3), [TABLE, SCALE])
    for samples in (12, 18, 36):
        assert known is None or not is_repeated(known, function, torch.randn(samples, 3), [TABLE, SCALE])


def test_constants_of_as_many_rows_may_be_looked_at():
    """As transformers look at the positions of tokens."""

    def function(x: Tensor) -> Tensor:
        places = torch.arange(3)[None].expand(len(x), -1)
        steps = torch.diff(places, prepend=places[:, :1] - 1, dim=-1)
        return x.sin() if bool(((steps != 1).cumsum(-1)[:, -1] == 0).all()) else x.flip(0)

    assert soundly_repeated(function, 6, torch.randn(15, 3))


def test_other_constants_are_no_repetition():
    scale, wide = torch.ones(()), torch.ones(3, 1)
    known = proved(lambda x: x.sin() * scale.item(), torch.randn(6, 3), [scale])
    assert known is not None
    assert is_repeated(known, lambda x: x.sin() * scale.item(), torch.randn(9, 3), [scale])
    scale += 1
    assert not is_repeated(known, lambda x: x.sin() * scale.item(), torch.randn(9, 3), [scale])
    known = proved(lambda x: x.sin() * wide[0], torch.randn(6, 3), [wide])
    assert known is not None
    assert not is_repeated(known, lambda x: x.sin() * wide[1], torch.randn(9, 3), [wide])
    assert not is_repeated(known, lambda x: x.sin() * torch.randn(3, 1)[0], torch.randn(9, 3), [wide])


class Gated(nn.Module):
    """What is wrong comes through a gate that is closed at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.gate, self.how = nn.Linear(3, 2), nn.Parameter(torch.zeros(())), how
        self.register_buffer("open", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        if self.how == "number":
            return h + self.gate * len(x)
        if self.how == "read":
            return h - h.mean(0) if self.open.item() > 0 else h
        return h - self.open * h.mean(0)


@pytest.mark.parametrize("how", ["number", "read", "mean"])
@pytest.mark.parametrize("samples", [9, 40])
def test_a_gate_that_opens_between_calls(how: str, samples: int):
    model, x = Gated(how), torch.randn(samples, 3)
    session = fl.Session(model, x)
    if how != "number":  # the gradient of its gate shows the number of samples at once
        assert torch.allclose(session.ntk(), dense_ntk(model, x))
    with torch.no_grad():
        model.gate.fill_(0.3)
        model.open.fill_(0.3)
    with pytest.raises(CoupledSamplesError):
        session.ntk()


@pytest.mark.parametrize("build", [block, lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
def test_a_repeated_call_runs_the_batch_once_and_is_exact(build: Callable[[], nn.Module]):
    model = Net(lambda self, x: self.body(x).mean(1)[:, :2], body=build())
    session, sizes = fl.Session(model, torch.randn(9, 5, 8)), []
    model.register_forward_hook(lambda module, given, output: sizes.append(len(output)))
    session.ntk()
    for samples in (9, 4, 12):
        session.ntk(x=torch.randn(samples, 5, 8))  # a plan for so many samples
        x = torch.randn(samples, 5, 8)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        sizes.clear()
        kernel = session.ntk(x=x)
        assert sizes == [samples]
        assert torch.allclose(kernel, dense_ntk(model, x))


def test_a_structure_is_not_taken_for_another():
    """The same calls, other weights: tied, frozen, replaced."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 2))
    session = fl.Session(model, torch.randn(11, 3))

    def is_exact() -> bool:
        return all(torch.allclose(session.ntk(), dense_ntk(model, session.x)) for _ in range(2))

    assert is_exact()
    model.b.weight = model.a.weight
    assert is_exact()
    model.b = nn.Linear(3, 3)
    assert is_exact()
    model.a.requires_grad_(False)
    assert is_exact()
    model.a.requires_grad_(True)
    model.c.weight.requires_grad_(False)
    assert is_exact()
    model.a, model.b = model.b, model.a
    assert is_exact()
    model.double()
    model.c = nn.Linear(3, 2, bias=False)
    assert is_exact()


def test_factors_of_weights_are_read_anew():
    def forward(self: Net, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.factor).tanh() @ self.head

    model = Net(forward, weight=nn.Parameter(torch.randn(4, 3)), head=nn.Parameter(torch.randn(4, 2)))
    model.register_buffer("factor", torch.ones(()))
    session = fl.Session(model, torch.randn(11, 3))
    for factor in (1.0, 1.0, 2.0, 0.5):
        model.factor.fill_(factor)
        assert torch.allclose(session.ntk(), dense_ntk(model, session.x))
