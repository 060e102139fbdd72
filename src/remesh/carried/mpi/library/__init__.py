"""MPI for one program, in C: the upper half of every rank, in the three faces that programs are compiled against."""
