"""Table of which page lies below which (``site_trees`` of conf.py), and of pages in no menu (``site_unlisted``)."""

from __future__ import annotations

import inspect

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("site_trees", {}, "env")
    app.add_config_value("site_unlisted", (), "env")
    app.connect("source-read", _add_tree)
    return {"parallel_read_safe": True}


def _add_tree(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname.startswith(tuple(app.config.site_unlisted)):
        source[0] = f"---\norphan: true\nnosearch: true\n---\n{source[0]}"
    if pages := app.config.site_trees.get(docname):
        source[0] += f"\n```{{toctree}}\n:hidden:\n:titlesonly:\n\n{inspect.cleandoc(pages)}\n```\n"
