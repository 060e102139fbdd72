"""What stands on a page can be run: fences name their language; what no test runs is few, and known to the parsers."""

from __future__ import annotations

import json
import re
import tomllib

import click
import pytest

from remesh.cli import main
from tests.procs.pages.blocks import LANGUAGES, ROOT, blocks_of, commands_of, indented_code_of, pages

MOST_LEFT_OUT = 26
"""Command lines that no test runs, over all pages: to be lowered when one more can be run, and never raised lightly."""

_INLINE = re.compile(r"(?<!`)`((?:remesh|make) [^`\n]+)`(?!`)")
_PLACEHOLDER = re.compile(r"[\[\]<>|…]|\.\.\.")


def test_what_is_not_run_is_few_and_is_known_to_the_parsers() -> None:
    left_out = [command for page in pages() for command in commands_of(page) if command.left_out]
    untried = [command for command in left_out if not command.is_run_with_hosts]
    assert len(untried) <= MOST_LEFT_OUT, [f"{one.place}: {' '.join(one.words)}" for one in untried]
    for command in left_out:
        check_words(command.words, command.place)


def test_commands_in_sentences_are_known_to_the_parsers() -> None:
    for page in pages():
        for text in _INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
            for command in text.split("&&"):
                check_words(tuple(_PLACEHOLDER.sub(" ", command).split()), page, whole=False)


@pytest.mark.parametrize("page", pages())
def test_every_fence_names_a_language_and_json_is_json(page: str) -> None:
    assert indented_code_of(page) == [], "code in a fence names its language; by four blanks it has none"
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r} is none of {LANGUAGES}"
        if block.language == "json":
            json.loads(block.text)


def check_words(words: tuple[str, ...], place: str, *, whole: bool = True) -> None:
    """A command that exists, with options that exist; ``whole`` if all that it needs must be there."""
    match words:
        case ("remesh", *arguments):
            _check_remesh(main, [word for word in arguments if word], place, whole)
        case ("make", *targets):
            verbs = re.findall(r"^([a-z0-9-]+(?: [a-z0-9-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            known = {verb for line in verbs for verb in line.split()}
            unknown = {target for target in targets if "=" not in target} - known
            assert not unknown, f"{place}: make has no verb {unknown}"
        case ("pip", "install", *packages):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for names in re.findall(r"(?:remesh|\.)\[([\w,]+)\]", " ".join(packages)):
                assert set(names.split(",")) <= extras.keys(), f"{place}: {names} are not extras of this package"


def _check_remesh(group: click.Group, arguments: list[str], place: str, whole: bool) -> None:
    context = click.Context(group, info_name="remesh", resilient_parsing=True)
    while isinstance(group, click.Group) and arguments and not arguments[0].startswith("-"):
        command = group.get_command(context, arguments[0])
        if command is None:
            assert not whole and group is not main, f"{place}: {context.command_path} has no verb {arguments[0]!r}"
            return
        context = click.Context(command, info_name=arguments.pop(0), parent=context, resilient_parsing=True)
        group = command
    if whole:
        group.make_parser(context).parse_args(list(arguments))
    if not context.allow_interspersed_args:  # what follows the script belongs to it
        arguments = arguments[: next((at for at, word in enumerate(arguments) if word.endswith(".py")), None)]
    known = {"-h", "--help", *(name for one in group.params for name in (*one.opts, *one.secondary_opts))}
    for word in arguments:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{place}: {context.command_path} has no option {word}"
