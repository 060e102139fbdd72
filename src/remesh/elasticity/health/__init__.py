"""Health of ranks: hangs with their culprits, and stragglers."""
