"""What Linux offers and Python does not: system calls, what ``/proc`` tells of processes, pages that are watched."""
