"""Checkpoint engine, and its plain interface: ``remesh.save`` and ``remesh.load`` (module ``plain``)."""
