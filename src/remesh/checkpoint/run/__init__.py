"""Saves, loads and what is done to whole checkpoints, carried out."""
