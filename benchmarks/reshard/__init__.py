"""Benchmarks of resharding: plans against their lower bound, runs against plain messages of the same bytes."""
