"""Model of a reshard: moves and their unit tasks, links, and the bound that no schedule can beat."""
