"""Snapshots in neighbours' memory: a second source of state, between replicas and the last checkpoint."""
