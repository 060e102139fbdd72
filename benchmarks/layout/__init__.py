"""Experiments of the layout room: ``make bench ROOM=layout``."""
