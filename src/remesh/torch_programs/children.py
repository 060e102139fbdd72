"""What of ours does a child of the program inherit? The numbers of our descriptors, and nothing behind them.

A forked child has copies of all connections of its parent. It has no use for those of groups, and as long as it holds
them no image could be taken of it. The numbers stay in use: what closes them in the child must not close others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable


class ForkGuard:
    """Looks at each fork of this process."""

    def __init__(self, find_ours: Callable[[], Iterable[int]]) -> None:
        """``find_ours`` tells descriptors that no child is to have."""
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
