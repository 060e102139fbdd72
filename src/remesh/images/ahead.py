"""What can be known of a process before it stands still? The hashes of the files that it has mapped.

torch's libraries have half a gigabyte, and SHA-256 takes a second or more for them: longer than all pages take to be
written. Most files stay as they are. So the image that a process came from tells their hashes, and those of others are
found while the program runs, whenever there is time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Final

from remesh.errors import PeerError
from remesh.images.capture import mapped_files
from remesh.images.format import is_written
from remesh.images.identity import IDENTITIES
from remesh.images.stored import read_tree_areas
from remesh.images.tree import tree_of
from remesh.linux.procfs import read_areas

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between looks: a program loads most libraries as it starts, some later. A later look finds hashes known."""


def remember_image(folder: Path) -> None:
    """Take over the hashes that an image has, of those files that have not been changed since."""
    for each in read_tree_areas(folder):
        for path in each.files.keys() - each.written_files().keys():
            with contextlib.suppress(OSError):
                IDENTITIES.remember(path, each.files[path])


def hash_ahead(pid: int) -> None:
    """Hash what a process and its descendants have mapped, unless it is known: no image has to while they stand still.

    They may run, and end, meanwhile.
    """
    for each in tree_of(pid):
        with contextlib.suppress(OSError, PeerError):
            for area in filterfalse(is_written, read_areas(each)):
                with contextlib.suppress(OSError):  # one file that is gone says nothing of the others
                    mapped_files(each, [area], IDENTITIES, {})


def start_hashing_ahead(pid: int, pauses_s: Sequence[float] = _PAUSES_S) -> threading.Thread:
    """Run `hash_ahead` in a thread that leaves the processors to others, again after each of these pauses."""
    thread = threading.Thread(target=_hash_aside, args=(pid, pauses_s), name="remesh-hash-ahead", daemon=True)
    thread.start()
    return thread


def _hash_aside(pid: int, pauses_s: Sequence[float]) -> None:
    # Linux keeps this priority per thread. An image that comes first does not wait here: it hashes the rest itself.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        for pause_s in pauses_s:
            time.sleep(pause_s)
            hash_ahead(pid)
