"""Folder that the package is imported from, for the PYTHONPATH of processes that are started from it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Not resolved: another host may know the folder by its link alone.
SOURCE: Final = str(Path(__file__).absolute().parents[2])
