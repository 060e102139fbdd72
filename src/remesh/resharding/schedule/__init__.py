"""Who sends which slice, by which way, and in which round: ours, and the strategies of the paper by name."""
