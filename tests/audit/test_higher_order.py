"""Functions of functions, like `torch.cond`: torch compiles them in training, and a measurement does not."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
import featlearn as fl
from tests.references.jacobian import dense_ntk

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x).tanh()
        if KIND == "cond in a closure":  # operands without a gradient
            return torch.cond(x.sum() < 1e9, lambda x: self.b(x).sin(), lambda x: self.b(x), (x,)) + h
        if KIND == "cond in a closure, later":
            return torch.cond(x.sum() < 1e9, lambda h: self.c(h).sin(), lambda h: self.c(h), (h,))
        if KIND == "cond":
            w = self.b.weight
            f, g = (lambda x, w: ((x @ w.T).sin(),)), (lambda x, w: (x @ w.T,))
            return torch.cond(torch.tensor(True), f, g, (x, w))[0] + h
        if KIND == "cond without tuples":
            return torch.cond(torch.tensor(True), torch.sin, torch.cos, (h,))
        if KIND == "scan":
            from torch._higher_order_ops.scan import scan
            rows = scan(lambda c, row: ((c + row).tanh(), (c * row).sin()), torch.zeros_like(h[:, 0]), h.T)[1]
            return self.c(rows.T)
        from torch._higher_order_ops.while_loop import while_loop
        start = torch.zeros((), dtype=torch.int64), h
        return self.c(while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, (2 * h).tanh()), start)[1])

EXPECTED = {
    "cond in a closure": (False, "b.weight"),
    "cond in a closure, later": (False, ""),
    "cond": (True, ""),
    "cond without tuples": (False, ""),
    "scan": (True, ""),
    "while_loop": (True, ""),
}
torch.manual_seed(0)
model, x = Model().double(), torch.randn(7, 5, dtype=torch.float64)
for KIND in [*sys.argv[1:], *EXPECTED]:
    exact, name = EXPECTED[KIND]
    try:
        kernel, refusal = fl.ntk(model, x, verify=True), ""
    except fl.errors.UnsupportedModelError as error:
        refusal = str(error)
    reference = dense_ntk(model, x)  # as in training, and the process is as before
    if exact:
        assert not refusal, (KIND, refusal)
        assert float((kernel - reference).abs().max() / reference.abs().max()) < 1e-12, KIND
    else:
        assert "as operands" in refusal and name in refusal, (KIND, refusal)
    print(KIND)
"""


@pytest.mark.parametrize("first", [["cond in a closure"], ["scan"], ["while_loop"]], ids=" ".join)
def test_the_first_call_of_a_process_is_like_later_ones(first: list[str]):
    """The compiler is loaded in the first pass of the first measurement."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, *first], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
