"""What ranks and processes say to each other: gathers, agreement, messages; groups that are shed and grown again."""
