"""Names of packages that are imported at their first use.

So ``import remesh`` and ``remesh --help`` load no torch, and programs that need none run without it. A package lists
what it offers once, below ``if TYPE_CHECKING:``, where type checkers and editors read it:

    if TYPE_CHECKING:
        from remesh.testbed.testbed_spec import HostSpec as HostSpec
    else:
        __getattr__, __dir__ = names_at_first_use(__name__)

Here the list is read out of the package's source when a name is first asked for. A name whose packages come with an
extra that is not installed is a `ConfigError` that names the extra.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from remesh.foundation.errors import ConfigError

_EXTRAS = {
    "fsspec": "torch",
    "obstore": "s3",
    "safetensors": "safetensors",
    "starlette": "dashboard",
    "torch": "torch",
    "uvicorn": "dashboard",
}
"""Packages that are not always there, and the extra that brings each."""


@contextmanager
def told_by_extra(doing: str) -> Iterator[None]:
    """A package that is missing within the block is a `ConfigError` that names its extra, after what was being done."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = _EXTRAS[package]
        raise ConfigError(
            f"{doing}: the package {package!r} is not installed, expected those of the extra {extra!r}; "
            f"pip install 'remesh[{extra}]'"
        ) from missing


def import_home(name: str, doing: str, load: Callable[[str], ModuleType] = importlib.import_module) -> ModuleType:
    """The module of this name, for what is being done; `ConfigError` where an extra is missing."""
    with told_by_extra(doing):
        return load(name)


def names_at_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package. It has a name from its first use on, and is not asked again."""

    def getattr_(name: str) -> Any:
        homes = _homes_of(package)
        if name == "__all__":
            return sorted(name for name, home in homes.items() if home != package and not name.startswith("_"))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, doing = homes[name], f"using {package}.{name}"
        if home == package:  # a package in this one
            return import_home(f"{package}.{name}", doing)
        found = getattr(import_home(home, doing), name)
        setattr(sys.modules[package], name, found)
        return found

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *_homes_of(package)})

    return getattr_, dir_


@cache
def _homes_of(package: str) -> dict[str, str]:
    """The module that each name of a package comes from, as its source imports it below ``if TYPE_CHECKING:``."""
    loader: Any = sys.modules[package].__loader__
    blocks = [each for each in ast.parse(loader.get_source(package)).body if isinstance(each, ast.If)]
    imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: each.module or package for each in imports for alias in each.names}
