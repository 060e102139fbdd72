"""Messages between a pool of ranks and its workers: one call for each rank, and its answer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A module-level function, so named that another process can find it."""

    module: str
    qualname: str
    file: str | None = None
    """Source file of the module; used when it cannot be imported by name (a script, a lone test file)."""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionName:
        """The name of a function; a :class:`ConfigError` for one that only this process can reach."""
        module = getattr(function, "__module__", None)
        qualname = getattr(function, "__qualname__", None)
        if module is None or qualname is None or "<" in qualname:
            raise ConfigError(
                f"sending {function!r} to a pool of ranks: found a lambda, closure or instance, expected a function "
                "defined at the top of a module; move it there and pass what it closes over as args"
            )
        return cls(module, qualname, getattr(sys.modules.get(module), "__file__", None))

    def find(self) -> Callable[..., Any]:
        """The function itself, in this process."""
        found: Callable[..., Any] = reduce(getattr, self.qualname.split("."), self._module())  # type: ignore[assignment]
        return found

    def _module(self) -> ModuleType:
        if self.module != "__main__":
            try:
                return importlib.import_module(self.module)
            except ModuleNotFoundError as error:
                if self.file is None or error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                    raise
        if self.file is None:
            raise ConfigError(f"finding {self} in a rank of the pool: its module has no source file; put it in one")
        return _load_file(f"ranks_of_{Path(self.file).stem}", self.file)


def _load_file(alias: str, file: str) -> ModuleType:
    loaded = sys.modules.get(alias)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    spec = importlib.util.spec_from_file_location(alias, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module


def enter(name: FunctionName, *args: Any) -> None:
    """Body of a forked process, named as text, so that its parent imports nothing of what it runs."""
    name.find()(*args)


class RankEntry(Protocol):
    """How a process gets into the host that it is to run on, early in its life and once for all."""

    @property
    def host(self) -> str:
        """Name of the host."""

    def enter(self) -> None:
        """Move this process there; the network libraries get the name of its interface."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """One call on one rank."""

    function: FunctionName
    args: bytes
    """The pickled tuple of positional arguments; opened by the worker once its path leads to their classes."""
    rank: int
    world_size: int
    store: tuple[str, int]
    """Address and port."""
    store_prefix: str
    """Fresh for every run of the pool: keys of two runs never meet."""
    group_timeout_s: float
    sys_path: tuple[str, ...]


JOINED: Final = b"joined"
"""What a worker sends once all ranks of its call have met; its answer follows."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What came of a call."""

    result: bytes | None
    """The pickled result, or None when the call failed."""
    traceback: str
    """Empty when the call returned."""
    ended_s: float
    """Monotonic clock of this machine, comparable between its processes."""
