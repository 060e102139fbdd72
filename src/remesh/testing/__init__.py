"""What tests of distributed code need: a pool of ranks, oracles, Hypothesis strategies."""
