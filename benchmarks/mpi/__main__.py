"""All experiments of the room but the matrix (``python -m benchmarks.mpi.matrix``); ``QUICK=1`` for fewer."""

from benchmarks.mpi import costs, engine, images

if __name__ == "__main__":
    costs.main([])
    images.main()
    engine.main()
