"""Code blocks and command lines of README and docs, taken from the pages and run."""
