"""What can be asked over the channel: one table that both halves read."""
