"""What runs on each node: its agent, with the worker processes, their links and the store as the agent sees them."""
