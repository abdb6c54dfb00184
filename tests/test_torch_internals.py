"""Private names of torch: all of them in `featlearn.torch_internals`, and each does what the library asks of it."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

import featlearn
import featlearn.torch_internals as internals
from featlearn.torch_internals import sharding

ROOT = Path(featlearn.__file__).parent
NODE = torch.ones(1, requires_grad=True).exp().grad_fn
PRIVATE = {
    name
    for owner in (torch, torch._C, torch.autograd.Variable, Tensor, nn.Module(), NODE, torch.optim.SGD([torch.ones(1)]))
    for name in dir(owner)
    if re.match(r"_[a-zA-Z]", name)
}
"""Names with one underscore that objects of torch have."""


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c`, and nothing for what is not a chain of names."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> list[str]:
    """Return what a file uses of torch's private names, with the line."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            is_own = ast.unparse(node.value) in ("self", "cls") or node.attr in own - {"_version"}
            names = [] if is_own else [f"torch.{node.attr}" if node.attr in PRIVATE else _dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            names = [f"torch.{text}"] if text in PRIVATE - own or re.match(r"_saved_|_global_\w*hooks", text) else []
        else:
            continue
        found += [f"{node.lineno}: {name}" for name in names if re.match(r"torch\b.*\._[a-zA-Z]", name)]
        if isinstance(node, ast.Attribute) and (node.attr.startswith("_saved_") or node.attr == "next_id"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_other_module_uses_them():
    files = [file for file in sorted(ROOT.rglob("*.py")) if file.parent.name != "torch_internals"]
    assert len(files) > 100
    used = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in private_names(file.read_text())]
    assert not used, "\n".join(used)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._vmapmode_increment_nesting()",
        "import torch\ntorch._foreach_norm([])",
        "from torch._subclasses import FakeTensor",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._dynamo",
        "def f(part):\n    return part._parameters",
        "def f(p):\n    return p._version",
        "def f(node):\n    return node._saved_other",
        "def f(node, name):\n    return getattr(node, f'_saved_{name}')",
        "def f(part):\n    return part.__dict__['_buffers']",
        "from torch.utils.hooks import RemovableHandle\nRemovableHandle.next_id",
    ],
)
def test_a_private_name_is_caught(source: str):
    assert private_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.relu",
        "class A:\n    def __init__(self):\n        self._parameters = {}",
        "from featlearn.graph.graph import _VIEWS",
        "def f(a):\n    return a.__dict__",
    ],
)
def test_public_names_and_own_ones_pass(source: str):
    assert not private_names(source)


def test_version_counts_writes():
    tensor = torch.ones(3)
    before = internals.version(tensor)
    tensor.add_(1)
    assert internals.version(tensor) == before + 1
    with torch.inference_mode():
        assert internals.version(torch.ones(3)) == 0


def test_functions_on_lists_do_what_those_on_tensors_do():
    torch.manual_seed(0)
    a, b, c = ([torch.rand(3) + 1, torch.rand(2, 2) + 1] for _ in range(3))
    expected = [x - 0.5 * y / z for x, y, z in zip(a, b, c, strict=True)]
    internals.add_quotients(a, b, c, -0.5)
    torch.testing.assert_close(a, expected)
    assert torch.equal(internals.flattened(a), torch.cat([t.flatten() for t in a]))
    internals.copy_each(a, b)
    assert all(map(torch.equal, a, b))
    torch.testing.assert_close(internals.norms(a, 2, torch.float64), tuple(t.double().norm() for t in a))


def test_distance_gradient_is_that_of_cdist():
    torch.manual_seed(0)
    left, right = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    distances, weights = torch.cdist(left, right, 1.5), torch.randn(4, 5)
    expected = torch.autograd.grad(distances, left, weights)[0]
    found = internals.distance_gradient(weights, left.detach(), right, 1.5, distances.detach())
    torch.testing.assert_close(found, expected)


def test_weight_norm_is_the_op_of_the_module():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    g, v = (p.detach() for p in layer.parametrizations.weight.parameters())
    torch.testing.assert_close(internals.weight_norm(v, g, 0), layer.weight.detach())


def test_functions_reach_into_containers():
    assert internals.map_nested(int, lambda n: n + 1, {"a": [1, (2, "b")]}) == {"a": [2, (3, "b")]}


def test_wrappers_have_a_form_and_no_memory():
    class Wrapper(Tensor):
        __torch_function__ = internals.NO_FUNCTION_OVERRIDES
        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: "seen")

    wrapper = internals.wrapper_of(Wrapper, torch.Size([2, 3]), dtype=torch.float64)
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.dtype) == ((2, 3), torch.float64)


def test_nodes_name_what_they_keep():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    node = (x * torch.tensor([5.0, 7.0])).grad_fn
    assert internals.saved(node, "other").tolist() == [5.0, 7.0]
    assert internals.saved(x[None].transpose(0, 1).grad_fn, "dim1") == 1
    assert internals.saved(node, "no_such_name") is None


def test_nodes_say_what_they_give():
    node = torch.ones(2, 3, requires_grad=True).exp().grad_fn
    assert internals.output_forms([node, node]) == 2 * [(((2, 3), torch.float32),)]


def test_every_hook_counts():
    x = torch.ones(1, requires_grad=True)
    for put in (
        lambda: x.register_hook(print),
        lambda: x.exp().grad_fn.register_hook(print),
        lambda: x.register_post_accumulate_grad_hook(print),
        lambda: nn.Linear(1, 1).register_forward_hook(print),
    ):
        before = internals.hooks_made()
        put()
        assert internals.hooks_made() > before
    assert len(internals.hook_tables(x)) == 2


def test_hooks_can_be_muted_and_tables_dropped():
    x, calls = torch.ones(1, requires_grad=True), []
    assert not internals.has_hook_table(x)
    x.register_hook(calls.append)
    assert internals.has_hook_table(x)
    (table,) = internals.hook_tables(x)
    hooks = dict(table)
    table.clear()
    torch.autograd.grad(x.exp(), x)
    assert not calls
    table.update(hooks)
    torch.autograd.grad(x.exp(), x)
    assert len(calls) == 1
    internals.drop_hook_table(x)
    assert not internals.has_hook_table(x)


def test_gradients_of_the_engine_are_those_of_autograd():
    torch.manual_seed(0)
    x, w, unused = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True), torch.zeros(1, requires_grad=True)
    hidden = x @ w
    outputs, cotangent = torch.tanh(hidden), torch.randn(4, 2)
    edges = [GradientEdge(hidden.grad_fn, 0), w, unused]
    found = internals.engine_gradients([outputs], edges, [cotangent], retain_graph=True)
    expected = torch.autograd.grad([outputs], edges, [cotangent], retain_graph=True, allow_unused=True)
    assert found[2] is expected[2] is None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    internals.engine_gradients([outputs], [w], [cotangent], retain_graph=False)
    with pytest.raises(RuntimeError, match="second time"):
        internals.engine_gradients([outputs], [w], [cotangent], retain_graph=False)


def test_batched_gradients_are_those_of_single_passes():
    torch.manual_seed(0)
    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    outputs, cotangents = torch.tanh(x @ w), torch.randn(5, 4, 2)
    (found,) = internals.batched_gradients([outputs], [w], [cotangents], retain_graph=True)
    assert found is not None
    expected = [torch.autograd.grad(outputs, w, row, retain_graph=True)[0] for row in cotangents]
    torch.testing.assert_close(found, torch.stack(expected))


def test_the_engine_says_when_a_backward_pass_runs_and_ends():
    x, said = torch.ones(1, requires_grad=True), []

    def hook(grad: Tensor) -> None:
        said.append(internals.in_backward())
        internals.after_backward(lambda: said.append("end"))

    y = x.exp()
    internals.before_gradient(y, lambda: hook(y))
    internals.before_gradient(y, lambda: said.append("a second one"))
    assert not internals.in_backward()
    torch.autograd.grad(y * 2, x)
    assert said == [True, "end"]


def test_tables_of_modules_are_those_that_public_functions_list():
    module = nn.BatchNorm1d(3)
    module.add_module("inner", nn.Identity())
    assert internals.parameter_table(module) == dict(module.named_parameters(recurse=False))
    assert internals.buffer_table(module) == dict(module.named_buffers(recurse=False))
    assert internals.child_table(module) == dict(module.named_children())
    for key in (internals.PARAMETERS, internals.BUFFERS, internals.CHILDREN):
        assert key in module.__dict__
    assert isinstance(module, internals.NormWithStatistics)
    assert isinstance(module, internals.AnyBatchNorm)
    assert isinstance(nn.Conv2d(1, 1, 1), internals.AnyConvolution)
    assert isinstance(nn.Dropout2d(), internals.AnyDropout)
    assert not isinstance(nn.LayerNorm(3), internals.NormWithStatistics)


def test_tables_of_hooks_are_where_hooks_go():
    module = nn.Linear(1, 1)
    before, after = internals.forward_hooks(module)
    pre = module.register_forward_pre_hook(print)
    post = module.register_forward_hook(print, always_call=True)
    assert (list(before), list(after), list(internals.hooks_always_called(module))) == ([pre.id], [post.id], [post.id])
    module.register_full_backward_hook(print)
    assert any(getattr(module, key) for key in internals.BACKWARD_HOOKS)
    assert set(internals.BACKWARD_HOOKS) <= set(internals.HOOKS)
    assert "training" in internals.RESERVED - set(internals.HOOKS)


def test_hooks_under_a_key_are_called_until_they_are_dropped():
    module, calls = nn.Linear(1, 1), []
    before = internals.hooks_made()
    internals.add_pre_forward_hook(module, "key", lambda *given: calls.append(given))
    assert internals.hooks_made() == before
    x = torch.ones(1, 1)
    module(input=x)
    assert calls == [(module, (), {"input": x})]
    internals.drop_pre_forward_hook(module, "key")
    internals.drop_pre_forward_hook(module, "key")
    module(x)
    assert len(calls) == 1


def test_global_hooks_are_seen():
    assert not any(internals.global_backward_hooks())
    handle = nn.modules.module.register_module_full_backward_hook(print)
    try:
        assert any(internals.global_backward_hooks())
    finally:
        handle.remove()


@pytest.mark.slow
def test_compiled_modules_name_what_they_were_made_from():
    model = nn.Linear(1, 1)
    compiled = torch.compile(model)
    assert internals.compiled_from(compiled) is model
    assert internals.compiled_from(model) is None
    assert {name.partition(".")[0] for name in compiled.state_dict()} == {internals.COMPILED_PREFIX}
    assert internals.compiler_loaded()


def test_modes_see_every_op_and_none_that_is_not_to_be_seen():
    class Noting(internals.DispatchMode):
        pass

    ops = []

    def dispatch(self, func, types, args=(), kwargs=None):
        ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    internals.dispatching(Noting, dispatch)
    x = torch.ones(2)
    assert not internals.is_observed()
    with Noting():
        assert internals.is_observed()
        with internals.unobserved():
            assert not internals.is_observed()
            x.exp()
        x.sin()
    assert ops == ["aten::sin"]


def test_fake_tensors_and_transforms_are_told():
    from torch._subclasses import FakeTensorMode

    assert not internals.makes_fake_tensors()
    with FakeTensorMode():
        assert internals.makes_fake_tensors()
        assert internals.is_fake(type(torch.ones(1)))
    assert not internals.is_fake(Tensor)
    said = []
    torch.func.vmap(lambda x: said.append(internals.in_transform()) or x)(torch.ones(2))
    assert said == [True]
    assert not internals.in_transform()


def test_settings_of_the_process_are_read_and_set_back():
    before = internals.product_precisions()
    assert not internals.is_autocasting()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert internals.is_autocasting()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        changed = internals.product_precisions()
        assert changed != before
        internals.ask_for_full_precision(changed)
        assert set(internals.product_precisions()) == {"ieee"}
        internals.restore_precisions(changed)
        assert internals.product_precisions() == changed
    finally:
        internals.restore_precisions(before)
    assert internals.product_precisions() == before
    enabled = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    with internals.without_fused_recurrent_layers():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == enabled


def test_types_without_a_public_name_are_those_they_are_named_for():
    from torch._higher_order_ops.while_loop import while_loop_op

    assert isinstance(while_loop_op, internals.FunctionOfFunctions)
    scripted = torch.jit.script(nn.Linear(1, 1))
    assert isinstance(scripted.forward, internals.SCRIPTED_CALLS)


def test_models_that_are_not_sharded_have_no_parts():
    assert sharding.sharded_modules(nn.Linear(1, 1)) == []
