"""Values of an elastic job: generations, seats, meshes, outcomes. Pure."""
