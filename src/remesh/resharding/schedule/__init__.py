"""Schedules of slices: sender, way and round of each; ours, and the strategies of the paper by name."""
