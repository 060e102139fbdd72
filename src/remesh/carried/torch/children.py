"""Fork handler of a program: children keep the numbers of Remesh's descriptors, without their connections.

A forked child has copies of all connections of its parent. It does not need those of process groups, and no image can
be taken of it while it holds them. The numbers stay in use, so that code of the child that closes them closes nothing
else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable


def keep_from_children(find_ours: Callable[[], Iterable[int]]) -> None:
    """Look at each fork of this process; ``find_ours`` returns the descriptors that no child may have."""
    found: list[int] = []

    def look() -> None:
        found[:] = find_ours()

    def blind() -> None:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in found:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    os.register_at_fork(before=look, after_in_parent=found.clear, after_in_child=blind)
