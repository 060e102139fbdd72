"""One rank of a job on its host, whatever its program speaks: its room in memory, what it prints, its image."""
