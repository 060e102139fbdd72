"""Functions of the MPI standard in C: the table ``tables/functions.txt``, from the MPI Forum's own data.

``python -m remesh.carried.mpi.library.standard`` writes the table; it needs ``pympistandard``, which carries the
Forum's machine-readable standard. One function stands on a line: type and name, then its parameters, separated by
``;``. A parameter is its type, name, direction and kind. A type of two forms, ``int|MPI_Count``, is of a function that
also has a form with large counts, ``..._c``. A parameter of that form alone begins with ``|``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).parent / "tables" / "functions.txt"
_VARIABLE: Final = "varargs"


def main() -> None:
    """Write the table anew."""
    import pympistandard  # noqa: PLC0415 - only who renews the table has it

    pympistandard.use_api_version(1, force_bundled=True)
    lines = [_line(each) for each in pympistandard.PROCEDURES.values() if each.express.iso_c is not None]
    TABLE.write_text("".join(f"{line}\n" for line in sorted(lines)))


def _line(procedure: Any) -> str:
    small = procedure.express.iso_c
    large = procedure.express.embiggen.iso_c if procedure.has_embiggenment() else None
    data = procedure._parseset  # the package shows directions and kinds nowhere else
    rows = {row["name"]: row for row in data["parameters"]}
    of_small = {each.name: _declared(each) for each in small.parameters}
    of_large = {each.name: _declared(each) for each in large.parameters} if large is not None else of_small
    parameters = []
    for name, row in rows.items():
        first, second = of_small.get(name, ""), of_large.get(name, "")
        if first or second:
            declared = first if first == second else f"{first}|{second}"
            parameters.append(f"{declared} {name} {row['param_direction']} {row['kind']}")
    returned = str(small).split(f" {small.name}")[0]
    return "; ".join([f"{returned} {small.name}", *parameters])


def _declared(parameter: Any) -> str:
    """The C type of a parameter, without blanks: ``const*void`` would be ambiguous, so it is ``const.void*``."""
    kind = parameter._parseset["kind"].lower()
    if kind == _VARIABLE:
        return "..."
    text = str(parameter).replace(f" {parameter.name}", "", 1)
    return text.replace("const ", "const.").replace(" ", "")


if __name__ == "__main__":
    main()
