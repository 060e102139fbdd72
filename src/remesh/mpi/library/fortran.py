"""Entry points for Fortran: ``mpi_x_`` for every ``MPI_X`` whose arguments a rule can translate.

All arguments come by reference; handles are integers, texts have no end but a length behind all other arguments, and
indices count from one. What a program passes to functions of its own is written by hand in ``fortran.c``. ``use mpi``
leads to the same names, and Open MPI's ``mpi_f08`` to ``ompi_x_f``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from remesh.mpi.library.generate import Function, Parameter

_HANDLES: Final = {
    **{f"MPI_{name}": name.upper() for name in ("Comm", "Datatype", "Errhandler", "File", "Group", "Info", "Message")},
    **{f"MPI_{name}": name.upper() for name in ("Op", "Request", "Session", "Win")},
}
_LENGTHS: Final = ("count", "incount", "max_datatypes")
"""Parameters that say how many handles an array has."""
_BY_HAND: Final = frozenset(
    f"MPI_{name}"
    for name in (
        *("Comm_set_attr", "Comm_get_attr", "Type_set_attr", "Type_get_attr", "Win_set_attr", "Win_get_attr"),
        *("Attr_put", "Attr_get", "Buffer_detach", "Comm_detach_buffer", "Session_detach_buffer", "Pcontrol"),
        *("Status_c2f08", "Status_f082c", "Status_c2f", "Status_f2c"),
    )
)
_LEFT_OUT: Final = ("FUNCTION", "ARGUMENT_LIST", "COMMAND_LIST", "POLYFUNCTION", "STRING_ARRAY", "STRING_2DARRAY")


def entries(functions: Iterable[Function]) -> str:
    """The entry points."""
    parts = ['/* Made by fortran.py: the entry points for Fortran. */\n#include "fortran.h"\n']
    parts += [_entry(function) for function in functions if _has_rule(function)]
    return "\n".join(parts)


def _has_rule(function: Function) -> bool:
    if function.returned != "int" or function.name in _BY_HAND or function.name.startswith("MPI_T_"):
        return False
    if any(one.kind.startswith(_LEFT_OUT) or one.small == "..." for one in function.parameters):
        # MPI_Init takes the command line in C alone.
        return function.name in ("MPI_Init", "MPI_Init_thread")
    return True


def _entry(function: Function) -> str:
    name = function.name.removeprefix("MPI_").lower()
    chosen = [one for one in function.of_form(large=False) if one.kind not in ("ARGUMENT_COUNT", "ARGUMENT_LIST")]
    rules = [_rule(one, function) for one in chosen]
    texts = [one.name for one in chosen if _is_text(one)]
    declared = [rule.declared for rule in rules] + ["MPI_Fint *ierror"] + [f"size_t {text}_length" for text in texts]
    arguments = [rule.argument for rule in rules]
    if function.name in ("MPI_Init", "MPI_Init_thread"):
        arguments = ["NULL", "NULL", *arguments]
    before = [line for rule in rules for line in rule.before]
    after = [line for rule in rules for line in rule.after]
    freed = [line for rule in rules for line in rule.freed]
    lines = [
        f"EXPORTED void mpi_{name}_({', '.join(declared)});",
        f"void mpi_{name}_({', '.join(declared)}) {{",
        *(f"    {line}" for line in before),
        f"    int error_ = P{function.name}({', '.join(arguments)});",
        *(f"    if (!error_) {line}" for line in after),
        *(f"    {line}" for line in freed),
        "    *ierror = error_;",
        "}",
        f"OTHER_NAMES({name}, ({', '.join(declared)}))\n",
    ]
    return "\n".join(lines)


def _is_text(one: Parameter) -> bool:
    return one.small in ("char*", "const.char*")


class _Translated:
    """How one argument is translated."""

    def __init__(self, declared: str, argument: str) -> None:
        self.declared, self.argument = declared, argument
        self.before: list[str] = []
        self.after: list[str] = []
        self.freed: list[str] = []


def _rule(one: Parameter, function: Function) -> _Translated:
    name, kind = one.name, one.small.removeprefix("const.")
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
        rule = _Translated(one.declared(large=False), name)
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
        # Also after an error: what was completed is void.
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
