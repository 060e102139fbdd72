"""The worker's side: it meets, trains, leaves and meets again; where its state and its samples come from."""
