"""Benchmarks of pipelines: schedules simulated, and run over shaped links, against their signal bound."""
