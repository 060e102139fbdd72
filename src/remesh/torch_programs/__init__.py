"""Unmodified torch.distributed programs: process groups and a store of ours, launch, restart."""
