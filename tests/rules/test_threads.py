"""Threads have one maker, which names them and lets them take no signal of the program, and one pool."""

from __future__ import annotations

import re

from tests.rules.source_tree import modules

_MAKERS = re.compile(r"\b(threading\.(Thread|Timer)|ThreadPool(Executor)?|start_new_thread)\(|\(threading\.Thread\)")


def test_nobody_else_makes_a_thread_or_an_executor() -> None:
    found = [
        module.name
        for module in modules()
        if module.name not in ("remesh.foundation.threads", "remesh.foundation.thread_pool")
        and _MAKERS.search(module.text)
    ]
    assert not found, (
        "make_thread and PooledExecutor of remesh.foundation.threads: else its name, its signals and a fork go wrong"
    )
