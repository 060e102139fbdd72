"""What does an init do for an image? Reads it, sets the clocks, and brings it back, by our engine or by CRIU.

Loaded only where there is an image: a program that begins needs none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remesh.carried.images.form.clocks import Clocks, set_clocks
from remesh.carried.images.form.format import CRIU_FILE, HEADER_FILE
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.images.form.stored import StoredTree, read_tree
from remesh.carried.images.restore.restore import bring_back


@dataclass(frozen=True, slots=True)
class Comeback:
    """An image that is to come back."""

    folder: Path
    tree: StoredTree | None  # None: CRIU took it

    @classmethod
    def read(cls, folder: Path) -> Comeback:
        """Read and check the image of this folder."""
        is_by_criu = not (folder / HEADER_FILE).exists() and (folder / CRIU_FILE).exists()
        return cls(folder, None if is_by_criu else read_tree(folder))

    def set_clocks(self) -> None:
        """Let the clocks of the new namespace go on from the image's; before the first process enters it."""
        if self.tree is None:
            from remesh.carried.images.criu import read_criu_image  # noqa: PLC0415  costs time, and is seldom needed

            set_clocks(read_criu_image(self.folder).clocks)
        else:
            process = self.tree.root.process
            set_clocks(Clocks(process.monotonic_ns, process.boottime_ns))

    @property
    def pid(self) -> int:
        """The process id of the program, in its own pid namespace."""
        if self.tree is None:
            from remesh.carried.images.criu import read_criu_image  # noqa: PLC0415  as above

            return read_criu_image(self.folder).pid
        return self.tree.root.header.pid

    def bring_back(self, policy: OpenFilePolicy) -> str:
        """Make the program run on, as a descendant of this process; returns a note for its user, or ""."""
        if self.tree is None:
            from remesh.carried.images.criu import bring_back_by_criu  # noqa: PLC0415  as above

            bring_back_by_criu(self.folder)
            return ""
        return bring_back(self.tree, policy)
