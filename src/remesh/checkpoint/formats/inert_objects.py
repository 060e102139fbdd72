"""Stand-ins for pickled objects whose classes must not be imported.

A stand-in runs no code of the class.

Programs keep objects of their own beside their tensors: an enumeration among Megatron's arguments, say. A tool that
lists or converts a checkpoint has neither these classes nor a reason to trust them. Under ``torch.load(...,
weights_only=True)`` each class that is not known to be safe is replaced by a `StandIn`: it keeps what the pickle holds
of the object, and is written back unchanged.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

LOOK_UP = "builtins.getattr"
"""Early releases of Python 3.11, such as 3.11.2, write a member of an enumeration as a call of it."""
_EVERY = ("",)


class StandIn:
    """Stands for an object of a class of another program."""

    name: ClassVar[str] = ""
    """Of the class, with its module."""
    values: tuple[Any, ...]
    """What it was made of; for a member of an enumeration its value."""

    def __new__(cls, *values: Any) -> StandIn:
        made = object.__new__(cls)
        made.values, made._state, made._is_called = values, None, False
        return made

    def __init__(self, *values: Any) -> None:
        del values
        self._is_called = True  # pickles make other objects without it

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = type(self)
        made = (kind, self.values) if self._is_called else (copyreg.__newobj__, (kind, *self.values))  # type: ignore[attr-defined]
        return made if self._state is None else (*made, self._state)

    def __eq__(self, other: object) -> bool:
        mine = (self.name, self.values, self._state)
        return isinstance(other, StandIn) and mine == (other.name, other.values, other._state)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}({', '.join(map(repr, self.values))})>"


class _LookedUp(StandIn):
    """Stands for what a pickle looks up, by name; nothing is."""

    def __repr__(self) -> str:
        match self.values:
            case (type() as kind, str(name)) if issubclass(kind, StandIn):
                return f"<{kind.name}.{name}>"
        return super().__repr__()


def stand_ins_for(file: str | BinaryIO, names: Sequence[str] = _EVERY) -> list[Any]:
    """What `torch.serialization.safe_globals` takes so that a file's classes of these beginnings get stand-ins.

    So do members of enumerations that are looked up in them.
    """
    found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    return [(_class_of(name), name) for name in found if name.startswith((LOOK_UP, *names))]


def dump_with_stand_ins(value: Any) -> bytes:
    """What ``torch.save`` writes, stand-ins as what they stand for."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=_Pickling)
    return file.getvalue()


def find_stand_in(value: Any) -> StandIn | None:
    """One that stands somewhere in plain values; None without any."""
    if isinstance(value, StandIn):
        return value
    if isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    within = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(within, list | tuple | set | frozenset):
        return next((one for one in map(find_stand_in, within) if one is not None), None)
    return None


def without_stand_ins(value: Any) -> Any:
    """The same, without what a stand-in stands for."""
    if isinstance(value, dict):
        return {key: without_stand_ins(one) for key, one in value.items() if not isinstance(one, StandIn)}
    if isinstance(value, Namespace):
        return Namespace(**without_stand_ins(vars(value)))
    if isinstance(value, (list, tuple)):
        kept = [without_stand_ins(one) for one in value if not isinstance(one, StandIn)]
        return tuple(kept) if isinstance(value, tuple) else kept
    return value


@functools.cache
def _class_of(name: str) -> type[StandIn]:
    return type("StandIn", (_LookedUp if name == LOOK_UP else StandIn,), {"name": name})


class _Pickler(pickle._Pickler):  # the one in C has no hook for the name of a class
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, StandIn)):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, last = obj.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{last}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class _Pickling:
    """As torch asks for a module."""

    Pickler = _Pickler
    dumps = staticmethod(pickle.dumps)
