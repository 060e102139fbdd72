"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("remesh")
except PackageNotFoundError:
    __version__ = "0.0.0+source"
