"""How can ``remesh.reshard`` be a function and a package? Packages that can be called.

The verbs that users know, ``remesh.reshard(...)`` and ``remesh.elastic(...)``, are also the names of the
rooms that hold their code. The import system binds a room to its name as soon as anything inside it is
imported, so the name must mean both: the room's module gets a class with ``__call__``, which hands the
call to one function of the room. That function's module is imported at the first call, so that a pure
module of the room can be used without torch.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from remesh.first_use import import_home


def make_callable(package: str, home: str) -> None:
    """Let a package be called: the call goes to the function of the same name in the module ``home``.

    Written in the package's ``__init__``: ``make_callable(__name__, "remesh.reshard.api")``.
    """
    verb = package.rpartition(".")[2]

    class CallablePackage(ModuleType):
        @property
        def __signature__(self) -> inspect.Signature:
            """The signature of the function, for `inspect` and tools that use it."""
            return inspect.signature(getattr(import_home(home, f"looking at {package}"), verb))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_home(home, f"calling {package}"), verb)(*args, **kwargs)

    sys.modules[package].__class__ = CallablePackage
