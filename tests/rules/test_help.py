"""What ``--help`` says of every verb and option: whole sentences, that name what they speak of."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from remesh.cli import main

_FRAGMENTS = re.compile(r"^(Of|As|For|Its?|Beside|Behind|Which|Where|When|Until)\b|^[^A-Z]")
"""How a phrase begins that only its author can complete, such as "Of each file." or "0: any."."""
_SHORTEST = 3


def verbs(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            yield from verbs(each, f"{path} {name}")


def test_every_verb_and_option_is_told_in_whole_sentences() -> None:
    wrong = []
    for path, command in verbs(main, "remesh"):
        told = [(path, command.help), (f"{path} (short)", command.get_short_help_str(1000))]
        told += [(f"{path} {one.opts[0]}", one.help) for one in command.params if isinstance(one, click.Option)]
        wrong += [f"{name}: {text!r}" for name, text in told if not text or not is_sentence(text.strip())]
    assert not wrong, "\n".join(wrong)


def is_sentence(text: str) -> bool:
    first = text.split("\n\n")[0].replace("\b\n", "")
    return first.endswith(".") and not _FRAGMENTS.match(first) and len(first.split()) >= _SHORTEST
