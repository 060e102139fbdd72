"""Constants of MPI in each face: the tables ``tables/constants.txt`` and ``tables/openmpi_symbols.txt``.

``python -m remesh.carried.mpi.library.facts MPICH OPENMPI`` writes the tables; the arguments are folders with
``include`` and ``lib`` of both, MPICH's with the standard ABI's ``mpi_abi.h`` too. Of the headers only names and values
are taken: a compiler is asked for each.

A line of the first table: name, C type, and the value in MPICH's face, Open MPI's and the standard ABI's. ``-``: the
face does not have it. ``@name``: it is the address of an exported symbol, as Open MPI's predefined handles are. A line
of the second: such a symbol and its bytes, which programs rely on since they copy it when they are loaded.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TABLES: Final = Path(__file__).parent / "tables"
_HANDLES: Final = (
    *("MPI_Comm", "MPI_Datatype", "MPI_Errhandler", "MPI_File", "MPI_Group", "MPI_Info", "MPI_Message", "MPI_Op"),
    *("MPI_Request", "MPI_Session", "MPI_Win"),
)
_NOT_IN_HEADER: Final = {
    "MPIX_C_SHORT_FLOAT_COMPLEX": "ompi_mpi_c_short_float_complex",
    "MPIX_SHORT_FLOAT": "ompi_mpi_short_float",
    "MPI_LB": "ompi_mpi_lb",
    "MPI_UB": "ompi_mpi_ub",
}
"""Datatypes that Open MPI exports, and shows to programs of MPI 1, or in mpi-ext.h."""
_NAME: Final = re.compile(r"\bMPI_[A-Z0-9_]+\b")
_LEFT_OUT: Final = re.compile(r"MPI_(INCLUDED|.*_H$|T_(?!ERR_).*|.*_DECLSPEC|.*_FN$)")


def main(mpich: str, openmpi: str) -> None:
    """Write both tables anew."""
    headers = {
        "mpich": Path(mpich, "include", "mpi.h"),
        "openmpi": Path(openmpi, "include", "mpi.h"),
        "abi": Path(mpich, "include", "mpi_abi.h"),
    }
    values = {face: _values(header) for face, header in headers.items()}
    values["openmpi"] |= {name: f"@{symbol}" for name, symbol in _NOT_IN_HEADER.items()}
    types = dict.fromkeys(_NOT_IN_HEADER, "MPI_Datatype")
    types |= _types(headers["openmpi"], values["openmpi"]) | _types(headers["abi"], values["abi"])
    lines = []
    for name in sorted(set().union(*values.values())):
        if name.endswith("_T") and name not in values["openmpi"]:
            continue  # what MPICH's header numbers functions by
        columns = [values[face].get(name, "-") for face in headers]
        lines.append(f"{name} {types.get(name, 'int')} {' '.join(columns)}\n")
    (TABLES / "constants.txt").write_text("".join(lines))
    (TABLES / "openmpi_symbols.txt").write_text(_symbols(Path(openmpi, "lib", "libmpi.so.40")))


def _compiled(header: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "ask.c")
        source.write_text(f'#include <stdio.h>\n#include <stdint.h>\n#include "{header}"\n{body}')
        target = () if options else ("-o", str(Path(folder, "ask")))
        command = ["cc", "-w", "-I", str(header.parent), *options, str(source), *target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or options:
            return done
        return subprocess.run([str(Path(folder, "ask"))], capture_output=True, text=True, check=True)


def _names(header: Path) -> list[str]:
    """Names of constants: macros without arguments, and members of enumerations."""
    macros = subprocess.run(
        ["cc", "-w", "-E", "-dM", "-I", str(header.parent), str(header)], capture_output=True, text=True, check=True
    ).stdout
    names = set(re.findall(r"^#define (MPI_[A-Z0-9_]+|MPIX_C_FLOAT16|MPIX_BFLOAT16) .", macros, re.MULTILINE))
    text = subprocess.run(
        ["cc", "-w", "-E", "-P", "-I", str(header.parent), str(header)], capture_output=True, text=True, check=True
    ).stdout
    for block in re.findall(r"enum[^{;]*\{([^}]*)\}", text):
        names |= set(_NAME.findall(block))
    return sorted(name for name in names if not _LEFT_OUT.match(name))


def _values(header: Path) -> dict[str, str]:
    """Name to value, as the tables write it."""
    names = _names(header)
    asked = "".join(f"remesh_{name} = {name} ;\n" for name in names)
    expanded = _compiled(header, asked, "-E", "-P").stdout.replace("\n", " ")
    values = {}
    for name, text in re.findall(r"remesh_(MPIX?_\w+) = (.*?) ;", expanded):
        symbol = re.search(r"&?\(?\b((?:ompi|opal)_(?:mpi|request|message)_\w+)\b(?!\s*\*)", text)
        if symbol:
            values[name] = f"@{symbol[1]}"
        elif '"' not in text:
            values[name] = ""
    plain = [name for name, value in values.items() if not value]
    body = "".join(f'    printf("{name} %lld\\n", (long long)(intptr_t)({name}));\n' for name in plain)
    done = _compiled(header, f"int main(void) {{\n{body}    return 0;\n}}\n")
    if done.stderr:
        sys.exit(done.stderr)
    return values | dict(line.split() for line in done.stdout.splitlines())


def _types(header: Path, values: dict[str, str]) -> dict[str, str]:
    """Name to the handle type of a constant; those that are numbers or plain addresses are left out."""
    choices = ", ".join(f'{handle}: "{handle}"' for handle in _HANDLES)
    body = "".join(f'    printf("{n} %s\\n", _Generic(({n}), {choices}, default: "int"));\n' for n in values)
    if not any(value.startswith("@") for value in values.values()):
        lines = _compiled(header, f"int main(void) {{\n{body}    return 0;\n}}\n").stdout.splitlines()
        return {name: kind for name, kind in map(str.split, lines) if kind != "int"}
    # Its symbols are not here to link with: the preprocessor shows which type each address is given.
    asked = "".join(f"remesh_{name} = {name} ;\n" for name in values)
    text = _compiled(header, asked, "-E", "-P").stdout.replace("\n", " ")
    named = {h.lower().replace("mpi_", "ompi_"): h for h in _HANDLES} | {
        "ompi_communicator": "MPI_Comm",
        "ompi_instance": "MPI_Session",
    }
    found = {}
    for name, value in re.findall(r"remesh_(MPIX?_\w+) = (.*?) ;", text):
        kind = re.search(r"\b(ompi_\w+)_t\s*\*", value) or re.search(r"\bstruct (ompi_\w+)_t\b", value)
        if kind and kind[1] in named:
            found[name] = named[kind[1]]
        else:
            handle = re.search(rf"\b({'|'.join(_HANDLES)})\b\s*\)", value)
            if handle:
                found[name] = handle[1]
    return found


def _symbols(library: Path) -> str:
    listed = subprocess.run(
        ["nm", "-D", "-S", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    kept = [
        (r[3], int(r[1], 16))
        for r in rows
        if len(r) == 4 and r[2] in "BDR" and r[3].startswith(("ompi_mpi_", "ompi_request_null", "ompi_message_"))
    ]
    return "".join(f"{name} {size}\n" for name, size in sorted(kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
