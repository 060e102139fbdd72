"""What carrying programs of torch.distributed costs."""
