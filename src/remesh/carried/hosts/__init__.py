"""Ranks and their hosts, for MPI and torch: placement, the leader's addresses, folders, outputs, images."""
