"""Reference pages: `{public}` documents names of featlearn, and the build fails for one that no page has.

    ```{public} ntk plan
    ```

The argument is what users write after `fl.`. Below each entry stand the pages whose code uses it; `fl.ntk` in the text
of any page becomes a link to its entry, and `torch.compile` or `nn.Module` a link to the pages of torch, by the lists
of names in `docs/inventories`.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

from docutils import nodes
from draw import blocks
from entries import entry
from public_names import public_names
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).parents[1]
NAME = re.compile(r"(?:fl|featlearn)\.([\w.]+)(?:\(.*\))?")
logger = logging.getLogger(__name__)


class Public(SphinxDirective):
    """Signatures and docstrings of public names, and where they are used."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Each name in turn; the content describes what cannot have a docstring."""
        found: list[nodes.Node] = []
        for name in self.arguments[0].split():
            text = entry(name, self._named(name), "\n".join(self.content), constructed=name in public_names())
            pages = [f"{{doc}}`/{page}`" for page in users(name) if page != self.env.docname]
            text += f"\n{{.used-in}}\nUsed in {', '.join(pages)}.\n" if pages else ""
            found += self.parse_text_to_nodes(text)
        return found

    def _named(self, name: str) -> object:
        """A public name, or a class that a public function returns, by its module."""
        module, _, last = f"featlearn.{name}".rpartition(".")
        try:
            return public_names().get(name) or getattr(import_module(module), last)
        except (ImportError, AttributeError) as error:
            raise self.error(f"featlearn has no {name}") from error


@cache
def code() -> dict[str, str]:
    """The Python blocks of every page but those of the reference, by the name of the page."""
    pages = [page.relative_to(DOCS).with_suffix("") for page in sorted(DOCS.rglob("*.md"))]
    shown = [page for page in pages if page.parts[0] not in ("_build", "reference")]
    texts = {str(page): (DOCS / f"{page}.md").read_text() for page in shown}
    return {page: "".join(block.code for block in blocks(text)) for page, text in texts.items()}


def users(name: str) -> list[str]:
    """The pages whose code has `fl.ntk`, `metrics.alignment` or, for `theory.ofe.solve`, `ofe.solve`."""
    last = ".".join(f"fl.{name}".split(".")[-2:])
    return [page for page, text in code().items() if re.search(rf"\b{re.escape(last)}\b", text)]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that no page documents; under -W the build fails."""
    for name in public_names():
        if f"featlearn.{name}" not in env.domains.python_domain.objects:
            logger.warning("the public name fl.%s is on no page of docs/reference: add it to a {public} block", name)


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn `fl.ntk`, `fl.ntk(model, x)` and names of other libraries in the text into links."""
    objects, others = app.env.domains.python_domain.objects, elsewhere(app.env)
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference):
            continue
        found = NAME.fullmatch(literal.astext())
        target = objects.get(f"featlearn.{found[1]}") if found else None
        name = re.sub(r"^nn\.", "torch.nn.", literal.astext().removesuffix("()"))
        if target is not None:
            link = make_refnode(app.builder, docname, target.docname, target.node_id, literal.deepcopy())
            literal.replace_self(link)
        elif name in others:
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=others[name], internal=False))


def elsewhere(env: BuildEnvironment) -> dict[str, str]:
    """Addresses of names of other libraries, from the inventories that intersphinx has read."""
    inventories = getattr(env, "intersphinx_inventory", {})
    return {
        name: item.uri for kind, items in inventories.items() if kind.startswith("py:") for name, item in items.items()
    }


def setup(app: Sphinx) -> dict[str, bool]:
    """Offer the directive, check that nothing is missing, and link names."""
    app.add_directive("public", Public)
    app.connect("env-check-consistency", check)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
