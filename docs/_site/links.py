"""Links of pages: written for readers of the repository, turned into links of the site.

A link to another page stays one. A folder stands for its ``index.md`` or ``README.md``. What lies outside of the
documentation (a test, an example, a source) leads to the repository, and is plain text where none is named.
The home page is the README of the repository: what ``index.md`` has above ``<!-- README -->`` stands behind its title
and first paragraph, what it has below that stands at the end.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

_FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```[ ]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_ELSEWHERE = ("http:", "https:", "mailto:", "#")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_url", "", "env")
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True}


def _rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md":
        return
    text = _with_links(source[0], page.parent, page.parent, app)
    if docname == "index":
        readme = docs.parent / "README.md"
        app.env.note_included(readme)
        told = _with_links(readme.read_text(encoding="utf-8"), docs.parent, page.parent, app)
        title, opening, rest = told.split("\n\n", 2)
        start, _, guides = text.partition("<!-- README -->")
        text = "\n\n".join((title, opening, start, rest, guides))
    source[0] = text


def _with_links(text: str, home: Path, page_folder: Path, app: Sphinx) -> str:
    """The text with its links, which count from ``home``, as links of a page in ``page_folder``."""
    docs = Path(app.srcdir)

    def replace(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if target.startswith(_ELSEWHERE):
            return found[0]
        path, hash_mark, anchor = target.partition("#")
        there = Path(os.path.normpath(home / path))
        if there.is_dir():
            there = next((there / name for name in ("index.md", "README.md") if (there / name).exists()), there)
        if there.is_relative_to(docs) and (there.suffix in (".md", ".rst") or mark):
            return f"{mark}[{words}]({os.path.relpath(there, page_folder)}{hash_mark}{anchor})"
        if not there.exists():
            return found[0]  # to be found missing by the builder
        url = app.config.repository_url
        return f"[{words}]({url}/blob/main/{there.relative_to(docs.parent)}{hash_mark}{anchor})" if url else words

    parts = _FENCE.split(text)
    return "".join(part if number % 2 else _LINK.sub(replace, part) for number, part in enumerate(parts))
