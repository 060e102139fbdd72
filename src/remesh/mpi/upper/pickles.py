"""How Python objects become messages: pickle, with functions and protocol that a program may replace."""

from __future__ import annotations

import os
import pickle as _pickle
from collections.abc import Callable
from typing import Any

from remesh.mpi.upper import memory
from remesh.mpi.upper.views import byte_view


class Pickle:
    """Serializer of Python objects."""

    PROTOCOL: int | None = None
    """Version of pickle's format; None is the function's own default."""

    def __init__(
        self,
        dumps: Callable[..., bytes] = _pickle.dumps,
        loads: Callable[..., Any] = _pickle.loads,
        protocol: int | None = None,
        threshold: int = 1 << 18,
    ) -> None:
        self._dumps, self._loads = dumps, loads
        default = os.environ.get("MPI4PY_PICKLE_PROTOCOL", _pickle.HIGHEST_PROTOCOL)
        self.PROTOCOL = int(default) if protocol is None and dumps is _pickle.dumps else protocol
        self._default_threshold = int(os.environ.get("MPI4PY_PICKLE_THRESHOLD", threshold))
        self._threshold = self._default_threshold

    @property
    def THRESHOLD(self) -> int:
        """Buffers of at least so many bytes travel apart; None restores the default."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = self._default_threshold if threshold is None else threshold

    def dumps(self, obj: Any) -> bytes:
        """An object as bytes."""
        return self._dumps(obj, self.PROTOCOL) if self.PROTOCOL is not None else self._dumps(obj)

    def loads(self, data: Any) -> Any:
        """The object again."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """An object as bytes, its large buffers apart."""
        buffers: list[Any] = []

        def apart(buffer: Any) -> bool:
            view = buffer.raw()
            if view.nbytes < self.THRESHOLD:
                return True
            buffers.append(memory.buffer(view))
            return False

        protocol = max(5, self.PROTOCOL if self.PROTOCOL is not None and self.PROTOCOL >= 0 else 5)
        return self._dumps(obj, protocol, buffer_callback=apart), buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """The object again."""
        return self._loads(data, buffers=(byte_view(buffer)[0] for buffer in buffers))


pickle = Pickle()
"""What the lower-case methods use; programs change it in place."""


def loads(data: Any) -> Any:
    """The object of received bytes; an empty message is None."""
    return pickle.loads(data) if len(data) else None


def dumps(obj: Any) -> memoryview:
    """An object as bytes to send."""
    return memoryview(pickle.dumps(obj))
