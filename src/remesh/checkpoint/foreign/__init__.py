"""Checkpoints of other programs: DeepSpeed, and Megatron before its distributed format."""
