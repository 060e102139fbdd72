"""Programs carried from MPI to MPI: every pair of configurations, what it costs, what a checkpoint takes."""
