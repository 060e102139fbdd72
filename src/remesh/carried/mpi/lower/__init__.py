"""The lower half of a rank: a process with a real MPI, thrown away at every checkpoint that stops the job."""
