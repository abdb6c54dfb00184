"""Mathematics as MathML, written while the site is built: no script, no fonts, no network."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

BAR = re.compile(r'<mo(?: class="math(?:open|close)")?>([|‖])</mo>')
"""The bars of a norm, which would grow with all of the line on the left, and with nothing on the right."""


def _converted(node: nodes.Element, *, block: bool) -> str:
    """MathML of a formula; one that docutils cannot read is a warning with its place."""
    try:
        formula = str(tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        logger.warning("%s: %s", node.astext(), error, location=node)
        return ""
    return BAR.sub(r'<mo stretchy="false">\1</mo>', formula)


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_converted(node, block=False))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math-block">{_converted(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Offer the renderer `mathml`."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
