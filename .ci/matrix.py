"""With which Pythons and torches does Remesh work? Runs the unit tier with each, in an environment of its own.

The pairs: every release of Python from 3.11 on that is found, with the newest torch on pip's indexes; the oldest one
also with the lowest torch that pyproject.toml allows. Found are those of ``PYTHONS=/a/python3.11:/b/python3``, those
on the PATH, which may be several of one minor version, and pyenv's of minor versions that are not there. Where a Python
has CPU builds, only those count. ``make matrix`` runs all pairs, ``PAIRS=3.11.2-newest`` one, ``PAIRS=3.11-newest``
those of a minor version, ``PAIRS=list`` shows them; ``PAIRS=3.13-2.15.0`` takes that torch, whatever its build.
Environments stay in ``.matrix/``. At the end stand a table of the results, and what could not be had here.
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
_CLASSIFIER = re.compile(r'"Programming Language :: Python :: 3\.(\d+)"')
_LOWEST = re.compile(r'"torch>=([\d.]+)"')
_CPU = "+cpu"
_TELLS = "import platform; print(platform.python_version())"


@dataclass(frozen=True, slots=True)
class Pair:
    """A Python and a torch."""

    python: str
    """Path of the interpreter."""
    version: str
    """As in 3.12.1."""
    torch: str
    """The version that pip is asked for, as in 2.13.0+cpu."""
    role: str
    """``newest``, ``lowest``, or a version that was asked for by name."""

    @property
    def name(self) -> str:
        """As in 3.12.1-newest."""
        return f"{self.version}-{self.role}"

    def is_called(self, name: str) -> bool:
        """Whether it is meant by a name, or by one without the last number of the version."""
        return name in (self.name, f"{_minor(self.version)}-{self.role}")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a pair."""

    pair: Pair
    said: str
    """Pytest's last line, or why the environment could not be made."""
    is_good: bool


def main() -> None:
    """Run what is asked for; end with 1 if anything failed."""
    asked, tests = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    pythons = find_pythons()
    torches = {version: list_torches(path) for version, path in pythons.items()}
    pairs = make_pairs(pythons, torches)
    missing = describe_missing(pairs, torches)
    if asked == "list":
        print("\n".join([*(f"{pair.name}  torch {pair.torch}  {pair.python}" for pair in pairs), *missing]))
        return
    results = [run_pair(pair, tests) for pair in choose(pairs, pythons, asked)]
    print("\n".join([*make_table(results, tests), *missing]))
    sys.exit(not all(result.is_good for result in results))


def find_pythons() -> dict[str, str]:
    """The supported Pythons that this machine has, oldest first: version, as in 3.11.2, to path."""
    named = os.environ.get("PYTHONS", "").split(os.pathsep)
    on_path = [str(Path(folder, f"python{minor}")) for minor in _supported() for folder in os.get_exec_path()]
    found = _versions_of([*filter(None, named), *on_path])
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in set(_supported()) - set(map(_minor, found)):
        # Those of pyenv, whose own names on the PATH may not start.
        found |= _versions_of([str(path) for path in sorted(homes.glob(f"{minor}.*/bin/python"))[:1]])
    if not found:
        sys.exit(f"running the matrix: none of Python {', '.join(_supported())} is on the PATH; install one")
    return dict(sorted(found.items(), key=lambda each: _numbers(each[0])))


def _versions_of(paths: list[str]) -> dict[str, str]:
    """Version to path of those interpreters that start and are supported, each version once."""
    found: dict[str, str] = {}
    for path in paths:
        if shutil.which(path) is None:
            continue
        done = subprocess.run([path, "-c", _TELLS], capture_output=True, text=True)
        version = done.stdout.strip()
        if done.returncode == 0 and _minor(version) in _supported():
            found.setdefault(version, path)
    return found


def list_torches(python: str) -> list[str]:
    """The versions of torch for a Python on pip's indexes that pyproject.toml allows, newest first."""
    command = [*_pip(python), "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    if listed is None:
        sys.exit(f"running the matrix: `{' '.join(command)}` lists no torch: {done.stderr.strip()[-200:]}")
    return [one for one in listed[1].split(", ") if _numbers(one) >= _numbers(_lowest_torch())]


def make_pairs(pythons: dict[str, str], torches: dict[str, list[str]]) -> list[Pair]:
    """What is tried on this machine, oldest Python first."""
    pairs = []
    for version, path in pythons.items():
        usable = [one for one in torches[version] if one.endswith(_CPU)] or torches[version]
        if version == next(iter(pythons)) and len(usable) > 1:
            pairs.append(Pair(path, version, usable[-1], "lowest"))
        pairs.append(Pair(path, version, usable[0], "newest"))
    return pairs


def choose(pairs: list[Pair], pythons: dict[str, str], asked: str) -> list[Pair]:
    """The pairs of these names, all without one; a name with a version of torch makes its own."""
    if not asked:
        return pairs
    chosen = []
    for name in asked.split(","):
        version, _, torch = name.partition("-")
        meant = [one for one in pythons if version in (one, _minor(one))] if torch[:1].isdigit() else []
        called = [pair for pair in pairs if pair.is_called(name)]
        if not called and not meant:
            sys.exit(f"running the matrix: no pair is called {name!r}, found {', '.join(pair.name for pair in pairs)}")
        chosen += called or [Pair(pythons[one], one, torch, torch) for one in meant]
    return chosen


def run_pair(pair: Pair, tests: list[str]) -> Result:
    """Make the environment, if it is not there, and run the unit tier in it."""
    python = _FOLDER / pair.name / "bin" / "python"
    print(f"python {pair.version}, torch {pair.torch}: installing into {python.parents[1]}", flush=True)
    if not python.exists():
        # A system's Python may lack the pip that others put there.
        subprocess.run([pair.python, "-m", "venv", "--without-pip", python.parents[1]], check=True)
    # torch first, so that nothing else chooses its version.
    for wanted in ([f"torch=={pair.torch}"], ["--editable", f"{ROOT}[test]"]):
        done = subprocess.run([*_pip(str(python)), "install", "--quiet", *wanted], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            return Result(pair, f"not installed: {said}", is_good=False)
    command = [python, "-u", "-m", "pytest", "-q", "-m", "unit", "-p", "no:cacheprovider", *tests]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return Result(pair, last, is_good=running.returncode == 0)


def make_table(results: list[Result], tests: list[str]) -> list[str]:
    """One line for each pair, under a title."""
    title = f"\nunit tests{' of ' + ' '.join(tests) if tests else ''}:"
    rows = [
        f"  python {one.pair.version:7} torch {one.pair.torch:12} {'ok    ' if one.is_good else 'FAILED'}  {one.said}"
        for one in results
    ]
    return [title, *rows]


def describe_missing(pairs: list[Pair], torches: dict[str, list[str]]) -> list[str]:
    """A line for each supported Python, and for each end of the range of torches, that is in no pair."""
    lines = [
        f"not here: Python {one}; it is not on the PATH or in pyenv"
        for one in _supported()
        if one not in map(_minor, torches)
    ]
    oldest, listed = next(iter(torches.items()))
    tried = {_numbers(pair.torch) for pair in pairs}
    for end in dict.fromkeys((listed[-1], listed[0])):
        if _numbers(end) not in tried:
            lines.append(f"not here: a CPU build of torch {end}; PAIRS={oldest}-{end} takes the CUDA build (5 GB)")
    return lines


def _supported() -> list[str]:
    """The Pythons that pyproject.toml names, as in 3.12."""
    return [f"3.{minor}" for minor in _CLASSIFIER.findall((ROOT / "pyproject.toml").read_text())]


def _pip(python: str) -> list[str]:
    """Our own pip, at work in that Python."""
    return [sys.executable, "-m", "pip", "--python", python]


def _minor(version: str) -> str:
    """As in 3.11 of 3.11.2."""
    return ".".join(version.split(".")[:2])


def _lowest_torch() -> str:
    """The version that pyproject.toml allows at least, as in 2.11."""
    found = _LOWEST.search((ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found.group(1)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, comparable: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


if __name__ == "__main__":
    main()
