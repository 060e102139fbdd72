"""Entry points for Fortran: ``mpi_x_`` for every ``MPI_X`` whose arguments a rule can translate.

All arguments come by reference; handles are integers, texts have no end but a length behind all other arguments, and
indices count from one. What a program passes to functions of its own is written by hand in ``fortran.c``. ``use mpi``
leads to the same names, and Open MPI's ``mpi_f08`` to ``ompi_x_f``.

MPICH's ``mpi_f08`` leads to ``mpi_x_f08_``, which takes the same arguments; where one of them is a buffer, to
``mpi_x_f08ts_``, which gets a descriptor of an array (``mpifort/descriptor.h``); and for large counts to
``mpi_x_f08_large_`` and ``mpi_x_f08ts_large_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from remesh.carried.mpi.library.generate import Function, Parameter

_HANDLES: Final = {
    **{f"MPI_{name}": name.upper() for name in ("Comm", "Datatype", "Errhandler", "File", "Group", "Info", "Message")},
    **{f"MPI_{name}": name.upper() for name in ("Op", "Request", "Session", "Win")},
}
_LENGTHS: Final = ("count", "incount", "max_datatypes")
"""Parameters that count the handles of an array."""
_BY_HAND: Final = frozenset(
    f"MPI_{name}"
    for name in (
        *("Comm_set_attr", "Comm_get_attr", "Type_set_attr", "Type_get_attr", "Win_set_attr", "Win_get_attr"),
        *("Attr_put", "Attr_get", "Buffer_detach", "Comm_detach_buffer", "Session_detach_buffer", "Pcontrol"),
        *("Status_c2f08", "Status_f082c", "Status_c2f", "Status_f2c"),
    )
)
_WITH_COMMAND_LINE: Final = ("MPI_Init", "MPI_Init_thread", "MPI_Info_create_env")
"""Functions that take the command line in C alone."""
_ADDRESS_ALONE: Final = re.compile(
    r"MPI_(Get_address|Address|Free_mem|Win_detach|Fetch_and_op|Compare_and_swap|File_\w+_end)$"
)
"""Functions that look at most at the first element of a buffer."""
_LEFT_OUT: Final = ("FUNCTION", "ARGUMENT_LIST", "COMMAND_LIST", "POLYFUNCTION", "STRING_ARRAY", "STRING_2DARRAY")


def entries(functions: Iterable[Function]) -> str:
    """The entry points of mpif.h."""
    parts = ['/* Made by fortran.py: the entry points for Fortran. */\n#include "fortran.h"\n']
    for function in filter(_has_rule, functions):
        name, declared = _short(function), _declared(function, large=False)
        others = "OTHER_NAMES_OF_BUFFERS" if _buffers(function, large=False) else "OTHER_NAMES"
        parts.append(f"EXPORTED void mpi_{name}_({declared});")
        parts += [*_translation(function, f"mpi_{name}_", large=False), f"{others}({name}, ({declared}))\n"]
    return "\n".join(parts)


def entries_of_f08(functions: Iterable[Function]) -> str:
    """The entry points of MPICH's ``mpi_f08`` that differ from those of mpif.h."""
    parts = ['/* Made by fortran.py: the entry points for the module mpi_f08. */\n#include "descriptor.h"\n']
    for function in filter(_has_rule, functions):
        for large in (False, True) if function.has_large else (False,):
            if _buffers(function, large=large):
                parts += _entry_with_arrays(function, large=large)
            elif large:
                parts += _exported(function, f"mpi_{_short(function)}_f08_large_", _declared(function, large=True))
                parts += _translation(function, f"mpi_{_short(function)}_f08_large_", large=True)
    return "\n".join([*parts, ""])


def _has_rule(function: Function) -> bool:
    if function.returned != "int" or function.name in _BY_HAND or function.name.startswith("MPI_T_"):
        return False
    if any(one.kind.startswith(_LEFT_OUT) or one.small == "..." for one in function.parameters):
        return function.name in _WITH_COMMAND_LINE
    return True


def _short(function: Function) -> str:
    return function.name.removeprefix("MPI_").lower()


def _parameters(function: Function, *, large: bool) -> list[Parameter]:
    chosen = function.of_form(large=large)
    return [one for one in chosen if one.kind not in ("ARGUMENT_COUNT", "ARGUMENT_LIST")]


def _buffers(function: Function, *, large: bool) -> list[Parameter]:
    return [one for one in _parameters(function, large=large) if one.kind == "BUFFER"]


def _declared(function: Function, *, large: bool, buffers: str = "void") -> str:
    """The parameters of a function, as C declares them; ``buffers``: what those point to."""
    chosen = _parameters(function, large=large)
    declared = [
        f"{buffers} *{one.name}" if one.kind == "BUFFER" else _rule(one, function, large=large).declared
        for one in chosen
    ]
    lengths = [f"size_t {one.name}_length" for one in chosen if _is_text(one)]
    return ", ".join([*declared, "MPI_Fint *ierror", *lengths])


def _names(function: Function, *, large: bool) -> list[str]:
    """The names of all parameters."""
    chosen = _parameters(function, large=large)
    lengths = [f"{one.name}_length" for one in chosen if _is_text(one)]
    return [*(one.name for one in chosen), "ierror", *lengths]


def _exported(function: Function, name: str, declared: str) -> list[str]:
    return [
        f"EXPORTED void {name}({declared});",
        f'EXPORTED void p{name}({declared}) __attribute__((alias("{name}")));',
    ]


def _translation(function: Function, symbol: str, *, large: bool) -> list[str]:
    """A function in C that is called as Fortran does, and calls MPI."""
    rules = [_rule(one, function, large=large) for one in _parameters(function, large=large)]
    arguments = [rule.argument for rule in rules]
    if function.name in _WITH_COMMAND_LINE:
        arguments = ["0", "NULL", *arguments]
    return [
        f"void {symbol}({_declared(function, large=large)}) {{",
        *(f"    {line}" for rule in rules for line in rule.before),
        f"    int error_ = P{function.name}{'_c' if large else ''}({', '.join(arguments)});",
        *(f"    if (!error_) {line}" for rule in rules for line in rule.after),
        *(f"    {line}" for rule in rules for line in rule.freed),
        "    tell(ierror, error_);",
        "}",
    ]


# ---- Arrays of mpi_f08 ----


def _entry_with_arrays(function: Function, *, large: bool) -> list[str]:
    """An entry point that turns descriptors into addresses, and calls the one that takes those."""
    short, form = _short(function), "large_" if large else ""
    inner = f"mpi_{short}_large_" if large else f"pmpi_{short}_"
    entry = f"mpi_{short}_f08ts_{form}"
    plain, declared = (_declared(function, large=large, buffers=kind) for kind in ("void", "Descriptor"))
    parts = [f"INTERNAL void {inner}({plain});", *_translation(function, inner, large=True)] if large else []
    parts += [] if large else [f"void {inner}({plain});"]
    return [
        *parts,
        *_exported(function, entry, declared),
        f"void {entry}({declared}) {{",
        *(f"    {line}" for line in _body_with_arrays(function, inner, large=large)),
        "}\n",
    ]


def _body_with_arrays(function: Function, inner: str, *, large: bool) -> list[str]:
    given = {name: name for name in _names(function, large=large)}
    arrays = [one.name for one in _buffers(function, large=large)]
    if _ADDRESS_ALONE.match(function.name):
        given |= {name: f"{name}->base" for name in arrays}
        return [f"{inner}({', '.join(given.values())});"]
    if not _goes_on(function):
        return _with_copies(function, inner, given, large=large)
    if _is_one_block_each(function):
        return _with_blocks(function, inner, given, large=large)
    given |= {name: f"{name}->base" for name in arrays}
    checks = " && ".join(f'is_whole({name}, "{function.name}", ierror)' for name in arrays)
    return [f"if ({checks}) {inner}({', '.join(given.values())});"]


def _goes_on(function: Function) -> bool:
    """Whether a function uses its buffers after its return."""
    makes_request = any(one.small == "MPI_Request*" and one.direction == "out" for one in function.parameters)
    has_window = any(one.small.startswith("MPI_Win") for one in function.parameters)
    return makes_request or has_window or function.name.endswith("_begin") or "attach" in function.name


def _is_one_block_each(function: Function) -> bool:
    """Whether each buffer is what one count and one datatype describe: messages, accesses to windows and files."""
    is_alone = any(one.kind in ("TAG", "MESSAGE", "FILE", "WINDOW") for one in function.parameters)
    kinds = [one.kind for one in function.parameters]
    places = [place for place, kind in enumerate(kinds) if kind == "BUFFER"]
    return is_alone and all("_NUM_ELEM" in kinds[at + 1] and kinds[at + 2] == "DATATYPE" for at in places)


def _with_copies(function: Function, inner: str, given: dict[str, str], *, large: bool) -> list[str]:
    before, after = [], []
    for one in _buffers(function, large=large):
        given[one.name] = f"{one.name}_"
        before.append(f"void *{one.name}_ = gathered({one.name});")
        after.append(f"spread({one.name}, {one.name}_, {str(one.direction != 'in').lower()});")
    return [*before, f"{inner}({', '.join(given.values())});", *after]


def _with_blocks(function: Function, inner: str, given: dict[str, str], *, large: bool) -> list[str]:
    chosen = _parameters(function, large=large)
    before, checks, counts, after = [], [], [], []
    for place, one in enumerate(chosen):
        if one.kind != "BUFFER":
            continue
        name, (count, datatype) = one.name, chosen[place + 1 : place + 3]
        before.append(f"Block {name}_ = {{*{count.name}, *{datatype.name}, false}};")
        checks.append(f'find_block(&{name}_, {name}, "{function.name}", ierror)')
        number = count.large if large else count.small
        counts.append(f"const {number} {name}_count_ = ({number}){name}_.count;")
        given |= {name: f"{name}->base", count.name: f"&{name}_count_", datatype.name: f"&{name}_.datatype"}
        after.append(f"free_block(&{name}_);")
    return [
        *before,
        f"bool is_found_ = {' && '.join(checks)};",
        *counts,
        f"if (is_found_) {inner}({', '.join(given.values())});",
        *after,
    ]


# ---- Rules ----


def _is_text(one: Parameter) -> bool:
    return one.small in ("char*", "const.char*")


class _Translated:
    """The translation of one argument."""

    def __init__(self, declared: str, argument: str) -> None:
        self.declared, self.argument = declared, argument
        self.before: list[str] = []
        self.after: list[str] = []
        self.freed: list[str] = []


def _rule(one: Parameter, function: Function, *, large: bool) -> _Translated:
    name, kind = one.name, (one.large if large else one.small).removeprefix("const.")
    handle = kind.rstrip("*").removesuffix("[]")
    if handle in _HANDLES:
        return _array_of_handles(one, function, handle) if kind.endswith("[]") else _handle(one, handle)
    if handle == "MPI_Status":
        return _Translated(f"MPI_Fint *{name}", f"status_of({name})")
    if _is_text(one):
        return _text(one, function)
    if kind == "void*":
        return _Translated(f"void *{name}", name if one.kind == "C_BUFFER2" else f"buffer_of({name})")
    if kind.endswith("[]") and "WEIGHT" in one.kind:
        return _Translated(f"MPI_Fint *{name}", f"weights_of({name})")
    if "*" in kind or "[" in kind:
        rule = _Translated(one.declared(large=large), name)
        is_some = any(each.name == "outcount" for each in function.parameters)
        if one.kind == "INDEX" and one.direction == "out" and (is_some or not kind.endswith("[]")):
            length = "*outcount" if is_some else "1"
            rule.after.append(f"count_from_one({name}, {length});")
        return rule
    return _Translated(f"const {kind} *{name}", f"*{name}")


def _handle(one: Parameter, handle: str) -> _Translated:
    name, kind = one.name, f"KIND_{_HANDLES[handle]}"
    if not one.small.endswith("*"):
        return _Translated(f"const MPI_Fint *{name}", f"({handle})handle_of_fortran({kind}, *{name})")
    rule = _Translated(f"MPI_Fint *{name}", f"&{name}_")
    start = "" if one.direction == "out" else f" = ({handle})handle_of_fortran({kind}, *{name})"
    rule.before.append(f"{handle} {name}_{start};")
    rule.after.append(f"*{name} = fortran_of({kind}, BITS({name}_));")
    return rule


def _array_of_handles(one: Parameter, function: Function, handle: str) -> _Translated:
    name, kind = one.name, f"KIND_{_HANDLES[handle]}"
    rule = _Translated(f"MPI_Fint *{name}", f"{name}_")
    length = next((f"*{each.name}" for each in function.parameters if each.name in _LENGTHS), f"num_{name}")
    if name in ("sendtypes", "recvtypes"):
        # One for each rank or neighbour; where nothing is sent but what has come, Fortran may give anything.
        near, side = str("eighbor" in function.name).lower(), "SENT" if name == "sendtypes" else "RECEIVED"
        rule.before.append(f"int {length} = num_types(*comm, {near}, {side}, {name[:4]}buf);")
    rule.before.append(f"{handle} *{name}_ = NEW_ARRAY({handle}, {length});")
    if one.direction != "out":
        turned = f"({handle})handle_of_fortran({kind}, {name}[i])"
        rule.before.append(f"for (int i = 0; i < {length}; i++) {name}_[i] = {turned};")
    if not one.small.startswith("const."):
        # Also after an error: the handles of completed operations are void.
        rule.freed.append(f"for (int i = 0; i < {length}; i++) {name}[i] = fortran_of({kind}, BITS({name}_[i]));")
    rule.freed.append(f"free({name}_);")
    return rule


def _text(one: Parameter, function: Function) -> _Translated:
    name = one.name
    rule = _Translated(f"char *{name}", f"{name}_")
    if one.direction == "in":
        rule.before.append(f"char *{name}_ = text_of_fortran({name}, {name}_length);")
    else:
        room = "*valuelen" if any(each.name == "valuelen" for each in function.parameters) else "MAX_TEXT"
        found = "*flag" if any(each.name == "flag" for each in function.parameters) else "true"
        rule.before.append(f"char *{name}_ = NEW_ARRAY(char, {room} + 1);")
        rule.after.append(f"text_to_fortran({found}, {name}_, {name}, {name}_length);")
    rule.freed.append(f"free({name}_);")
    return rule


def numbers(table: Path, kinds: dict[str, str]) -> str:
    """The numbers of predefined handles in Open MPI's Fortran; ``kinds``: name of a constant to its C type."""
    rows = [line.split() for line in table.read_text().splitlines()]
    made = "".join(f"    {{KIND_{_HANDLES[kinds[name]]}, {number}, {name}}},\n" for name, number in rows)
    return f"const FortranNumber fortran_numbers[] = {{\n{made}}};\nconst int num_fortran_numbers = {len(rows)};\n"
