"""Start, end, time and versions."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from remesh.mpi.calls.table import BY_NAME
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.basic_types import BASIC
from remesh.mpi.upper.buffers import BUFFER_AUTOMATIC
from remesh.mpi.upper.info import Info
from remesh.mpi.upper.link import link
from remesh.mpi.upper.memory import attached
from remesh.mpi.upper.point_to_point import wait_for_buffered
from remesh.mpi.upper.request import Request, Work
from remesh.mpi.upper.topologies import balanced_dims

_finalized = False
abort_status = 0
"""Other than 0: the job is ended with this status when the program ends."""


def description() -> dict[str, Any]:
    """What the lower half says about its MPI library and host; asked anew, since a restart changes it."""
    answer: dict[str, Any] = json.loads(link().describe())
    return answer


def Init() -> None:
    """The program runs in an initialised MPI from its import on."""


def Init_thread(required: int = k.THREAD_MULTIPLE) -> int:
    """All threads may call."""
    return k.THREAD_MULTIPLE


def Query_thread() -> int:
    """All threads may call."""
    return k.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Whether this is the thread that imported MPI."""
    return threading.current_thread() is threading.main_thread()


def Is_initialized() -> bool:
    """Always."""
    return True


def Finalize() -> None:
    """The program makes no more MPI calls."""
    global _finalized
    if not _finalized:
        _finalized = True
        if abort_status:
            link().ask(BY_NAME["abort"], (abort_status,))
        link().ask(BY_NAME["finish"], ())


def Is_finalized() -> bool:
    """Whether Finalize was called."""
    return _finalized


def Get_version() -> tuple[int, int]:
    """The version of the standard that this module speaks."""
    return k.VERSION, k.SUBVERSION


def Get_abi_version() -> tuple[int, int]:
    """There is no binary interface."""
    return -1, -1


def _sizes(*names: str) -> dict[str, str]:
    return {f"mpi_{name.lower()}_size": str(BASIC[name].size) for name in names}


def Get_abi_info() -> Info:
    """Sizes of integers that hold addresses. There is no binary interface otherwise. Source: MPI 5.0, chapter 20."""
    return Info.Create(_sizes("AINT", "COUNT", "OFFSET"))


def Get_abi_fortran_info() -> Info:
    """Sizes of Fortran's types, and which of those named by their size there are."""
    stems = ("LOGICAL", "INTEGER", "REAL", "COMPLEX")
    sized = [name for name in BASIC if name.startswith(stems) and name[-1].isdigit()]
    supported = {f"mpi_{name.lower()}_supported": "true" for name in (*sized, "DOUBLE_COMPLEX")}
    return Info.Create(_sizes("LOGICAL", "INTEGER", "REAL", "DOUBLE_PRECISION") | supported)


def Get_library_version() -> str:
    """The MPI library in use now; another one after a restart with another one."""
    return str(description()["library_version"])


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """The MPI library in use now."""
    name, version = description()["vendor"]
    return name, tuple(version)


def Get_processor_name() -> str:
    """The host in use now; another one after a restart elsewhere."""
    return str(description()["processor_name"])


def Get_hw_resource_info() -> Any:
    """Nothing is known."""
    return Info.Create()


def Wtime() -> float:
    """Seconds. A restart moves it by as much as the machine's clock, never back."""
    return time.perf_counter()


def Wtick() -> float:
    """Resolution of :func:`Wtime`, seconds."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """No profiler."""


def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """A balanced grid of so many ranks."""
    return balanced_dims(nnodes, [0] * dims if isinstance(dims, int) else list(dims))


def Attach_buffer(buf: Any) -> None:
    """Buffered sends need no buffer of the program's."""
    _attached.append(attached(buf))


def Detach_buffer() -> Any:
    """Wait for all buffered sends."""
    Flush_buffer()
    return _attached.pop() if _attached else BUFFER_AUTOMATIC


def Flush_buffer() -> None:
    """Wait for all buffered sends."""
    wait_for_buffered()


def Iflush_buffer() -> Request:
    """The same, under way."""
    Flush_buffer()
    return Request._wrap(Work([]))


_attached: list[Any] = []
