"""Unmodified programs of MPI and torch, carried from one network and placement to another."""
