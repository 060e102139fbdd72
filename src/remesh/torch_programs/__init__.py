"""torch.distributed programs that know nothing of us: groups and a store of ours, launch, restart."""
