"""Who forks hosts no store: its thread may hold a lock of libc at that moment, and in the child nobody gives it back.

torch's store asks libc for the name of each client. A rank that was forked meanwhile waited for ever for libc's lock
on what it knows of names, at its first connection: one job in hundreds, on a busy machine.
"""

import re
from pathlib import Path

from tests.rules.source_tree import ROOT

_FORKS = re.compile(r"os\.fork\(\)|start_method=\"fork\"|get_context\(\"fork\"\)")
_HOSTS = re.compile(r"TCPStore\([^)]*is_master=True")


def _forks_beside_a_store(path: Path) -> bool:
    text = path.read_text()
    return bool(_FORKS.search(text) and _HOSTS.search(text))


def test_nobody_forks_beside_the_thread_of_a_store() -> None:
    folders = ("src", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    found = [str(path.relative_to(ROOT)) for path in paths if _forks_beside_a_store(path)]
    assert not found, "let the ranks meet at a FileStore, or at a store that one of them hosts once they are forked"
