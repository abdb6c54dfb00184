"""Models found by attacking the checks: each gave a wrong kernel, a foreign exception or a false refusal once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net, default_dtype


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def error(model: nn.Module, x: Any, kernel: Tensor) -> float:
    reference = dense_ntk(model, x)
    return float((kernel - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("samples", [2, 3, 5, 7, 12])
def test_an_index_that_counts_and_is_broadcast_against_another(samples: int):
    """out[a, b] = table[b, ids[a]]: axis 0 of the output is not axis 0 of the table."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        table = self.left @ self.right
        return table[torch.arange(len(table)), ids[:, None]] @ self.head

    parts = {"left": torch.randn(samples, 3), "right": torch.randn(3, 5), "head": torch.randn(samples, 2)}
    model = Net(forward, **{name: nn.Parameter(part) for name, part in parts.items()})
    ids = torch.randint(5, (samples,))
    assert error(model, ids, fl.ntk(model, ids)) < 1e-12
    assert error(model, ids, fl.Session(model, ids).ntk()) < 1e-12


class Hooked(nn.Module):
    """Puts a hook on an activation, which scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).tanh())
        if self.how == "all":
            h.register_hook(lambda g: 3 * g)
        if self.how == "some":
            h.register_hook(lambda g: g * (1 + 2 * (x[:, :1] > 2)))
        return self.c(h.tanh())


@pytest.mark.parametrize("how", ["all", "some"])
def test_hooks_on_activations(how: str):
    model, x = Hooked(), torch.randn(20, 4).clamp(-1, 1)
    x[4, 0] = 3.0  # not one of the samples of an audit
    session = fl.Session(model, x)
    session.ntk()
    model.how = how
    assert error(model, x, session.ntk()) < 1e-12
    assert error(model, x, fl.ntk(model, x)) < 1e-12
    model.how = ""
    assert error(model, x, session.ntk()) < 1e-12


def test_embeddings_scaled_by_frequency_in_functional_calls_are_refused():
    def forward(self: Net, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, scale_grad_by_freq=True).sum(1) @ self.head

    model = Net(forward, table=nn.Parameter(torch.randn(200, 4)), head=nn.Parameter(torch.randn(4, 2)))
    places = torch.arange(40)[:, None]
    ids = torch.where(places % 6 == 0, places + 100, places % 6)  # unique in the samples of an audit
    with pytest.raises(fl.errors.CoupledSamplesError):
        fl.ntk(model, ids)


def test_outputs_that_change_their_number_or_precision_in_a_session():
    def forward(self: Net, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return {"single": h.float(), "double": h, "summed": h.float().sum(1)}[self.kind]

    model, x = Net(forward, layer=nn.Linear(4, 3), kind="single"), torch.randn(9, 4)
    session = fl.Session(model, x)
    for kind in ("single", "double", "summed", "double"):
        model.kind = kind
        assert error(model, x, session.ntk().double()) < (1e-12 if kind == "double" else 1e-5)


def test_empty_values_in_the_graph():
    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.cat([self.a(x)[None], self.b(x)[None][:0]], 0).sum(0)

    model, x = Net(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), torch.randn(9, 4)
    assert error(model, x, fl.ntk(model, x)) < 1e-12


@pytest.mark.parametrize("own", [False, True])
def test_layers_without_width(own: bool):
    layers = nn.Sequential(nn.Linear(4, 0), nn.ReLU(), nn.Linear(0, 3))
    model = Net(lambda self, x: self.layers(x), layers=layers) if own else layers
    x = torch.randn(9, 4)
    assert error(model, x, fl.ntk(model, x)) < 1e-12
    assert float(sum(fl.ntk(model, x, by="parameter").values()).abs().max()) > 0


def test_gradients_that_are_nothing_but_rounding_are_not_taken_for_coupling():
    """A norm over a single value: its output is the shift alone, whatever comes before."""
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)]
    model, x = nn.Sequential(*layers), torch.randn(20, 3, 3, 3)
    assert error(model, x, fl.ntk(model, x)) < 1e-9


def test_a_few_saturated_samples_do_not_hide_the_others():
    model = Net(lambda self, x: torch.sigmoid(x @ self.weight), weight=nn.Parameter(torch.ones(3, 1))).float()
    x = torch.randn(40, 3).float()
    x[::6] = -17.0
    reference = dense_ntk(model, x)
    assert float((fl.ntk(model, x) - reference).abs().max() / reference.abs().max()) < 1e-5


def test_a_hook_that_a_forward_pass_puts_on_a_weight_is_taken_off():
    def forward(self: Net, x: Tensor) -> Tensor:
        self.layer.weight.register_hook(lambda g: g)
        return self.layer(x)

    model = Net(forward, layer=nn.Linear(4, 3))
    fl.ntk(model, torch.randn(9, 4))
    assert not model.layer.weight._backward_hooks


def second_largest(x: Tensor) -> Tensor:
    """Of the first features, at least 3: where two samples are larger, it matters to one of them alone."""
    first = x[:, 0].detach()
    return torch.where(first < first.amax(), first, 0.0).amax().clamp(min=3.0)


def into_another_tensor(x: Tensor) -> Tensor:
    seen, table = torch.zeros(1), torch.zeros(1)
    seen.data = table
    table.add_(second_largest(x))
    return seen


def into_statistics(x: Tensor) -> Tensor:
    mean = torch.zeros(1)
    F.batch_norm(second_largest(x).expand(2, 1), mean, torch.ones(1), training=True, momentum=1.0)
    return mean


def by_failing(x: Tensor) -> Tensor:
    try:
        F.embedding((x[:, 0] > 3.0).sum(0), torch.ones(2, 1))
    except IndexError:
        return torch.tensor([3.0])
    return torch.tensor([100.0])


LIMITS = {
    "tensor": lambda x: torch.tensor([second_largest(x)]),
    "as_tensor": lambda x: torch.as_tensor([second_largest(x)]),
    "new_tensor": lambda x: x.new_tensor([second_largest(x)]),
    "index": lambda x: torch.arange(3.0, 40.0)[[(second_largest(x) - 3.0).ceil().long()],],
    "data": into_another_tensor,
    "statistics": into_statistics,
    "failing": by_failing,
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_set_by_the_batch_that_reaches_the_ops_as_a_constant(name: str):
    """Of two large samples one is cut off because of the other, the remaining ones not at all."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.b(self.a(torch.minimum(x, LIMITS[name](x))).tanh())

    model, x = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(40, 3).clamp(-2.0, 2.0)
    session = fl.Session(model, x)
    assert error(model, x, session.ntk()) < 1e-12  # no sample is large
    x[11, 0], x[23, 0] = 9.0, 8.0
    for measure in (fl.Session(model, x).ntk, lambda: session.ntk(x=x)):
        with pytest.raises(fl.errors.CoupledSamplesError):
            measure()


def test_a_table_whose_rows_stand_where_the_samples_do():
    """Sample 37 of a batch is read from another row than the same sample elsewhere."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.a(x * self.table.gather(1, (x > 0).long()))

    table = torch.ones(100, 3)
    table[37] = 2.0
    model, x = Net(forward, a=nn.Linear(3, 2), table=table), torch.randn(64, 3)
    with pytest.raises(fl.errors.CoupledSamplesError):
        fl.ntk(model, x)
