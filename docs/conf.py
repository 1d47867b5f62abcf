"""How Sphinx builds the site: `make docs`."""

import contextlib
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

import hvd_compress

# PyPI's PyTorch brings it along. After TensorFlow, its import is a segmentation fault.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

project = "hvd_compress"
copyright = "the hvd_compress authors"
version = release = hvd_compress.__version__

extensions = [
    "myst_nb",  # Markdown, and pages that are notebooks.
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_inline_tabs",
]
# Formulas are MathML, which browsers draw without a script and without a network.
html_math_renderer = "mathml"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["examples", "generated/*.md"]
# The tutorial is run when it has changed, in a folder of its own.
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 1800

html_theme = "furo"
html_title = "hvd_compress"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_theme_options = {"sidebar_hide_name": False}
# Code has a button to copy it, without Python's prompts; printed output, which is "text", has none.
copybutton_selector = "div[class*=highlight-]:not(.highlight-text) pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
# Attributes that a class's docstring explains are not listed a second time from its source.
napoleon_use_ivar = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# The page on the performance model shows what the model says, so both come from the same code.
sys.path.insert(0, str(Path(__file__).parent.parent))


def inline_formula(self, node):
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def formula(self, node):
    text = node.astext()
    # An environment such as align stands for itself, also without dollars around it.
    self.body.append(f'<div class="math">{convert(text, display="block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    from benchmarks.predict import figures

    figures.main(Path(app.srcdir) / "generated")
