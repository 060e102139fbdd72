"""Linear systems, eigenvalues and star forests of PETSc and SLEPc: `solvers.py STEPS`."""

import hashlib
import sys

import numpy as np
from mpi4py import MPI
from petsc4py import PETSc
from slepc4py import SLEPc

SIDE = 12
_STAR_FORESTS = [
    ("basic", ""),
    ("neighbor", ""),
    *(("window", synchronization) for synchronization in ("fence", "lock", "active")),
]


def make_matrix():
    number = SIDE**3
    matrix = PETSc.Mat().createAIJ((number, number), nnz=7)
    for row in range(*matrix.getOwnershipRange()):
        matrix[row, row] = 6.5
        for stride in (1, SIDE, SIDE**2):
            if row + stride < number:
                matrix[row, row + stride] = -1.0
            if row >= stride:
                matrix[row, row - stride] = -1.1
    matrix.assemble()
    return matrix


def make_forests(comm):
    """Leaves of each rank are the roots of the next one, in reverse."""
    rank, size = comm.rank, comm.size
    for kind, synchronization in _STAR_FORESTS:
        forest = PETSc.SF().create()
        if synchronization:
            PETSc.Options()["sf_window_sync"] = synchronization
        forest.setType(kind)
        forest.setFromOptions()
        remote = [((rank + 1 + leaf % (size - 1 or 1)) % size, 99 - leaf) for leaf in range(100)]
        forest.setGraph(100, None, np.array(remote, dtype="i").ravel())
        forest.setUp()
        yield forest


def main():
    steps = int(sys.argv[1])
    comm = MPI.COMM_WORLD
    seen = hashlib.sha256()
    matrix = make_matrix()
    solution, right = matrix.createVecs()
    right.setArray(np.sin(np.arange(*right.getOwnershipRange())))
    solver = PETSc.KSP().create()
    solver.setOperators(matrix)
    solver.setFromOptions()
    forests = list(make_forests(comm))
    for step in range(steps):
        solver.solve(right, solution)
        seen.update(solution.getArray().tobytes())
        right.axpy(0.25, solution)
        for forest in forests:
            roots = np.arange(100, dtype="d") * (comm.rank + 1) + step
            leaves = np.zeros(100)
            forest.bcastBegin(MPI.DOUBLE, roots, leaves, MPI.REPLACE)
            forest.bcastEnd(MPI.DOUBLE, roots, leaves, MPI.REPLACE)
            forest.reduceBegin(MPI.DOUBLE, leaves, roots, MPI.SUM)
            forest.reduceEnd(MPI.DOUBLE, leaves, roots, MPI.SUM)
            seen.update(leaves.tobytes() + roots.tobytes())
        if step % 10 == 0:
            spectrum = SLEPc.EPS().create()
            spectrum.setOperators(matrix)
            spectrum.setProblemType(SLEPc.EPS.ProblemType.NHEP)
            spectrum.setDimensions(2)
            spectrum.solve()
            seen.update(repr([spectrum.getEigenvalue(i) for i in range(2)]).encode())
            spectrum.destroy()
    digests = comm.gather(seen.hexdigest())
    if comm.rank == 0:
        print("answer", *digests, solver.getIterationNumber(), repr(right.array[0]), flush=True)


main()
