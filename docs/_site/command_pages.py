"""``.. remesh-commands::``: every verb of the command line with its options, from the parser that runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from remesh.cli import main

_RULES = "=-~^"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("remesh-commands", _Commands)
    return {"parallel_read_safe": True}


class _Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the page follows from the code, not from its own text alone
        lines = [line for name in main.list_commands(_context(main, "remesh")) for line in _verb(name)]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, terminal_width=100)


def _verb(name: str) -> Iterator[str]:
    context = _context(main, "remesh")
    command = main.get_command(context, name)
    assert command is not None  # it is in the list of the group
    yield from _describe(command, name, context, depth=1)


def _describe(command: click.Command, name: str, parent: click.Context, depth: int) -> Iterator[str]:
    context = _context(command, name, parent)
    title = context.command_path
    yield from (f".. _{title.replace(' ', '-')}:", "", title, _RULES[depth] * len(title), "")
    yield from _literal(" ".join([title, *command.collect_usage_pieces(context)]))
    for paragraph in (command.help or "").replace("\f", "").split("\n\n"):
        if paragraph.lstrip().startswith("\b"):
            yield from _literal(textwrap.dedent(paragraph.partition("\b")[2].lstrip("\n")))
        else:
            yield from (_escape(" ".join(paragraph.split())), "")
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None  # it is in the list of the group
            yield from _describe(found, child, context, depth + 1)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [row for row in records if row and row[1] and "--help" not in row[0]]
    if not rows:
        return
    yield from (".. list-table::", "   :widths: 40 60", "   :class: options", "")
    for spelling, meaning in rows:
        yield from (f"   * - ``{spelling}``", f"     - {_escape(' '.join(meaning.split()))}")
    yield ""


def _literal(text: str) -> Iterator[str]:
    yield from (".. code-block:: text", "")
    yield from (f"   {line}" for line in text.splitlines())
    yield ""


def _escape(text: str) -> str:
    """Words for people, in which nothing is markup."""
    return "".join("\\" + letter if letter in "\\*`|_" else letter for letter in text)
