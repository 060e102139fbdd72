"""Launch of ``remesh run``: its request, and restart mode, torchrun's contract kept by torch's own agent."""
