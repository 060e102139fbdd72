"""Values of an elastic job: generations, ranks, meshes, outcomes. Pure."""
