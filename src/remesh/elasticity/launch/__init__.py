"""What ``remesh run`` was asked for, and restart mode: torchrun's contract, kept by torch's own agent."""
