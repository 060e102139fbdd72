"""What devices do: saves, loads, moves and refits of device memory, each beside what a user would run otherwise."""
