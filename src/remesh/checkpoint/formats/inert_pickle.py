"""Safe reader of ``.metadata`` pickles: it runs nothing that they name.

A pickle may name any callable. This reader knows the few names that occur in real files and gives each an *inert*
stand-in, made anew for every file: an object that keeps its state and does nothing. No class of torch or of this
package is ever handed to the pickle, so a hostile one can neither call nor change it. Any other name is an error.

The stand-ins carry attributes as they are in the file; their reader checks every value.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.storage import Location

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("MetadataIndex", "StorageMeta"),
)
_RECORDS = {
    **{(f"{_DCP}.metadata", name): name for name in _OF_METADATA},
    **{(f"{_DCP}.filesystem", name): name for name in ("_StorageInfo", "_StoragePrefix")},
    **{(f"{_DCP}.planner", name): name for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    (_MEGATRON, "MCoreSavePlan"): "SavePlan",
    (_MEGATRON, "MCoreMetadata"): "Metadata",
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): "TensorProperties",
}
"""Names of records, and the kind of their stand-in: what writers from 2022 to today put into the file."""

_CODES = {
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    (f"{_DCP}.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""Names called with numbers or texts; the result is of no use here."""

_GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
"""Early releases of Python 3.11, such as 3.11.2, write a member of an enumeration as ``getattr(class, name)``."""


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 80, 80
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 3

    def repr_int(self, x: int, level: int) -> str:
        return str(x) if x.bit_length() <= 128 else f"<number of {x.bit_length()} bits>"


_BRIEF = _Brief()


def brief(value: Any) -> str:
    """A value of a stranger for a message: short and quickly made, however long, deep or often shared its parts are.

    >>> brief([1 << 100_000] * 1000)
    '[<number of 100001 bits>, <number of 100001 bits>, <number of 100001 bits>, ...]'
    """
    return _BRIEF.repr(value)


class Record:
    """State of an object in the file, as attributes; ``kind`` is the class it stands for."""

    kind = ""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and {str}.issuperset(map(type, state)):
            self.__dict__.update(state)
        else:  # records whose class packs its state: only their first element is ever used
            self.__dict__["packed"] = state


class ShapeTuple(tuple[Any, ...]):
    """Stand-in of ``torch.Size``."""


def load_inert(content: bytes, path: Location) -> Any:
    """The object in a ``.metadata`` pickle, made of stand-ins, builtin values and dtype names.

    Raises `CheckpointFormatError` with reason ``"forbidden-global"`` or ``"bad-pickle"``; runs nothing.
    """
    try:
        return _InertUnpickler(io.BytesIO(content), path).load()
    except CheckpointFormatError:
        raise
    except Exception as raised:  # a damaged pickle raises almost anything
        raise CheckpointFormatError(
            "bad-pickle",
            f"reading {path}: expected the pickled metadata of a checkpoint, found {len(content)} bytes that do not "
            f"parse ({type(raised).__name__}: {raised}); the checkpoint is damaged, use another one",
        ) from raised


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Location) -> None:
        super().__init__(file)
        self._path = path
        self._stand_ins: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if kind := _RECORDS.get((module, name)):
            return self._stand_in(kind, Record)
        if (module, name) in _CODES:
            return _Code()
        if (module, name) in _GETATTR:
            return lambda *asked: self._take_member(asked)
        if (module, name) == ("torch", "Size"):
            return self._stand_in("Size", ShapeTuple)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise self._hostile(f"names {module}.{name}")

    def _take_member(self, asked: tuple[Any, ...]) -> None:
        """See that a member of an enumeration is named; nothing is looked up."""
        match asked:
            case (_Code(), str()):
                return
        raise self._hostile(f"looks up an attribute of what is no enumeration, {brief(asked)}")

    def _hostile(self, does: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            "forbidden-global",
            f"reading {self._path}: it {does}, expected only the classes of checkpoint metadata; "
            "the file is foreign or hostile, do not trust this checkpoint",
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointFormatError(
            "forbidden-global", f"reading {self._path}: it refers to the outside object {brief(pid)}, expected none"
        )

    def _stand_in(self, kind: str, base: type) -> type:
        if kind not in self._stand_ins:
            self._stand_ins[kind] = type(kind, (base,), {"kind": kind})
        return self._stand_ins[kind]


class _Code:
    """Stand-in of a name that is called; made anew each time, for a pickle may write to it."""

    def __call__(self, *values: Any) -> None:
        pass
