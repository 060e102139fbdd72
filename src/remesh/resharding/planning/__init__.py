"""From moves to a plan that has checked itself, and to what each rank does for it; pure, the same on every rank."""
