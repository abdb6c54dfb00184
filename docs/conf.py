"""Sphinx builds the site from this folder: python -m sphinx -W docs docs/_build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "extensions"), str(HERE.parent / "src")]

from featlearn import __version__ as release  # noqa: E402 # from this tree, whatever is installed

project = "featlearn"
author = "The featlearn authors"
copyright = "the featlearn authors; Apache 2.0"
version = release

extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx.ext.intersphinx",
    "mathml",
    "reference",
    "generated_pages",
]
exclude_patterns = ["_build", "extensions", "inventories", "static"]

# Names that the pages mention, listed in the tree: the site is built without network.
MANUALS = {
    "matplotlib": "https://matplotlib.org/stable",
    "python": "https://docs.python.org/3",
    "scipy": "https://docs.scipy.org/doc/scipy",
    "torch": "https://docs.pytorch.org/docs/stable",
    "xarray": "https://docs.xarray.dev/en/stable",
}
intersphinx_mapping = {name: (address, f"inventories/{name}.txt") for name, address in MANUALS.items()}

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
smartquotes = False  # options begin with two hyphens
html_math_renderer = "mathml"

add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"featlearn {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
