"""Shared store of all agents: where it is served, how it is reached, who is admitted, and which store is active."""
