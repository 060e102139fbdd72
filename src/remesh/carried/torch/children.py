"""Fork handler of a program: children keep the numbers of Remesh's descriptors, without their connections.

A forked child has copies of all connections of its parent. It does not need those of process groups, and no image can
be taken of it while it holds them. The numbers stay in use, so that code of the child that closes them closes nothing
else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable


class ForkGuard:
    """Looks at each fork of this process."""

    def __init__(self, find_ours: Callable[[], Iterable[int]]) -> None:
        """``find_ours`` returns the descriptors that no child may have."""
        self._find_ours = find_ours
        self._found: list[int] = []
        os.register_at_fork(before=self._look, after_in_parent=self._forget, after_in_child=self._blind)

    def _look(self) -> None:
        self._found = list(self._find_ours())

    def _forget(self) -> None:
        self._found = []

    def _blind(self) -> None:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in self._found:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
