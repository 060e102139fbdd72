"""``mermaid`` fences of the site, as tables: nothing is fetched, and nothing is drawn by a script.

A diagram of states has a line ``one --> other: when`` for each way between two states, ``[*]`` being before and after
all; the table has a row for each.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_WAY = re.compile(r"\s*(\S+) --> (\S+?)(?:: (.*))?")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mermaid", _States)
    return {"parallel_read_safe": True}


class _States(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        kind, *lines = self.content
        ways = [found for found in map(_WAY.fullmatch, lines) if found]
        if kind != "stateDiagram-v2" or len(ways) != len(lines):
            raise self.error("a mermaid fence is a stateDiagram-v2 of lines 'one --> other: when'")
        rows = [f"| {way[1]} | {way[2]} | {way[3] or ''} |" for way in ways]
        table = ["| state | next | when |", "|---|---|---|", *rows]
        return self.parse_text_to_nodes("\n".join(table))
