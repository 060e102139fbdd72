"""Pictures of plans: rounds as text and SVG, and traces for Chrome."""
