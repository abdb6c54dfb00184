"""A public name as Markdown: its signature and its docstring, members of classes included.

Docstrings are Markdown with the sections `Args:`, `Returns:` and the like. Signatures are shown without types, which
the docstrings say in words.
"""

import enum
import inspect
import re
from collections.abc import Iterator

from sphinx.pycode import ModuleAnalyzer

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes):$")
ARGUMENT = re.compile(r"^ {4}([\w*]+(?:, [\w*]+)*): ?(.*)$")
CODE = re.compile(r"(`+.*?`+)", re.DOTALL)
OBJECT = re.compile(r"<(?:function|class) '?(?:[\w.]*\.)?(\w+)'?(?: at 0x\w+)?>|<factory>")
ROLE = re.compile(r":(?:class|func):(?=`)")
TAG = re.compile(r"<(?=[\w/!?])")


def entry(name: str, value: object, words: str = "", *, constructed: bool = True) -> str:
    """Directives of the Python domain for one name.

    `words` stand in for the docstring of what has none; a class that users do not construct shows no signature.
    """
    if inspect.isclass(value):
        members = "\n".join(_member(value, *member) for member in _members(value))
        signature = _class_signature(value) if constructed else ""
        return _described("py:class", f"featlearn.{name}{signature}", f"{_body(value)}\n\n{members}", 8)
    if inspect.isroutine(value):
        return _described("py:function", f"featlearn.{name}{_signature(value)}", _body(value), 8)
    return _described("py:data", f"featlearn.{name}", words, 8)


def _described(directive: str, signature: str, body: str, fence: int) -> str:
    return f"{'`' * fence}{{{directive}}} {signature}\n\n{body}\n{'`' * fence}\n"


def _signature(function: object, *, drop_first: bool = False) -> str:
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "()"
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return OBJECT.sub(r"\1", str(inspect.Signature(plain[int(drop_first) :])))


def _class_signature(kind: type) -> str:
    return "" if issubclass(kind, enum.Enum | BaseException) else _signature(kind)


def _members(kind: type) -> Iterator[tuple[str, object, str]]:
    """Public members with a docstring, in the order of the source: name, value, docstring; those of our bases too."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("featlearn"):
            continue
        documented = ModuleAnalyzer.for_module(base.__module__)
        documented.analyze()
        attributes = {
            name: "\n".join(lines)
            for (owner, name), lines in documented.attr_docs.items()
            if owner == base.__qualname__
        }
        order = {**dict.fromkeys(attributes), **dict.fromkeys(vars(base))}
        for name in order:
            value = vars(base).get(name)
            words = attributes.get(name) or (_documentation(value) if name in vars(base) else "")
            if not name.startswith("_") and words and name not in seen:
                seen.add(name)
                yield name, value, words


def _documentation(value: object) -> str:
    if inspect.isroutine(value) or isinstance(value, classmethod | staticmethod | property) or hasattr(value, "func"):
        return inspect.getdoc(value) or ""
    return ""


def _member(kind: type, name: str, value: object, words: str) -> str:
    inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if inspect.isfunction(inner):
        signature = _signature(inner, drop_first=not isinstance(value, staticmethod))
        return _described("py:method", f"{name}{signature}", markdown(words), 6)
    return _described("py:attribute", name, markdown(words), 6)


def _body(value: object) -> str:
    own = inspect.getdoc(value) or ""
    # dataclasses without a docstring get their signature as one
    return "" if inspect.isclass(value) and own.startswith(f"{value.__name__}(") else markdown(own)


def markdown(docstring: str) -> str:
    """The docstring with its sections as lists; angle brackets mean themselves."""
    out: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).split("\n"):
        if found := SECTION.match(line):
            section = found[1]
            out += [f"**{section}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            out += ["", line]
        elif section and (argument := ARGUMENT.match(line)):
            out.append(f"- `{argument[1]}`: {argument[2]}")
        elif section:
            out.append(line[6:] if line.startswith(" " * 8) else line[4:])
        else:
            out.append(line)
    parts = CODE.split(ROLE.sub("", "\n".join(out)))
    return "".join(part if part.startswith("`") else TAG.sub("&lt;", part) for part in parts)
