"""Worker's side of an elastic job: it meets, trains, leaves and meets again, with its state and samples."""
