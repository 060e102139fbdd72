"""MPI's error classes, as both halves number them. The numbers are ours: no MPI library's values cross the channel."""

from __future__ import annotations

from typing import Final

_TEXTS: Final = {
    "SUCCESS": "no error",
    "ERR_BUFFER": "invalid buffer pointer",
    "ERR_COUNT": "invalid count argument",
    "ERR_TYPE": "invalid datatype",
    "ERR_TAG": "invalid tag",
    "ERR_COMM": "invalid communicator",
    "ERR_RANK": "invalid rank",
    "ERR_REQUEST": "invalid request",
    "ERR_ROOT": "invalid root",
    "ERR_GROUP": "invalid group",
    "ERR_OP": "invalid reduction operation",
    "ERR_TOPOLOGY": "invalid communicator topology",
    "ERR_DIMS": "invalid topology dimension",
    "ERR_ARG": "invalid argument of some other kind",
    "ERR_UNKNOWN": "unknown error",
    "ERR_TRUNCATE": "message truncated",
    "ERR_OTHER": "known error not in list",
    "ERR_INTERN": "internal error",
    "ERR_IN_STATUS": "error code in status",
    "ERR_PENDING": "pending request",
    "ERR_KEYVAL": "invalid keyval",
    "ERR_NO_MEM": "out of memory",
    "ERR_INFO": "invalid info",
    "ERR_INFO_KEY": "invalid info key",
    "ERR_INFO_VALUE": "invalid info value",
    "ERR_INFO_NOKEY": "no such info key",
    "ERR_NAME": "invalid service name",
    "ERR_PORT": "invalid port name",
    "ERR_SERVICE": "invalid service",
    "ERR_SPAWN": "could not spawn processes",
    "ERR_PROC_ABORTED": "a peer process has ended",
    "ERR_VALUE_TOO_LARGE": "value too large to store",
    "ERR_SESSION": "invalid session",
    "ERR_ERRHANDLER": "invalid error handler",
    "ERR_UNSUPPORTED_OPERATION": "operation not supported",
    "ERR_UNSUPPORTED_DATAREP": "data representation not supported",
    "ERR_NOT_SAME": "arguments differ over the processes",
    "ERR_CONVERSION": "error in data conversion",
    "ERR_DUP_DATAREP": "data representation defined twice",
    "ERR_BASE": "invalid base address",
    "ERR_SIZE": "invalid size",
    "ERR_DISP": "invalid displacement",
    "ERR_ASSERT": "invalid assertion",
    "ERR_LOCKTYPE": "invalid lock type",
    "ERR_RMA_CONFLICT": "conflicting accesses to a window",
    "ERR_RMA_SYNC": "wrong synchronization of accesses to a window",
    "ERR_RMA_RANGE": "memory is not part of the window",
    "ERR_RMA_ATTACH": "memory cannot be attached",
    "ERR_RMA_SHARED": "memory cannot be shared",
    "ERR_RMA_FLAVOR": "window of the wrong flavor",
    "ERR_WIN": "invalid window",
    "ERR_FILE": "invalid file",
    "ERR_AMODE": "invalid access mode",
    "ERR_UNSUPPORTED": "not supported",
    "ERR_FILE_EXISTS": "file exists",
    "ERR_FILE_IN_USE": "file is in use",
    "ERR_NO_SUCH_FILE": "no such file",
    "ERR_ACCESS": "permission denied",
    "ERR_BAD_FILE": "invalid file name",
    "ERR_NO_SPACE": "not enough space",
    "ERR_QUOTA": "quota exceeded",
    "ERR_READ_ONLY": "file or file system is read-only",
    "ERR_IO": "other I/O error",
    "ERR_ABI": "incompatible ABI",
}

CLASSES: Final = {name: number for number, name in enumerate(_TEXTS)}
"""Name -> number."""
TEXTS: Final = tuple(_TEXTS.values())
"""Number -> what it means."""
LASTCODE: Final = 16383
"""Numbers above the classes and up to this one are free for the program."""
