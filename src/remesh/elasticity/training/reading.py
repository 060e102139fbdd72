"""Random state and digest of a sample stream, so that all ranks read the same.

*Chance.* Loaders draw their orders from the process's generators: torch's ``RandomSampler`` from torch's, at its first
sample, others from Python's or NumPy's. A job seeds those differently on each rank. So a stream is read with
generators that follow from a seed that all ranks have, and the program finds its own as it left them.

*Digest.* A loader may draw from a generator of its own all the same, or follow a clock, a rank, the order of a folder.
So each rank keeps a running checksum of the samples it read, and ranks compare it before they take a step. Of large
arrays it takes some elements, evenly spread; of an opaque object, its type.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

import numpy as np
import torch

from remesh.checkpoint.formats.blob_frame import memory_of
from remesh.foundation.checksums import crc32

_MAX_ELEMENTS = 256
"""Elements of one array that are looked at. Reading a batch should not cost more than making it."""
_MAX_VALUES = 1024
"""Values in one sample that are looked at; one that refers to itself has no end."""


class Chance:
    """The random state of a stream: torch's on the processor, Python's and NumPy's."""

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None
        """None: as in the process at the time."""

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """While this is open the process draws from here; afterwards it has its own state back."""
        theirs = _states()
        if self._own is not None:
            _set_states(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _set_states(theirs)

    def begin(self, seed: int) -> None:
        """Inside `in_force`: from here on all draws follow from ``seed``."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def digest_of_dataset(dataset: Any, seed: int) -> int | None:
    """A digest of the first sample of a map-style dataset, read with chance that follows from ``seed``; None if it is
    another one at each look."""
    if not len(dataset):
        return None
    seen = set()
    for _ in range(2):
        chance = Chance()
        with chance.in_force():
            chance.begin(seed)
            seen.add(digest_of(dataset[0]))
    return seen.pop() if len(seen) == 1 else None


def digest_of(sample: Any, before: int = 0) -> int:
    """A checksum of ``before`` and this sample, equal in every process that read the same. 32 bits.

    >>> digest_of({"x": [1, 2]}) == digest_of({"x": [1, 2]}) != digest_of({"x": [2, 1]})
    True
    """
    seen, pending = before, [sample]
    for _ in range(_MAX_VALUES):
        if not pending:
            break
        content, parts = _take_apart(pending.pop())
        seen = crc32(content, seen)
        pending += parts
    return seen


def _take_apart(value: Any) -> tuple[bytes, Sequence[Any]]:
    """The content of a value itself, and the values in it."""
    name = type(value).__qualname__.encode()
    if isinstance(value, str):
        return name + value.encode(errors="surrogatepass"), ()
    if isinstance(value, bytes | bytearray):
        return name + value, ()
    if value is None or isinstance(value, bool | int | float | complex | np.generic):
        return name + repr(value).encode(), ()
    if isinstance(value, torch.Tensor) and value.is_nested:
        return name, value.unbind()
    if isinstance(value, torch.Tensor):
        return _content_of_tensor(value), ()
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        return _content_of_array(np.asarray(value)), ()
    if isinstance(value, Mapping):
        return name, _spread([part for item in value.items() for part in item])
    if isinstance(value, Set):
        # Sets of text have another order in every process.
        return name + repr(sorted(map(digest_of, value))).encode(), ()
    if isinstance(value, Sequence):
        return name + str(len(value)).encode(), _spread(value)
    if hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        return name, _spread([part for item in vars(value).items() for part in item])
    return name, ()


def _content_of_tensor(tensor: torch.Tensor) -> bytes:
    head = repr((tensor.dtype, tuple(tensor.shape))).encode()
    if tensor.layout is not torch.strided or tensor.is_meta:
        return head
    some = _spread(tensor.detach().reshape(-1)).cpu().resolve_conj().resolve_neg().contiguous()
    return head + bytes(memory_of(some))


def _content_of_array(array: np.ndarray[Any, Any]) -> bytes:
    some = _spread(array.reshape(-1))
    content = repr(some.tolist()).encode() if array.dtype.hasobject else some.tobytes()
    return repr((array.dtype.str, array.shape)).encode() + content


def _spread(values: Any) -> Any:
    """Choose some of many values, evenly spread."""
    return values[:: max(1, -(-len(values) // _MAX_ELEMENTS))]


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
