"""MPI programs, unmodified, carried to another communication library, network and placement.

A rank is two processes: the *upper half*, the user's own, which an image carries; and the *lower half*, which holds
the communication library and is thrown away.
"""
