"""The version of this package: the build, `remesh.__version__` and ``remesh --version`` read it here."""

__version__ = "0.1.0"
