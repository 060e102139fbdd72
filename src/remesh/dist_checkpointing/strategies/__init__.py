"""Strategies under the names that users of Megatron Core know; the formats are `remesh.checkpoint.formats`."""
