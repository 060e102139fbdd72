"""Values of a state: entities, nests of them, their descriptions and checks. No files."""
