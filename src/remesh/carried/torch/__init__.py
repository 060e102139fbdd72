"""Unmodified torch.distributed programs: their process groups and store, their launch and restart."""
