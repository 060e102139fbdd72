"""What Python imports first in a process that is being preloaded: this folder is on its path for that moment alone.

See :mod:`remesh.elasticity.node.preloaded`. In a forked worker Python goes on here as if this module had never been: a
``sitecustomize`` of the user is imported in its place, or found missing.
"""

import sys

# Python loads these before it puts the folder of the script in front of its path, whoever starts it.
_LOADED_BY_PYTHON = frozenset(sys.modules)

import os  # noqa: E402

if "REMESH_PRELOAD" in os.environ:  # else nobody preloads: a tool looks at the modules of a package
    try:
        from remesh.elasticity.node.preloaded import serve

        serve(os.path.dirname(__file__), _LOADED_BY_PYTHON)
    except BaseException as error:
        # Never on to the script: nobody has asked for a worker yet.
        sys.stderr.write(f"remesh: the preloaded process failed: {type(error).__name__}: {error}\n")
        os._exit(os.EX_SOFTWARE)

    del sys.modules[__name__]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
