"""Writing a tree of processes into an image."""
