"""Programs of Debian that are carried, with their inputs and expected answers.

Inputs are our own and small: each runs for a few seconds on two ranks. An answer is made of lines that neither
contain times nor depend on the machine.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mpi.conftest import PROGRAMS
from tests.mpi.debian import ROOT, libraries

INPUTS: Final = PROGRAMS / "debian"
_SHARE: Final = ROOT / "usr/share"
_SIDE: Final = 20
"""Points of the grid of a system of linear equations, in each of three dims."""
_SIDE_OF_GRAPH: Final = 44
_NUM_PARTS: Final = 7


@dataclass(frozen=True)
class Program:
    """One of Debian's: how it is prepared in a folder, and what its answer is."""

    path: str
    """Below usr/; of one of ours, its name."""
    prepare: Callable[[Path], list[str]]
    """Writes its input into a folder; returns the arguments, and before these the program if it is one of ours."""
    answer: Callable[[str, Path], list[str]]
    """Of what rank 0 printed, and of the folder."""
    most_s: float
    """It is stopped within so many seconds."""
    mpi: str = "openmpi"
    """Of its maker."""
    tolerance: float = 0.0
    """Relative; by how much numbers differ between two runs without us, where the order of its sums is not fixed."""
    input_file: str = ""
    """In the folder: the standard input of rank 0."""
    num_ranks: int = 2
    is_ours: bool = False
    """Debian's are the libraries that it uses."""

    @property
    def name(self) -> str:
        """Of its file."""
        return Path(self.path).name


def variables() -> dict[str, str]:
    """The environment in which such programs find their libraries and tables."""
    plain = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "BAGEL_NUM_THREADS": "1"}
    packages = [
        ROOT / "usr/lib/python3/dist-packages",
        *sorted(ROOT.glob("usr/lib/*dir/*/*-real/lib/python3/dist-packages")),
    ]
    plain["PYTHONPATH"] = os.pathsep.join(map(str, packages))
    tables = {"CP2K_DATA_DIR": str(_SHARE / "cp2k"), "NWCHEM_BASIS_LIBRARY": f"{_SHARE / 'nwchem/libraries'}/"}
    tables |= {"WM_PROJECT_DIR": str(_SHARE / "openfoam"), "FOAM_ETC": str(_SHARE / "openfoam/etc")}
    # OpenFOAM's have no versions, and stand elsewhere.
    places = [str(ROOT / "usr/lib/openmpi-system"), str(ROOT / "usr/lib"), *libraries()]
    return plain | tables | {"LD_LIBRARY_PATH": ":".join(places)}


def _given(name: str, *arguments: str) -> Callable[[Path], list[str]]:
    """A file of ours, and these arguments."""

    def prepare(folder: Path) -> list[str]:
        shutil.copy(INPUTS / name, folder)
        return list(arguments)

    return prepare


def printed(pattern: str) -> Callable[[str, Path], list[str]]:
    """The lines of its output that match."""

    def answer(output: str, folder: Path) -> list[str]:
        return [found[0] for found in re.finditer(pattern, output, re.MULTILINE)]

    return answer


def _residuals(output: str, folder: Path) -> list[str]:
    """What a benchmark of many parts has computed: no times, and not what it seeds by the clock."""
    text = (folder / "hpccoutf.txt").read_text()
    numbers = r"^\w*(?:Errors|maxErr|residual)=.*$|^\|\|Ax-b.*$|^Success=.*$"
    found = re.findall(numbers, text, re.MULTILINE)
    assert "Success=1" in found and "FAILED" not in text, text[-3000:]
    return found


def argon(folder: Path, num_atoms: int = 1000, num_steps: int = 15000) -> list[str]:
    """Atoms of argon on a grid, a cube of them, for GROMACS; the arguments of its run."""
    for name in ("argon.mdp", "argon.top"):
        shutil.copy(INPUTS / name, folder)
    topology = folder / "argon.top"
    topology.write_text(topology.read_text().replace("AR 1000", f"AR {num_atoms}"))
    side = round(num_atoms ** (1 / 3))
    atoms = [(x, y, z) for x in range(side) for y in range(side) for z in range(side)]
    lines = [
        f"{i % 100000:5d}AR      AR{i % 100000:5d}{0.4 * x:8.3f}{0.4 * y:8.3f}{0.4 * z:8.3f}\n"
        for i, (x, y, z) in enumerate(atoms, 1)
    ]
    edge = f"{0.4 * side:10.5f}"
    (folder / "argon.gro").write_text("".join(["argon\n", f"{len(atoms)}\n", *lines, edge * 3, "\n"]))
    command = [str(ROOT / "usr/bin/gmx"), "-quiet", "grompp", "-f", "argon.mdp", "-p", "argon.top", "-c", "argon.gro"]
    environment = variables() | {"GMXLIB": str(_SHARE / "gromacs/top")}
    subprocess.run([*command, "-o", "argon.tpr"], cwd=folder, env=environment, check=True, capture_output=True)
    fixed = ["-reprod", "-ntomp", "1", "-nsteps", str(num_steps)]
    return ["-quiet", "mdrun", "-s", "argon.tpr", "-deffnm", "argon", *fixed, "-c", "end.gro"]


def _last_places(output: str, folder: Path) -> list[str]:
    return (folder / "end.gro").read_text().splitlines()[1:]


def _pings(folder: Path) -> list[str]:
    return ["-u", "65536", "-o", "pings.out"]


def _sizes(output: str, folder: Path) -> list[str]:
    """The sizes of messages that were timed."""
    return [line.split()[0] for line in (folder / "pings.out").read_text().splitlines()]


def _with_tables(name: str, tables: str, *arguments: str) -> Callable[[Path], list[str]]:
    """A file of ours that names a folder of tables below usr/share, and these arguments."""

    def prepare(folder: Path) -> list[str]:
        text = (INPUTS / name).read_text()
        (folder / name).write_text(text.replace("@TABLES@", str(_SHARE / tables)))
        return list(arguments)

    return prepare


def _energies_and_files(output: str, folder: Path) -> list[str]:
    """Of each step of a relaxation; and digests of densities and waves, which all ranks have written."""
    energies = re.findall(r"^ ETOT .*$", (folder / "diamond.abo").read_text(), re.MULTILINE)
    written = [folder / "diamondo_WFK", *sorted(folder.glob("diamondo_*DEN"))]
    assert len(written) > 2
    return [*energies, *(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in written)]


def _molecule_in_motion(output: str, folder: Path) -> list[str]:
    """Energies, without the time that each step took, and places."""
    energies = [line.rsplit(maxsplit=1)[0] for line in (folder / "water-1.ener").read_text().splitlines()[1:]]
    return [*energies, *(folder / "water-pos-1.xyz").read_text().splitlines()]


def _cavity(folder: Path) -> list[str]:
    """A mesh, divided between two ranks."""
    shutil.copytree(INPUTS / "cavity", folder, dirs_exist_ok=True)
    for tool in ("blockMesh", "decomposePar"):
        command = [str(ROOT / "usr/bin" / tool)]
        # The tools are linked with MPI, too, and use none.
        environment = variables()
        environment["LD_LIBRARY_PATH"] += f":{ROOT / 'usr/lib/x86_64-linux-gnu/openmpi/lib'}"
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return ["-parallel"]


def _fields(output: str, folder: Path) -> list[str]:
    """Velocity, pressure and flow through faces at the end, of both ranks."""
    ends = [folder / f"processor{rank}" / "2" / name for rank in (0, 1) for name in ("U", "p", "phi")]
    return [line for path in ends for line in path.read_text().splitlines()]


def _scaled_residuals(output: str, folder: Path) -> list[str]:
    """Sizes, residuals and verdicts, without times and rates."""
    rows = re.findall(r"^WALL +(.*?) +[\d.]+ +[\d.]+ +([\d.]+) (PASSED|FAILED)", output, re.MULTILINE)
    assert "END OF TESTS" in output, output[-2000:]
    return [" ".join(row) for row in rows]


def _equations(folder: Path) -> list[str]:
    """A system of linear equations for standard input: Poisson's, on a grid, with a right side at random."""
    dice = random.Random("equations")
    number = _SIDE**3
    entries = []
    for at in range(number):
        entries.append((at, at, 6.5))
        for step in (1, _SIDE, _SIDE**2):
            if at // step % _SIDE + 1 < _SIDE:
                entries += [(at, at + step, -1.0), (at + step, at, -1.1)]
    lines = [f"{number} :N", f"{len(entries)} :NZ", *(f"{row + 1} {col + 1} {value}" for row, col, value in entries)]
    lines += [f"{dice.uniform(-1, 1):.6f}" for _ in range(number)]
    (folder / "equations").write_text("\n".join(lines) + "\n")
    return []


def _grid(folder: Path) -> list[str]:
    """A graph that is to be divided into seven parts: a grid of three dims."""
    number = _SIDE_OF_GRAPH**3
    rows = []
    for at in range(number):
        near = []
        for step in (1, _SIDE_OF_GRAPH, _SIDE_OF_GRAPH**2):
            place = at // step % _SIDE_OF_GRAPH
            near += [at - step] * (place > 0) + [at + step] * (place + 1 < _SIDE_OF_GRAPH)
        rows.append(" ".join(map(str, [len(near), *near])))
    num_arcs = sum(len(row.split()) - 1 for row in rows)
    (folder / "grid.grf").write_text("\n".join(["0", f"{number} {num_arcs}", "0 000", *rows, ""]))
    return [str(_NUM_PARTS), "grid.grf", "grid.map"]


def _parts(output: str, folder: Path) -> list[str]:
    """Each point in a part, and parts of about one size: which is whose differs between two runs."""
    number, *lines = (folder / "grid.map").read_text().splitlines()
    part_of = dict(line.split() for line in lines)
    sizes = Counter(part_of.values())
    assert max(sizes.values()) * _NUM_PARTS < 1.1 * len(part_of), sizes
    return [number, str(len(part_of)), *sorted(sizes)]


def _solution(output: str, folder: Path) -> list[str]:
    numbers = output.partition("Solution is")[2].partition("Entering")[0].split()
    assert len(numbers) == _SIDE**3, output[-2000:]
    return numbers


def _sequences(number: int, length: int, *arguments: str) -> Callable[[Path], list[str]]:
    """Sequences that came from one another, of which the tree is sought; and these arguments."""

    def prepare(folder: Path) -> list[str]:
        dice = random.Random("sequences")
        rows = ["".join(dice.choices("ACGT", k=length))]
        while len(rows) < number:
            rows.append("".join(base if dice.random() > 0.06 else dice.choice("ACGT") for base in dice.choice(rows)))
        lines = [f"{number} {length}", *(f"{f't{row}':<10}{text}" for row, text in enumerate(rows))]
        (folder / "rows.phy").write_text("\n".join(lines) + "\n")
        (folder / "keys").write_text("y\n")  # of who asks whether its settings are right
        return list(arguments)

    return prepare


def _starting_tree(folder: Path) -> list[str]:
    """Sequences as its own tool packs them, and a tree to begin with: one branch after the other."""
    _sequences(16, 800)(folder)
    pack = [str(ROOT / "usr/bin/parse-examl"), "-s", "rows.phy", "-m", "DNA", "-n", "rows"]
    subprocess.run(pack, cwd=folder, env=variables(), check=True, capture_output=True)
    tree = "(t0,t1)"
    for row in range(2, 14):
        tree = f"({tree},t{row})"
    (folder / "start.tree").write_text(f"({tree},t14,t15);\n")
    return ["-t", "start.tree", "-m", "GAMMA", "-s", "rows.binary", "-n", "out"]


def _files(*names: str) -> Callable[[str, Path], list[str]]:
    """What the program has written into these."""

    def answer(output: str, folder: Path) -> list[str]:
        return [(folder / name).read_text() for name in names]

    return answer


def _digests(*names: str) -> Callable[[str, Path], list[str]]:
    """Of the files that the program has written, which are no text."""

    def answer(output: str, folder: Path) -> list[str]:
        return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]

    return answer


def _likelihood(output: str, folder: Path) -> list[str]:
    """How likely the tree is: ranks hand each other trees as they find them, so native runs have different ones."""
    return re.findall(r"Log-likelihood of the tree: -[\d.]+", (folder / "rows.phy.iqtree").read_text())


def _distances(output: str, folder: Path) -> list[str]:
    """And how likely the tree is: which of its quartets is looked at by whom is open, and so are its branches."""
    likely = re.findall(r"lh=-[\d.]+", (folder / "rows.phy.tree").read_text())
    return [*likely, (folder / "rows.phy.dist").read_text()]


def _vertices(output: str, folder: Path) -> list[str]:
    """In one order: each rank writes what it finds when it finds it."""
    lines = (folder / "vertices").read_text().splitlines()
    return sorted(line for line in lines if line.startswith(" 1 "))


_PSEUDO: Final = "espresso/pseudo"
_MELT_TABLE: Final = r"^ *\d+(?: +-?[\d.e+-]+){5} *$"
_RELAXED: Final = r"^!.*$|^ +Total force.*$|^Si +.*$|^ +JOB DONE.*$"
_ITERATIONS: Final = r"^ +\d+(?: +\d+)? +\*? *-\d+\.\d+ +\d[\d.e+-]*|CASPT2 energy : state.*$"
_MOLECULE: Final = r"Total DFT energy = +-[\d.]+|^ +\d [OH] +[-\d. ]+$"
_SOUGHT_BY_IQTREE: Final = ("-s", "rows.phy", "-m", "GTR+G", "-seed", "1", "-nt", "1")
_SOUGHT_BY_PHYML: Final = ("-i", "rows.phy", "-b", "8", "--r_seed", "7", "-m", "GTR", "--no_memory_check")
_TREES_OF_PHYML: Final = ("rows.phy_phyml_tree.txt", "rows.phy_phyml_boot_trees.txt")

PROGRAMS_OF_DEBIAN: Final = (
    Program("bin/lmp", _given("melt.lammps", "-in", "melt.lammps", "-log", "none"), printed(_MELT_TABLE), 0.6),
    Program("bin/hpcc", _given("hpccinf.txt"), _residuals, 4.0),
    Program("bin/gmx_mpi", argon, _last_places, 0.6),
    Program("bin/NPopenmpi", _pings, _sizes, 0.6),
    Program("bin/NPmpich2", _pings, _sizes, 0.6, "mpich"),
    Program("bin/icoFoam", _cavity, _fields, 0.3),
    Program("bin/gerris2D", _given("lid.gfs", "lid.gfs"), _digests("end-0.gfs", "end-1.gfs"), 1.0),
    Program("bin/pw.x", _with_tables("silicon.in", _PSEUDO, "-in", "silicon.in"), printed(_RELAXED), 0.6),
    Program("bin/cp2k.psmp", _given("water.cp2k", "-i", "water.cp2k"), _molecule_in_motion, 1.0),
    Program("bin/nwchem.openmpi", _given("water.nw", "water.nw"), printed(_MOLECULE), 0.6, tolerance=1e-8),
    Program("bin/nwchem.mpich", _given("water.nw", "water.nw"), printed(_MOLECULE), 0.6, "mpich", 1e-8),
    Program("lib/x86_64-linux-gnu/scalapack/openmpi-tests/xdtrd", _given("TRD.dat"), _scaled_residuals, 0.6),
    Program("lib/mumps/dsimpletest", _equations, _solution, 0.6, tolerance=1e-10, input_file="equations"),
    Program("bin/dgpart", _grid, _parts, 0.6),
    Program("bin/abinit", _with_tables("diamond.abi", _PSEUDO, "diamond.abi"), _energies_and_files, 0.6),
    Program("bin/BAGEL", _with_tables("water.json", "bagel", "water.json"), printed(_ITERATIONS), 1.0, "mpich"),
    Program("bin/iqtree2-mpi", _sequences(16, 1500, *_SOUGHT_BY_IQTREE), _likelihood, 1.0, tolerance=1e-5),
    Program("bin/phyml-mpi", _sequences(12, 600, *_SOUGHT_BY_PHYML), _files(*_TREES_OF_PHYML), 1.0),
    Program(
        "bin/tree-ppuzzle",
        _sequences(12, 600, "rows.phy", "-randseed7"),
        _distances,
        0.6,
        input_file="keys",
        num_ranks=3,
    ),
    Program("lib/examl/bin/examl-sse3", _starting_tree, _files("ExaML_result.out"), 1.0),
    Program("bin/mplrs", _given("polytope.ine", "polytope.ine", "vertices"), _vertices, 0.6, num_ranks=4),
    Program("bin/parform", _given("powers.frm", "powers.frm"), printed(r"^ +[-+] .*$"), 0.6, num_ranks=3),
)
