"""What an agent decides: events in, instructions out, by a machine that touches nothing."""
