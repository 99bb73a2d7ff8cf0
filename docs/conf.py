"""Sphinx settings of the documentation site: `make docs` builds these pages and the API reference into build/docs.

Pages are plain Markdown that a code host renders, too. A relative link to a file outside docs/ becomes a download.
"""

import re
from pathlib import Path

import sparse_rl

DOCS = Path(__file__).parent

project = "sparse-rl"
version = release = sparse_rl.__version__
html_title = f"sparse-rl {release}"
html_theme = "furo"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # headings are linked to by the names that code hosts give them
default_role = "code"  # docstrings write `name`, as Markdown does

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|transformers|numpy|pydantic|collections|pathlib)\..*|np\..*|Tensor|PreTrained\w+"),
    ("py:class", r"sparse_rl\.(config|kv|models)\..*"),
]
"""Types of other packages: their own sites are not read, so that a build needs no network. The sections of the configuration,
which config.md describes, and the storage of a cache and expert choices, which users only pass on."""


def link_outside(app, name, source) -> None:
    """Rewrite links that leave docs/ for what MyST does not do itself: Markdown files are downloads, folders bare text."""

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2].partition("#")[0]
        if (DOCS / target).is_dir():
            return text
        return f"[{text}](path:{target})" if target.endswith(".md") else found[0]

    source[0] = re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", link, source[0])


def describe_options(app, what, name, thing, options, lines) -> None:
    """List the options of a settings class with the sentences of the schema."""
    for field_name, field in getattr(thing, "model_fields", {}).items():
        described = field.description or f"Options of the section `{field_name}`."
        lines += ["", f":param {field_name}: {described.replace('|', chr(92) + '|')}"]


def setup(app) -> None:
    app.connect("source-read", link_outside)
    app.connect("autodoc-process-docstring", describe_options)
