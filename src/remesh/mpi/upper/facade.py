"""Which names does ``mpi4py.MPI`` have, and which of our objects stand behind them?"""

from __future__ import annotations

import contextlib
from typing import Any

from remesh.mpi.upper import absent, constants, environment, memory, private_names, session
from remesh.mpi.upper import exceptions as errors
from remesh.mpi.upper.buffers import (
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    BottomType,
    BufferAutomaticType,
    InPlaceType,
)
from remesh.mpi.upper.comm import COMM_NULL, Comm, Intracomm, predefined
from remesh.mpi.upper.datatype import DATATYPE_NULL, PREDEFINED, Aint_add, Aint_diff, Datatype, Get_address
from remesh.mpi.upper.file import FILE_NULL, File
from remesh.mpi.upper.group import GROUP_EMPTY, GROUP_NULL, Group
from remesh.mpi.upper.handles import name_predefined
from remesh.mpi.upper.info import INFO_ENV, INFO_NULL, Info
from remesh.mpi.upper.intercomm import Intercomm
from remesh.mpi.upper.message import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from remesh.mpi.upper.op import OP_NULL, OPS, Op
from remesh.mpi.upper.pickles import Pickle, pickle
from remesh.mpi.upper.request import REQUEST_NULL, Grequest, Prequest, Request
from remesh.mpi.upper.status import Status
from remesh.mpi.upper.topology import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from remesh.mpi.upper.window import WIN_NULL, Win

_CLASSES = (
    *(Comm, Intracomm, Intercomm, Topocomm, Cartcomm, Graphcomm, Distgraphcomm, Group, Info, Datatype, Op, Status),
    *(Request, Prequest, Grequest, Message, Pickle, BottomType, InPlaceType, BufferAutomaticType, errors.Errhandler),
    *(Win, File, session.Session, errors.Exception),
)
_ENVIRONMENT = (
    *("Init", "Init_thread", "Query_thread", "Is_thread_main", "Is_initialized", "Finalize", "Is_finalized"),
    *("Get_version", "Get_abi_version", "Get_library_version", "get_vendor", "Get_processor_name", "Wtime", "Wtick"),
    *("Get_hw_resource_info", "Pcontrol", "Compute_dims", "Attach_buffer", "Detach_buffer", "Flush_buffer"),
    *("Iflush_buffer", "Get_abi_info", "Get_abi_fortran_info"),
)
_ERRORS = (
    *("Get_error_class", "Get_error_string", "Add_error_class", "Add_error_code", "Add_error_string"),
    *("Remove_error_class", "Remove_error_code", "Remove_error_string"),
)


def names() -> dict[str, Any]:
    """Every public name of the module. The first call asks the lower half who this process is."""
    world, own = predefined()
    table: dict[str, Any] = {cls.__name__: cls for cls in _CLASSES}
    table |= {name: getattr(environment, name) for name in _ENVIRONMENT}
    table |= {name: getattr(errors, name) for name in _ERRORS}
    table |= {name: value for name, value in vars(constants).items() if name.isupper() and isinstance(value, int)}
    table |= constants.ERRORS
    table |= PREDEFINED
    table |= OPS
    table |= absent.FUNCTIONS
    table |= {
        "BOTTOM": BOTTOM,
        "IN_PLACE": IN_PLACE,
        "BUFFER_AUTOMATIC": BUFFER_AUTOMATIC,
        "pickle": pickle,
        "COMM_NULL": COMM_NULL,
        "COMM_SELF": own,
        "COMM_WORLD": world,
        "OP_NULL": OP_NULL,
        "GROUP_EMPTY": GROUP_EMPTY,
        "GROUP_NULL": GROUP_NULL,
        "INFO_ENV": INFO_ENV,
        "INFO_NULL": INFO_NULL,
        "DATATYPE_NULL": DATATYPE_NULL,
        "REQUEST_NULL": REQUEST_NULL,
        "MESSAGE_NULL": MESSAGE_NULL,
        "MESSAGE_NO_PROC": MESSAGE_NO_PROC,
        "ERRHANDLER_NULL": errors.ERRHANDLER_NULL,
        **{name: getattr(errors, name) for name in ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL")},
        "WIN_NULL": WIN_NULL,
        "FILE_NULL": FILE_NULL,
        "SESSION_NULL": session.SESSION_NULL,
        "Aint_add": Aint_add,
        "Aint_diff": Aint_diff,
        "Get_address": Get_address,
        "buffer": memory.buffer,
        **private_names.NAMES,
        "memory": memory.buffer,
        "Alloc_mem": memory.Alloc_mem,
        "Free_mem": memory.Free_mem,
    }
    for cls in _CLASSES:
        cls.__module__ = "mpi4py.MPI"
    name_predefined(table)
    return table


def finish() -> None:
    """At the end of the program: it makes no more calls."""
    with contextlib.suppress(errors.Exception):
        environment.Finalize()
