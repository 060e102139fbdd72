"""With which Pythons and torches does Remesh work? Runs the unit tier with each, in an environment of its own.

The pairs: every Python from 3.11 on that this machine has with the newest torch of the index; the oldest of them also
with the lowest torch that pyproject.toml allows. ``make matrix`` runs all, ``make matrix PAIRS=3.13-newest`` one of
them, ``make matrix PAIRS=list`` shows which there are. Environments stay in ``.matrix/``; results are told at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FOLDER = Path(os.environ.get("MATRIX_FOLDER", ROOT / ".matrix"))
_MINORS = range(11, 20)


@dataclass(frozen=True, slots=True)
class Pair:
    """A Python and a torch."""

    python: str
    """Path of the interpreter."""
    version: str
    """As in 3.12."""
    torch: str
    """``newest`` or ``lowest``."""

    @property
    def name(self) -> str:
        """As in 3.12-newest."""
        return f"{self.version}-{self.torch}"


def main() -> None:
    """Run what is asked for; end with 1 if any failed."""
    asked, *tests = [word for word in sys.argv[1:] if word] or [""]
    pairs = find_pairs()
    if asked == "list":
        print("\n".join(f"{pair.name}  {pair.python}" for pair in pairs))
        return
    chosen = [pair for pair in pairs if not asked or pair.name in asked.split(",")]
    if not chosen:
        sys.exit(f"running the matrix: no pair is called {asked!r}, found {', '.join(pair.name for pair in pairs)}")
    results = {pair: run_pair(pair, tests) for pair in chosen}
    for pair, (torch, failed) in results.items():
        print(f"python {pair.version}, torch {torch}: {f'failed with {failed}' if failed else 'ok'}")
    sys.exit(any(failed for _, failed in results.values()))


def find_pairs() -> list[Pair]:
    """What can be tried on this machine, oldest Python first."""
    pythons = {}
    for minor in _MINORS:
        if found := _find_python(f"3.{minor}"):
            pythons[f"3.{minor}"] = found
    if not pythons:
        sys.exit("running the matrix: no Python from 3.11 on is on the PATH")
    oldest = next(iter(pythons))
    return [Pair(pythons[oldest], oldest, "lowest"), *(Pair(path, name, "newest") for name, path in pythons.items())]


def _find_python(version: str) -> str | None:
    """An interpreter of this version that starts: on the PATH, or among those of pyenv, whose own names may not."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def run_pair(pair: Pair, tests: list[str]) -> tuple[str, int]:
    """The torch that was found, and pytest's exit code."""
    python = _FOLDER / pair.name / "bin" / "python"
    if not python.exists():
        subprocess.run([pair.python, "-m", "venv", python.parents[1]], check=True)
    # torch first, so that nothing else chooses its version.
    torch = f"torch~={_lowest_torch()}.0" if pair.torch == "lowest" else "torch"
    for wanted in ([torch], ["--editable", f"{ROOT}[test]"]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    ask = [python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    print(f"python {pair.version}, torch {version}:", flush=True)
    done = subprocess.run([python, "-m", "pytest", "-q", "-m", "unit", "-p", "no:cacheprovider", *tests], cwd=ROOT)
    return version, done.returncode


def _lowest_torch() -> str:
    """The version that pyproject.toml allows at least, as in 2.11."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found.group(1)


if __name__ == "__main__":
    main()
