"""Real MPI inside the program's process: a second program with a C library of its own, loaded beside the first."""
