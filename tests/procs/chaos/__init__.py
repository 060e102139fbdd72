"""A soak: real jobs, hurt at random for a long time, whose samples and losses must come out as if nothing had happened."""
