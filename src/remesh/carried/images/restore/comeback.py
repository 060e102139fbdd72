"""Return of an image, as an init does it: the image is read, the clocks are set, the processes run on.

Loaded only where there is an image: a program that begins needs none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remesh.carried.images.form.clocks import Clocks, set_clocks
from remesh.carried.images.form.image_reader import StoredTree, read_tree
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.images.restore.restore import bring_back


@dataclass(frozen=True, slots=True)
class Comeback:
    """An image that is to come back."""

    tree: StoredTree

    @classmethod
    def read(cls, folder: Path) -> Comeback:
        """Read and check the image of this folder."""
        return cls(read_tree(folder))

    def set_clocks(self) -> None:
        """Let the clocks of the new namespace go on from the image's; before the first process enters it."""
        process = self.tree.root.process
        set_clocks(Clocks(process.monotonic_ns, process.boottime_ns))

    @property
    def pid(self) -> int:
        """The process id of the program, in its own pid namespace."""
        return self.tree.root.header.pid

    def bring_back(self, policy: OpenFilePolicy | None) -> str:
        """Make the program run on, as a descendant of this process; returns a note for its user, or ""."""
        return bring_back(self.tree, policy)
