"""The engine of every checkpoint, and the plain face of it: ``remesh.save`` and ``remesh.load`` (module ``plain``)."""
