"""A soak: real jobs, hurt at random for long, whose samples and losses must come out as if nothing had happened."""
