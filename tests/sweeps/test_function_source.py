"""What stands for a function's code in the name of its results."""

import ast

from featlearn.sweeps.function_source import _FormerCode, _text
from featlearn_papers.frame.runs import FORMER_CODE, FORMER_NAMES

SNIPPET = '''
def half(x: float, *, of: int = 2) -> float:
    """Not part of it."""
    return x / of  # nor this
'''


def test_the_text_has_no_fields_that_versions_of_python_differ_in():
    assert _text(ast.parse(SNIPPET), {}) == (
        "Module(body=[FunctionDef(name='half', args=arguments(args=[arg(arg='x', annotation=Name(id='float', "
        "ctx=Load()))], kwonlyargs=[arg(arg='of', annotation=Name(id='int', ctx=Load()))], kw_defaults=["
        "Constant(value=2)]), body=[Return(value=BinOp(left=Name(id='x', ctx=Load()), op=Div(), right=Name(id='of', "
        "ctx=Load())))], returns=Name(id='float', ctx=Load()))])"
    )


def former(source: str) -> str:
    tree = _FormerCode(FORMER_CODE).visit(ast.parse(source))
    return _text(tree, FORMER_NAMES)


def test_data_sets_that_moved_to_the_papers_keep_their_former_names():
    assert former("from featlearn_papers.data.svhn import svhn") == former("from featlearn.data.svhn import svhn")
    moved = 'from featlearn_papers import data\ndef f(text: "data.Text"):\n    return data.shakespeare(text)'
    assert former(moved) == former('def f(text: "fl.data.Text"):\n    return fl.data.shakespeare(text)')
    assert former("from featlearn_papers import novelty") != former("")
