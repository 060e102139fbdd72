"""Coverage of MPI: ``python -m remesh.carried.mpi.library.coverage`` prints the table of docs/mpi/limits.md.

It counts what ``generate.py`` makes entry points of, so it runs in a checkout. Large-count forms (``MPI_X_c``), names
for profiling (``PMPI_X``) and those of Fortran come with a function, and are not counted by themselves.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Final

from remesh.carried.mpi.library.generate import is_refused, read_functions, written

_GROUPS: Final = (
    ("tools (`MPI_T_*`)", r"T_"),
    ("handles as integers, in Fortran, the ABI", r".*_(c2f|f2c|toint|fromint|f2f08|f082f|c2f08|f082c)$|Abi_"),
    ("error handlers, classes and codes", r".*errhandler|Errhandler_|Error_|(Add|Remove)_error_"),
    ("attributes", r".*_(attr|keyval)$|Attr_|Keyval_"),
    (
        "starting other programs, ports",
        r"Comm_(spawn|accept|connect|join|get_parent)|(Open|Close)_port|(Lookup|(Un)?publish)_name",
    ),
    ("parallel files", r"File_|Register_datarep"),
    ("one-sided communication", r"Win_|R?(put|get|accumulate|get_accumulate)$|Fetch_and_op|Compare_and_swap"),
    (
        "messages and requests",
        r"I?[bsr]?send|I?m?(recv|probe)|Wait|Test|Start|Request_|Grequest_|Cancel|.*buffer$|Buffer_",
    ),
    ("partitioned messages", r"P(send|recv)_init|Pready|Parrived"),
    ("sessions", r"Session_|.*_from_(session_pset|groups?)$"),
    ("topologies and their neighbours", r"Cart|Dims_|Dist_|Graph|Topo_|I?neighbor_"),
    ("datatypes, packing", r"Type_|(Un)?pack|Get_(elements|address)|Address|Aint_"),
    ("collectives, operations", r"I?(all(gather|reduce|toall)|barrier|bcast|gather|scatter|reduce|scan|exscan)|Op_"),
    ("groups and communicators", r"Group_|Comm_|Intercomm_"),
    ("start and end, statuses, memory, infos, time", r""),
)
"""Group to how the names of its functions begin, without ``MPI_``; the first match counts."""
_MOST_NAMED: Final = 12
"""Limit of refused functions that are named; of more, their number is given."""


@dataclass(frozen=True, slots=True)
class FunctionGroup:
    """Functions of one kind."""

    name: str
    carried: tuple[str, ...]
    refused: tuple[str, ...]


def group_functions() -> list[FunctionGroup]:
    """The functions of MPI, by group."""
    there = written()
    refused = {function.name for function in read_functions() if is_refused(function, there)}
    members: dict[str, list[str]] = {name: [] for name, _ in _GROUPS}
    for function in read_functions():
        members[_group_of(function.name.removeprefix("MPI_"))].append(function.name)
    return [
        FunctionGroup(
            name, tuple(one for one in names if one not in refused), tuple(one for one in names if one in refused)
        )
        for name, names in sorted(members.items())
    ]


def _group_of(name: str) -> str:
    return next(group for group, pattern in _GROUPS if re.match(pattern, name, re.IGNORECASE))


def make_table() -> str:
    """Make the table in Markdown: what is carried of each group, and what is refused."""
    rows = ["| group | functions | carried | refused |", "|---|---|---|---|"]
    groups = group_functions()
    for group in groups:
        named = ", ".join(f"`{name}`" for name in group.refused) if len(group.refused) <= _MOST_NAMED else ""
        shown = f"{len(group.refused)}: {named}".rstrip(": ") if group.refused else ""
        rows.append(f"| {group.name} | {len(group.carried) + len(group.refused)} | {len(group.carried)} | {shown} |")
    carried, refused = (
        sum(map(len, kind)) for kind in zip(*((one.carried, one.refused) for one in groups), strict=True)
    )
    return "\n".join([*rows, f"| all | {carried + refused} | {carried} | {refused} |", ""])


if __name__ == "__main__":
    sys.stdout.write(make_table())
