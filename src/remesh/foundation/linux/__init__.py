"""Linux interfaces that Python does not offer: system calls, facts of processes in ``/proc``, watched pages."""
