"""How does a package offer a name without loading what stands behind it? By importing its home at the first use.

So ``import remesh`` and ``remesh --help`` load no torch, and programs that need none run without it. A home whose
packages come with an extra that is not installed is told by the name of the extra.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from remesh.errors import ConfigError

_EXTRAS = {
    "fsspec": "torch",
    "s3fs": "s3",
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


def attribute_at_home(package: str, homes: Mapping[str, str], name: str) -> Any:
    """What a package's ``__getattr__`` answers: the name from its home, a module; AttributeError for an unknown one.

    The package has the name from then on, and is not asked again.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = getattr(import_home(homes[name], f"using {package}.{name}"), name)
    setattr(sys.modules[package], name, found)
    return found
