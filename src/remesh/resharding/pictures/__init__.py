"""How does a plan look? Rounds as text and SVG, and traces for Chrome."""
