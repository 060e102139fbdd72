"""What is moved, and over what: moves and their unit tasks, links, and the bound that no schedule can beat."""
