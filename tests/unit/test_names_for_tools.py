"""What is documented is seen by tools: `inspect.signature`, and a type checker that reads a user's script."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import remesh

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("dist_checkpointing", "elasticity", "foundation", "layout", "pipeline", "resharding", "testbed")
_VERBS = ("elastic", "reshard")
# They import the host that they plug into: tests/hosts has them.
_HOSTS = ("accelerate", "lightning", "torchtitan", "transformers", "verl", "verl_shards", "vllm")
_OF_HOSTS = tuple(f"remesh.integrations.{host}" for host in _HOSTS)
_DOTTED = re.compile(r"(?<![\w./])remesh\.([a-z_]+|[A-Z]\w+)(?:\.(\w+))?(?=[(\[\s`,.:;)]|$)", re.MULTILINE)
_IMPORTED = re.compile(r"^from (remesh[\w.]*) import ([\w, ]+|\([\w,\s]+\))", re.MULTILINE)


def _documents() -> Iterator[Path]:
    yield _ROOT / "README.md"
    yield from (path for path in (_ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
    yield from (_ROOT / "examples").rglob("*.py")


def _public() -> Iterator[tuple[str, str]]:
    """Module and name of all that a face offers."""
    yield from (("remesh", name) for name in remesh.__all__)
    for room in _ROOMS:
        module = importlib.import_module(f"remesh.{room}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
        yield from ((module.__name__, name) for name in names)


def _documented() -> set[tuple[str, str]]:
    """Module and name of all that a document or an example imports, or names with its dots."""
    found = set()
    for path in _documents():
        text = path.read_text()
        for module, names in _IMPORTED.findall(text):
            if module not in _OF_HOSTS:
                found |= {(module, name) for name in re.findall(r"\w+", names)}
        for first, second in _DOTTED.findall(text):
            if first in remesh.__all__:
                # A verb is a function to a type checker: what goes with it stands at the top.
                attribute = first in _VERBS and second and not _is_a_submodule(first, second)
                assert not attribute, f"{path} names remesh.{first}.{second}; say remesh.{second}"
                found.add(("remesh", first))
            elif second and first in _ROOMS and not _is_a_submodule(first, second):
                found.add((f"remesh.{first}", second))
    return found


def _is_a_submodule(room: str, name: str) -> bool:
    path = _ROOT / "src" / "remesh" / room / name
    return path.is_dir() or path.with_suffix(".py").is_file()


def _is_a_module(module: str, name: str) -> bool:
    return isinstance(getattr(importlib.import_module(module), name), types.ModuleType) and name not in _VERBS


def script_of_a_user() -> str:
    """A script that uses every public and documented name, as a value, and each class as a type."""
    lines = ["import remesh", ""]
    for number, (module, name) in enumerate(sorted({*_public(), *_documented()})):
        if _is_a_module(module, name):
            continue
        lines.append(f"from {module} import {name} as name_{number}")
        value: Any = getattr(importlib.import_module(module), name)
        if module == "remesh":
            lines.append(f"print(remesh.{name})")
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            lines.append(f"def takes_{number}(value: name_{number}) -> object: return value")  # type: ignore[unused-ignore]
        lines.append(f"print(name_{number})")
    return "\n".join([*lines, *_TYPED]) + "\n"


_TYPED = [
    "from concurrent.futures import Future",
    "def check(job: remesh.Job, target: remesh.Target, stream: remesh.Stream, memory: remesh.Memory) -> None:",
    "    moved: remesh.Moved = remesh.reshard({}, {}, chunk_bytes=1)",
    "    also: remesh.Moved = remesh.reshard({}, to=target)",
    "    later: remesh.Moved = remesh.reshard_async({}, {}).result()",
    "    saved: Future[remesh.checkpoint.storage.Location] = remesh.save({}, 'c', background=True)",
    "    loaded: dict[str, object] = remesh.load({}, saved.result(), strict=False)",
    "    with remesh.Checkpoints('run', keep=3) as checkpoints:",
    "        newest: int | None = checkpoints.latest()",
    "    remesh.elastic(lambda job: None, mesh=remesh.make_template({'dp': -1}, memory), save_every=10)",
    "    print(moved, also.made, later, loaded, newest, job, stream, remesh.__version__)",
]


_WRONG = (
    "remesh.reshard({}, {}, chunk_byte=1)",
    "remesh.save({}, 'c', background='yes')",
    "remesh.elastic(lambda job: None, mesh=3)",
    "remesh.Checkpoints('run', kep=3)",
    "remesh.nonsense",
    "remesh.reshard.Target",
)


def _check(script: Path) -> tuple[int, str]:
    """mypy's exit code and what it says; what it knows of torch it remembers where `make check` does."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(_ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_type_checker_sees_every_documented_name(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(script_of_a_user())
    assert script.read_text().count("print") > 150
    status, said = _check(script)
    assert status == 0, said[-4000:]


@pytest.mark.slow
def test_a_type_checker_tells_what_is_wrong(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("import remesh\n" + "".join(f"print({wrong})\n" for wrong in _WRONG))
    status, said = _check(script)
    assert status == 1
    assert {int(line) for line in re.findall(r"user.py:(\d+): error", said)} == set(range(2, len(_WRONG) + 2)), said


@pytest.mark.parametrize(("module", "name"), sorted(set(_public())), ids=lambda word: word)
def test_a_signature_is_that_of_the_name(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException | enum.Enum)):
        return
    parameters = inspect.signature(value).parameters
    hidden = [one for one in parameters.values() if one.name in ("args", "kwargs")]
    assert not hidden, f"{module}.{name}{inspect.signature(value)} hides what it takes"
