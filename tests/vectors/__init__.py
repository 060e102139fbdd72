"""Conformance vectors: what any implementation of the layout algebra must answer."""
