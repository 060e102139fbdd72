"""Recovery times of elastic jobs, and what elasticity costs."""
