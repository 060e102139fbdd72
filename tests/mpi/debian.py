"""Debian's programs for MPI, without installing them: ``python -m tests.mpi.debian FOLDER PACKAGE ...``.

Each package and what it needs and this machine lacks is downloaded by apt and unpacked into ``FOLDER/root``. What
packages would do to the machine once they were there, they do not do.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2] / ".mpi" / "debian" / "root"
"""Where `make mpi-programs` has put them."""
_AT_ONCE: Final = 20
"""Packages that are downloaded by one start of apt."""


def libraries(root: Path = ROOT) -> list[str]:
    """Folders with shared libraries, in the order of a search: what Debian prefers among those of one name is first."""
    found = {str(path.parent) for path in root.glob("usr/lib/**/*.so.*") if "/openmpi" not in str(path.parent)}
    return sorted(found, key=lambda folder: (folder.endswith("-linux-gnu"), folder))


def missing(packages: list[str]) -> list[str]:
    """These packages and what they need, as far as the machine lacks them."""
    command = ["apt-get", "--simulate", "--no-install-recommends", "install", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE)


def fetch(folder: Path, packages: list[str]) -> None:
    """Download and unpack; those that are there are not fetched again."""
    archives, arriving, root = folder / "archives", folder / "arriving", folder / "root"
    for place in (archives, arriving):
        place.mkdir(parents=True, exist_ok=True)
    wanted = [package for package in missing(packages) if not list(archives.glob(f"{package}_*.deb"))]
    # Each start of apt reads its whole list of packages. Those that it has fetched before lie in its own store.
    for first in range(0, len(wanted), _AT_ONCE):
        command = ["apt-get", "--quiet", "download", *wanted[first : first + _AT_ONCE]]
        subprocess.run(command, cwd=arriving, check=True)
        for archive in sorted(arriving.glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", str(archive), str(root)], check=True)
            archive.rename(archives / archive.name)


if __name__ == "__main__":
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        sys.exit("no apt-get or dpkg-deb: Debian's programs can be fetched on Debian and its kin alone")
    fetch(Path(sys.argv[1]).absolute(), sys.argv[2:])
