"""What is in a state: entities, nests of them, their descriptions and the checks on those. No files."""
