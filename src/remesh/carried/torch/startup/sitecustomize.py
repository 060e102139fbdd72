"""Start-up module of each Python that a carried program starts or becomes, found by PYTHONPATH before the site's own.

A Python that has no Remesh begins as ever.
"""

import contextlib
import importlib
import os
import sys

sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
del sys.modules["sitecustomize"]
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("sitecustomize")
with contextlib.suppress(ModuleNotFoundError):
    from remesh.carried.torch.successors import Lineage, find_lineage, refuse_groups

    match find_lineage():
        case Lineage.PROGRAM:
            from remesh.carried.torch.program_start import CarriedProgram

            CarriedProgram().begin()
        case Lineage.CHILD:
            refuse_groups()
