"""All names of mpi4py.MPI, from the modules that hold them."""

from __future__ import annotations

import atexit

from remesh.mpi.upper import facade

globals().update(facade.names())
atexit.register(facade.finish)
del annotations, atexit, facade
