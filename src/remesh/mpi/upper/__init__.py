"""What an unmodified program finds behind ``import mpi4py``: MPI's objects without an MPI library.

Everything that needs no other rank is done here, in the program's own process, and is part of its image. The rest is
asked of the lower half over the channel (:mod:`remesh.mpi.upper.link`).
"""
