"""A stage for programs that are written to images and brought back: set up, take the image, kill, restore, check.

Every program sets something up, makes the file ``ready``, waits for the file ``go``, and tells what it finds then.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from remesh.carried.images import (
    INNER_PID,
    Command,
    OpenFilePolicy,
    Site,
    Upper,
    check_written,
    cut_written,
    dump_image,
    freeze,
    restore_upper,
    start_upper,
)
from remesh.carried.images.form.image_reader import read_tree
from remesh.carried.images.form.written_files import find_written
from remesh.foundation.errors import FormatError
from tests.profiles import so_many

PATIENCE_S = 200.0
CHANNEL_BYTES = 16384
WAIT_FOR_GO = """
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.005)
"""


def wait_for(what: Callable[[], bool], doing: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, doing
        time.sleep(0.005)


def damages(path: Path, chance: random.Random) -> Iterator[str]:
    """A file is half as long, has another bit, is missing: by default one of them; it is whole again after the last."""
    whole = path.read_bytes()
    at = chance.randrange(len(whole))
    for how in chance.sample(["half", "flipped", "missing"], so_many(3, quick=1)):
        match how:
            case "half":
                path.write_bytes(whole[: len(whole) // 2])
            case "flipped":
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            case "missing":
                path.unlink()
        yield how
    path.write_bytes(whole)


def _cut_files(image: Path, policy: OpenFilePolicy) -> None:
    """Check and cut what the program of an image writes to, as ranks do by their manifest."""
    with contextlib.suppress(FormatError):  # which a restore raises, too
        tree = read_tree(image)
        mapped = {path: content for member in tree.members for path, content in member.areas.written_files().items()}
        written = find_written(tree.state.files, mapped)
        check_written(written, policy, f"restoring {image}")
        cut_written(written, policy)


class Stage:
    """A folder with a program in it, and the upper halves that ran it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self._num_sites = 0
        self._uppers: list[Upper] = []
        self.arena_bytes = 0  # of sites made from now on; 0: they have none
        self.site: Site

    def new_site(self) -> Site:
        self._num_sites += 1
        paths = [self.folder / f"{name}{self._num_sites}" for name in ("channel", "out", "err")]
        for path in paths:
            path.write_bytes(b"")
        # Of a restore it is the image's, whatever stood there.
        paths[0].write_bytes(bytes([0xFF if self._uppers else 0]) * CHANNEL_BYTES)
        if self.arena_bytes:
            paths.append(self.folder / f"arena{self._num_sites}")
            paths[-1].touch()
            os.truncate(paths[-1], self.arena_bytes)
        self.site = Site(*map(str, paths))
        return self.site

    def start(self, program: str, *, pid: int = INNER_PID) -> Upper:
        """Run the program until it is ready."""
        text = "import os, sys, time, threading\n" + textwrap.dedent(program)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
        command = Command((sys.executable, "-c", text), environment, str(self.work), pid=pid)
        upper = start_upper(command, self.new_site())
        self._uppers.append(upper)
        wait_for(lambda: (self.work / "ready").exists() or upper.poll() is not None, "the program is not ready")
        assert (self.work / "ready").exists(), self.errors()
        return upper

    def restore(self, image: Path, policy: OpenFilePolicy = OpenFilePolicy.TRUNCATE) -> Upper:
        _cut_files(image, policy)
        upper = restore_upper(image, self.new_site())
        self._uppers.append(upper)
        return upper

    def image_of(self, program: str) -> Path:
        """The image of the program when it was ready; it is gone now, and may go when it is back."""
        upper = self.start(program)
        image = self.folder / "image"
        with freeze(upper.pid) as frozen:
            dump_image(frozen, image)
            upper.kill()
        (self.work / "go").touch()
        return image

    def finish(self, upper: Upper) -> str:
        """What it printed in this stay, once it has ended well."""
        status = upper.wait(PATIENCE_S)
        assert status == 0, self.errors()
        return Path(self.site.stdout_file).read_text()

    def errors(self) -> str:
        return Path(self.site.stderr_file).read_text()

    def close(self) -> None:
        for upper in self._uppers:
            upper.close()
