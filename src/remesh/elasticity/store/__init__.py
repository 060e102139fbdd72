"""What all agents share: where it is served, how it is reached, who may come in, and which store is in force."""
