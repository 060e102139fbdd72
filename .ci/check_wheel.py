"""Do the files in ``dist/`` work where there is no checkout? Looks into them, installs them, does what a user would.

1. The sdist holds nothing that was compiled, the wheels no C source, each its licence; `twine check` is content.
2. The manylinux wheel in a fresh environment, with torch: ``remesh mpi doctor`` finds the extension, and the example of
   the README runs on four ranks.
3. The pure wheel in another, without torch: ``remesh plan`` runs, and ``remesh mpi doctor`` says what is missing.

``make wheel-check`` runs it. The environments lie in a folder for temporary files, which is also the working directory.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMPILED = re.compile(r"\.(so|o|a|pyc|dylib|dll|exe)(\.\d+)?$")
_BUILT = re.compile(r"\.so(\.\d+)?$|\.libs/|/built/")
_C_SOURCE = re.compile(r"\.[ch]$")
_PLAN = ("plan", "--shape", "64,64", "--src", "S0R@2x2", "--dst", "RS0@2x2")


def main() -> None:
    """Check everything in ``dist/``; end with 1 and a line at the first thing that is wrong."""
    sdist, manylinux, pure = _find("*.tar.gz"), _find("*manylinux*.whl"), _find("*-none-any.whl")
    check_contents(sdist, manylinux, pure)
    _run([sys.executable, "-m", "twine", "check", "--strict", sdist, manylinux, pure], ROOT)
    with tempfile.TemporaryDirectory() as folder:
        check_manylinux(manylinux, Path(folder))
        check_pure(pure, Path(folder))
    print(f"ok: {sdist.name}, {manylinux.name}, {pure.name}")


def check_contents(sdist: Path, manylinux: Path, pure: Path) -> None:
    """What is in the files, and what is not."""
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    _expect(not [name for name in names if _COMPILED.search(name)], f"{sdist.name} holds something compiled")
    _expect(any(_C_SOURCE.search(name) for name in names), f"{sdist.name} lacks the C sources")
    for wheel in (manylinux, pure):
        names = zipfile.ZipFile(wheel).namelist()
        _expect(not [name for name in names if _C_SOURCE.search(name)], f"{wheel.name} holds C sources")
        _expect(any(name.endswith("/licenses/LICENSE") for name in names), f"{wheel.name} lacks its licence")
        num_compiled = sum(bool(_COMPILED.search(name)) for name in names)
        _expect(bool(num_compiled) == (wheel is manylinux), f"{wheel.name} holds {num_compiled} compiled files")
    built = {name for name in zipfile.ZipFile(manylinux).namelist() if _BUILT.search(name) and name[-1] != "/"}
    expected = _built()
    _expect(built == expected, f"{manylinux.name} holds {sorted(built)}, expected {sorted(expected)}")


def _built() -> set[str]:
    """What is compiled into a wheel: the extensions, a small init, and all that ``library/build.py`` names."""
    made = runpy.run_path(str(ROOT / "src" / "remesh" / "carried" / "mpi" / "library" / "build.py"))["ALL"]
    extensions = {"remesh/carried/mpi/_fast.abi3.so", "remesh/carried/torch/_short.abi3.so"}
    alone = {*extensions, "remesh/carried/images/restore/built/remesh-init"}
    return alone | {f"remesh/carried/mpi/library/built/{name}" for name in made}


def check_manylinux(wheel: Path, folder: Path) -> None:
    """A user with torch: the doctor finds the extension, the example of the README runs."""
    bin_folder = make_environment(folder / "torch", f"{wheel}[torch]")
    _expect("built" in _doctor(bin_folder, folder), "remesh mpi doctor does not find the C extension")
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    _expect(found is not None, "README.md has no example")
    assert found is not None
    (folder / "example.py").write_text(found.group(1))
    for _ in range(2):  # as users do, in one folder
        _run([bin_folder / "torchrun", "--standalone", "--nproc-per-node", "4", "example.py"], folder)
    steps = sorted(path.parent.name for path in (folder / "checkpoints").glob("*/metadata.json"))
    _expect(len(steps) == 2, f"the example of the README left {steps}, expected two checkpoints")


def check_pure(wheel: Path, folder: Path) -> None:
    """A user without torch and without a compiler."""
    bin_folder = make_environment(folder / "pure", str(wheel))
    _run([bin_folder / "remesh", *_PLAN], folder)
    _expect("it was not built" in _doctor(bin_folder, folder), "remesh mpi doctor does not say what a pure wheel lacks")


def make_environment(folder: Path, requirement: str) -> Path:
    """A new virtual environment with one thing installed; its folder of programs."""
    venv.create(folder, with_pip=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *constraints, requirement], folder)
    return folder / "bin"


def _doctor(bin_folder: Path, folder: Path) -> str:
    """What ``remesh mpi doctor`` says; 1 says that this machine lacks something, such as an MPI."""
    done = subprocess.run(
        [bin_folder / "remesh", "mpi", "doctor"], cwd=folder, env=_clean(), capture_output=True, text=True
    )
    _expect(done.returncode in (0, 1), f"remesh mpi doctor ended with {done.returncode}: {done.stderr}")
    return " ".join(done.stdout.split())


def _run(command: list[str | Path], folder: Path) -> None:
    print("+", *(Path(word).name if "/" in str(word) else word for word in command), flush=True)
    done = subprocess.run(command, cwd=folder, env=_clean())
    _expect(done.returncode == 0, f"{Path(command[0]).name} ended with {done.returncode}")


def _clean() -> dict[str, str]:
    """The environment without what would let a checkout be found; wide, so that tables are not wrapped."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}, "COLUMNS": "300"}


def _find(pattern: str) -> Path:
    found = list((ROOT / "dist").glob(pattern))
    _expect(len(found) == 1, f"dist/ has {len(found)} files {pattern}, expected one; run `make wheel`")
    return found[0]


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        sys.exit(f"checking the wheels: {otherwise}")


if __name__ == "__main__":
    main()
