"""What stands for a function's code in the name of its results."""

import ast

from featlearn.sweeps.function_source import statement_text

SNIPPET = '''
def half(x: float, *, of: int = 2) -> float:
    """Not part of it."""
    return x / of  # nor this
'''


def test_the_text_has_no_fields_that_versions_of_python_differ_in():
    assert statement_text(ast.parse(SNIPPET)) == (
        "Module(body=[FunctionDef(name='half', args=arguments(args=[arg(arg='x', annotation=Name(id='float', "
        "ctx=Load()))], kwonlyargs=[arg(arg='of', annotation=Name(id='int', ctx=Load()))], kw_defaults=["
        "Constant(value=2)]), body=[Return(value=BinOp(left=Name(id='x', ctx=Load()), op=Div(), right=Name(id='of', "
        "ctx=Load())))], returns=Name(id='float', ctx=Load()))])"
    )
