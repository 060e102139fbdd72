"""Generator of the MPI library's parts: each face's header, and the entry point of every MPI function.

``python generate.py FACE FOLDER`` writes, for one face:

- ``mpi.h``: constants, types, and prototypes of all functions;
- ``internal.h``: prototypes of the functions ``do_X`` that are written by hand. Handles have become objects, and counts
  have one size: an ``int`` that is an ``MPI_Count`` in the large form is an ``MPI_Count``, an array of them ``Counts``;
- ``fortran_entries.c``: the same for Fortran (``fortran.py``), which MPICH's face has apart: ``mpifort/entries.c``, and
  ``mpifort/f08_entries.c`` for its module ``mpi_f08``;
- ``entries.c``: ``MPI_X``, ``PMPI_X`` and the large ``MPI_X_c``, which turn a program's arguments into those of
  ``do_X``, check them, and hand errors to the handler. What has no ``do_X`` refuses by name.

The tables are facts about MPI: ``standard.py`` and ``facts.py`` renew them. Only Python's own library is used, since
this runs when the package is built.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
FACES: Final = ("mpich", "openmpi", "abi")
_OBJECTS: Final = {
    "MPI_Comm": "comm",
    "MPI_Datatype": "datatype",
    "MPI_Errhandler": "errhandler",
    "MPI_File": "file",
    "MPI_Group": "group",
    "MPI_Info": "info",
    "MPI_Message": "message",
    "MPI_Op": "op",
    "MPI_Request": "request",
    "MPI_Session": "session",
    "MPI_Win": "win",
}
"""Handle type to the name of its object's functions."""
_NULLS: Final = {handle: f"{handle.upper()}_NULL" for handle in _OBJECTS}
_HOLDERS: Final = ("MPI_Comm", "MPI_Win", "MPI_File", "MPI_Session")
"""Objects with an error handler."""
_CLASSES: Final = {handle: f"MPI_ERR_{name.upper()}" for handle, name in _OBJECTS.items()} | {
    "MPI_Datatype": "MPI_ERR_TYPE",
    "MPI_Message": "MPI_ERR_REQUEST",
}
_NUMBERS: Final = ("int", "MPI_Aint", "MPI_Count", "MPI_Offset")
_MAY_BE_LEFT_OUT: Final = ("ARGUMENT_COUNT", "THREAD_LEVEL")
"""Kinds of values that programs do not always ask for: MPI libraries take NULL for them."""
_NULL_ALLOWED: Final = ("MPI_Info",)
_RAW: Final = frozenset({"MPI_Type_get_contents", "MPI_Type_get_envelope", "MPI_Op_create", "MPI_Register_datarep"})
"""Functions whose two forms differ in more than the size of counts: there is a do_X and a do_X_c."""
_TOLD_FORM: Final = re.compile(r"MPI_Type_(contiguous|vector|indexed|create_([hi].*|struct|subarray|darray|resized))$")
"""Functions that make an object which remembers the form of the call: their do_X takes ``is_large``, too."""
_TAKE_NULLS: Final = {
    "MPI_Comm_compare": (),
    "MPI_Comm_get_name": ("MPI_Comm",),
    "MPI_File_set_errhandler": ("MPI_File",),
    "MPI_File_get_errhandler": ("MPI_File",),
    "MPI_File_call_errhandler": ("MPI_File",),
    "MPI_Request_get_status": ("MPI_Request",),
    "MPI_Type_get_name": ("MPI_Datatype",),
    "MPI_Win_get_name": ("MPI_Win",),
    "MPI_Get_accumulate": ("MPI_Datatype",),
    "MPI_Rget_accumulate": ("MPI_Datatype",),
}
"""Functions that take null handles of these types."""
_NOT_FOR_ALL: Final = (
    (re.compile(r"MPI_Intercomm_create(_from_groups)?$"), ("peer_comm", "remote_group")),
    (
        re.compile(r"MPI_I?(neighbor_|Neighbor_)?(all)?(gather|scatter|alltoall)[vw]?(_init)?$", re.IGNORECASE),
        ("sendcount", "sendtype", "recvcount", "recvtype"),
    ),
)
"""Functions and those of their arguments that only some ranks must give: do_X checks them; a handle may be NULL."""
_LENGTHS: Final = ("ARRAY_LENGTH", "ARRAY_LENGTH_NNI", "ARRAY_LENGTH_PI", "POLYDTYPE_NUM_ELEM_NNI")
"""Kinds of arguments that count the elements of arrays; the last one only by the name ``count``."""
_OTHER_LENGTHS: Final = ("destinations", "edges")
"""Arrays that are longer or shorter than that."""
_ELEMENTS: Final = ("int", "MPI_Aint", "MPI_Count", "MPI_Datatype", "MPI_Request")
"""Of arrays that a function reads or writes whole; of others NULL may have a meaning."""
_ANY_TIME: Final = re.compile(
    r"MPI_(Init|Init_thread|Initialized|Finalized|Finalize|Get_version|Get_library_version|Abi_.*|Info_.*|Session_.*"
    r"|Error_.*|Add_error_.*|Remove_error_.*|.*_errhandler|Errhandler_.*|.*_c2f|.*_f2c|.*_f082.*|.*_c2f08|.*_toint|.*_fromint|Aint_.*"
    r"|Status_.*|Group_from_session_pset|Comm_create_from_group|Group_.*|T_.*|Wtime|Wtick|Abort|Get_hw_resource_info"
    r"|Buffer_.*|Comm_create_keyval|Comm_free_keyval|Type_create_keyval|Win_create_keyval|Win_free_keyval"
    r"|Type_free_keyval|Get_address|Get_processor_name)$"
)
"""Functions that may be called before MPI is started, or with a session only."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function."""

    small: str  # C type as declared, "" if only the large form has it
    large: str
    name: str
    direction: str
    kind: str

    @property
    def is_poly(self) -> bool:
        return self.small != self.large

    def declared(self, *, large: bool) -> str:
        """The parameter as C declares it."""
        text = self.large if large else self.small
        if text == "...":
            return text
        text = text.replace("const.", "const ")
        array = re.search(r"(\[\].*)$", text)
        return f"{text[: array.start()]} {self.name}{array[1]}" if array else f"{text} {self.name}"

    def internal(self) -> str:
        """The parameter as do_X takes it."""
        text = self.large.replace("const.", "const ")
        if self.large in _OBJECTS:
            return f"{_object_type(self.large)} *{self.name}"
        if self.is_made:
            return f"{_object_type(self.large[:-1])} **{self.name}"
        if self.is_poly and text.endswith("[]"):
            return f"Counts {self.name}"
        if self.is_poly:
            return f"MPI_Count{'*' if text.endswith('*') else ''} {self.name}"
        return self.declared(large=True)

    @property
    def is_made(self) -> bool:
        """Whether the parameter is a handle that the function makes."""
        return self.direction == "out" and self.large[:-1] in _OBJECTS and self.large.endswith("*")

    @property
    def is_place(self) -> bool:
        """Whether the parameter leads to one value that the function writes, so that NULL is an error."""
        target = self.large.removesuffix("*")
        is_one = target != self.large and (target in _OBJECTS or target in _NUMBERS)
        return is_one and self.direction in ("out", "inout") and self.kind not in _MAY_BE_LEFT_OUT


@dataclass(frozen=True)
class Function:
    """One function of MPI."""

    name: str
    returned: str
    parameters: tuple[Parameter, ...]

    @property
    def has_large(self) -> bool:
        return any(parameter.is_poly for parameter in self.parameters)

    def of_form(self, *, large: bool) -> list[Parameter]:
        return [one for one in self.parameters if (one.large if large else one.small)]

    def prototype(self, prefix: str, *, large: bool) -> str:
        declared = ", ".join(one.declared(large=large) for one in self.of_form(large=large)) or "void"
        return f"{self.returned} {prefix}{self.name}{'_c' if large else ''}({declared})"


def read_functions() -> list[Function]:
    """Read the functions of the standard, and those that it has removed and old programs call."""
    lines = [(HERE / "tables" / name).read_text() for name in ("functions.txt", "removed.txt")]
    return [_function(line) for line in "".join(lines).splitlines()]


def _function(line: str) -> Function:
    head, *rows = line.split("; ")
    returned, name = head.rsplit(" ", 1)
    parameters = []
    for row in rows:
        declared, parameter, direction, kind = row.split(" ")
        small, _, large = declared.partition("|") if "|" in declared else (declared, "", declared)
        parameters.append(Parameter(small, large, parameter, direction, kind))
    return Function(name, returned, tuple(parameters))


def _object_type(handle: str) -> str:
    return handle.removeprefix("MPI_")


def written() -> set[str]:
    """Names X for which there is a do_X."""
    pattern = re.compile(r"^[A-Za-z_][\w ]*[ *]do_(\w+)\(", re.MULTILINE)
    # Some are made in families, by macros: each is named in a comment of its own line, /* do_X */.
    listed = re.compile(r"/\* do_(\w+) \*/")
    texts = [path.read_text() for path in HERE.glob("*.c")]
    return {name for text in texts for name in [*pattern.findall(text), *listed.findall(text)]}


# ---- mpi.h ----


def header(face: str, functions: Iterable[Function]) -> str:
    """The text of ``mpi.h``: constants and prototypes."""
    parts = [
        f'/* Made by generate.py. */\n#ifndef MPI_H\n#define MPI_H\n#define FACE_{face.upper()} 1\n#include "face.h"\n'
    ]
    if face == "openmpi":
        for line in (HERE / "tables" / "openmpi_symbols.txt").read_text().splitlines():
            name, size = line.split()
            parts.append(f"extern char {name}[{size}];")
    column = FACES.index(face)
    for line in (HERE / "tables" / "constants.txt").read_text().splitlines():
        name, kind, *values = line.split()
        if values[column] != "-":
            parts.append(f"#define {name} {_constant(name, kind, values[column])}")
    # An error class that a face has not is the nearest that it has, or the most general one.
    classes = [(name, _NEAREST.get(name, "MPI_ERR_OTHER")) for name, _ in read_classes()]
    parts += [f"#ifndef {name}\n#define {name} {nearest}\n#endif" for name, nearest in classes]
    for function in functions:
        if function.name == "MPI_Pcontrol":
            parts.append("int MPI_Pcontrol(const int level, ...);\nint PMPI_Pcontrol(const int level, ...);")
            continue
        for large in (False, True) if function.has_large else (False,):
            parts += [function.prototype(prefix, large=large) + ";" for prefix in ("", "P")]
    return "\n".join([*parts, "#endif\n"])


_NEAREST: Final = {"MPI_ERR_ERRHANDLER": "MPI_ERR_ARG"}
_POINTERS: Final = {
    **dict.fromkeys(("MPI_BOTTOM", "MPI_IN_PLACE", "MPI_BUFFER_AUTOMATIC"), "void *"),
    **dict.fromkeys(("MPI_STATUS_IGNORE", "MPI_STATUSES_IGNORE"), "MPI_Status *"),
    **dict.fromkeys(("MPI_ERRCODES_IGNORE", "MPI_UNWEIGHTED", "MPI_WEIGHTS_EMPTY"), "int *"),
    "MPI_ARGV_NULL": "char **",
    "MPI_ARGVS_NULL": "char ***",
}


def _constant(name: str, kind: str, value: str) -> str:
    if value.startswith("@"):
        return f"(({kind})(void *){value[1:]})"
    if name in _POINTERS:
        return f"(({_POINTERS[name]})(intptr_t){value})"
    if kind in _OBJECTS:
        return f"(({kind}){'(intptr_t)' if kind == 'MPI_File' else ''}{value})"
    return f"({value})"


# ---- internal.h ----


def internal(functions: Iterable[Function], there: set[str]) -> str:
    """The text of ``internal.h``: prototypes of the functions that are written by hand."""
    parts = ["/* Made by generate.py: what is written by hand of every function. */"]
    for function in functions:
        name = function.name.removeprefix("MPI_")
        for large in (False, True) if function.name in _RAW else (True,):
            suffix = "_c" if large and function.name in _RAW else ""
            if name in there:
                parts.append(
                    f"INTERNAL {function.returned} do_{name}{suffix}({_internal_parameters(function, large)});"
                )
    return "\n".join([*parts, ""])


def _internal_parameters(function: Function, large: bool) -> str:
    if function.name in _RAW:
        chosen = function.of_form(large=large)
        return ", ".join(
            one.internal() if one.large in _OBJECTS or one.is_made else one.declared(large=large) for one in chosen
        )
    declared = ["..." if one.large == "..." else one.internal() for one in function.parameters]
    return ", ".join([*declared, *(["bool is_large"] if _TOLD_FORM.match(function.name) else [])]) or "void"


# ---- entries.c ----


def entries(functions: Iterable[Function], there: set[str]) -> str:
    """The text of ``entries.c``: the entry points."""
    parts = ['/* Made by generate.py: the entry points of MPI. */\n#include "core.h"\n#include "entry.h"\n']
    for function in functions:
        for large in (False, True) if function.has_large else (False,):
            parts.append(_entry(function, there, large))
    return "\n".join(parts)


def _entry(function: Function, there: set[str], large: bool) -> str:
    suffix = "_c" if large else ""
    full = f"{function.name}{suffix}"
    head = function.prototype("P", large=large)
    declared = head.partition("(")[2]
    weak = f'{function.returned} {full}({declared} __attribute__((weak, alias("P{full}")));'
    name = function.name.removeprefix("MPI_")
    if function.name == "MPI_Pcontrol":
        body = "    (void)level;\n    return MPI_SUCCESS;"
    elif function.returned != "int" or name.endswith("_toint"):
        body = _plain_body(function, name)
    elif is_refused(function, there):
        unused = "".join(f"    (void){one.name};\n" for one in function.of_form(large=large))
        body = f"{unused}    return {_refusal(function, full)};"
    else:
        body = _checked_body(function, full, large)
    return f"{head} {{\n{body}\n}}\n{weak}\n"


def is_refused(function: Function, there: set[str]) -> bool:
    """Whether a function is not carried: it is not written by hand, and cannot be generated."""
    name = function.name.removeprefix("MPI_")
    is_made = function.returned != "int" or name.endswith("_toint") or name == "Pcontrol"
    return name not in there and not is_made


def _refusal(function: Function, full: str) -> str:
    """The result of a function that is not carried; one of the tools' interface reports that there is no such thing."""
    if not full.startswith("MPI_T_"):
        return f'refuse_call("{full}")'
    if full.endswith("_get_index"):
        return "MPI_T_ERR_INVALID_NAME"
    asked = {part for one in function.parameters for part in one.name.split("_")}
    return "MPI_T_ERR_INVALID_INDEX" if "index" in asked else "MPI_T_ERR_INVALID_HANDLE"


def _plain_body(function: Function, name: str) -> str:
    """The body of functions that cannot fail: conversions between languages, and those that return a number."""
    convert = re.fullmatch(r"(\w+)_(c2f|f2c|toint|fromint)", name)
    handle = {"Type": "MPI_Datatype"}.get(convert[1], f"MPI_{convert[1]}") if convert else ""
    if convert and handle in _OBJECTS:
        one, kind = function.parameters[0].name, f"KIND_{_object_type(handle).upper()}"
        if convert[2] in ("c2f", "toint"):
            return f"    return ({function.returned})fortran_of({kind}, BITS({one}));"
        return f"    return ({handle})handle_of_fortran({kind}, (MPI_Fint){one});"
    return f"    return do_{name}({', '.join(one.name for one in function.parameters)});"


def _checked_body(function: Function, full: str, large: bool) -> str:
    lines: list[str] = []
    after: list[str] = []
    holder, is_kept = "", False
    # Opening a file concerns the handler of files, not that of the communicator.
    is_of_files = function.name.startswith("MPI_File_")
    holders = ("MPI_File",) if is_of_files else _HOLDERS
    chosen = function.of_form(large=large)
    may_be_null = _TAKE_NULLS.get(function.name, ())
    for one in chosen:
        handle = one.large if one.large in _OBJECTS else one.large[:-1]
        is_scalar = one.large == handle or (one.direction == "inout" and one.large == f"{handle}*")
        if handle in holders and is_scalar and not holder and one.direction != "out":
            of_null = f"{one.name} == NULL ? NULL : " if one.is_place else ""
            holder = f"{of_null}{_OBJECTS[handle]}_of({'*' if one.large != handle else ''}{one.name})"
            # Its handler is asked for when the object is over.
            is_kept = one.direction == "inout"
        if handle == "MPI_Message" and one.direction == "inout":
            holder, is_kept = f"{one.name} == NULL ? NULL : message_errors(*{one.name})", True
    if not _ANY_TIME.match(function.name):
        lines.append(f'    if (!is_running()) return not_running("{full}");')
    of_none = "file_errors()" if is_of_files else "NULL"
    lines.append(f"    void *holder_ = {holder or of_none};")
    if is_kept:
        lines.append("    keep(holder_);")
    lines.append("    int error_;")
    not_for_all = [name for pattern, names in _NOT_FOR_ALL if pattern.match(function.name) for name in names]
    for one in chosen:
        lines += _checks(one, large, may_be_null, is_for_all=one.name not in not_for_all)
        lines += _array_check(one, chosen, large=large)
        before, behind = _conversions(one, large, function.name in _RAW)
        lines += before
        after += behind
    arguments = ", ".join(
        _argument(one, large, function.name)
        for one in function.parameters
        if function.name not in _RAW or one in chosen
    )
    if _TOLD_FORM.match(function.name):
        arguments += f", {str(large).lower()}"
    suffix = "_c" if function.name in _RAW and large else ""
    lines.append(f"    error_ = do_{function.name.removeprefix('MPI_')}{suffix}({arguments});")
    if after:
        lines += ["    if (!error_) {", *(f"    {line}" for line in after), "    }"]
    # A label that nothing jumps to would be a warning.
    label = "end:\n" if any("goto end" in line for line in lines) else ""
    # Who frees or asks for what was not made gets the null handle, not what stood there before.
    none = [f"    if (error_ && {one.name}) *{one.name} = {_NULLS[one.large[:-1]]};" for one in chosen if one.is_made]
    if none:
        label = "\n".join([label.rstrip() or "    ;", *none, ""])
    if full.startswith("MPI_T_"):  # its errors have no handler
        lines = [line for line in lines if "holder_" not in line]
        lines.append(f"{label}    return error_;")
    else:
        chosen_holder = "holder_ ? holder_ : file_errors()" if is_of_files and holder else "holder_"
        end = f'end_call(error_, {chosen_holder}, "{full}")'
        if is_kept:
            lines += [f"{label}    error_ = {end};", "    let_go(holder_);", "    return error_;"]
        else:
            lines.append(f"{label}    return {end};")
    declarations = [line for line in lines if re.match(r"    (MPI_Count|[A-Z]\w+ \*)\w*_? ?", line) and "=" not in line]
    rest = [line for line in lines if line not in declarations]
    split = next(i for i, line in enumerate(rest) if "int error_" in line) + 1
    return "\n".join([*rest[:split], *declarations, *rest[split:]])


def _checks(one: Parameter, large: bool, may_be_null: tuple[str, ...], *, is_for_all: bool) -> list[str]:
    """The checks of an argument: handles that are none, and negative numbers of things."""
    if one.large in _OBJECTS:
        handle, name = one.large, _OBJECTS[one.large]
        lines = [f"    {_object_type(handle)} *{one.name}_;", f"    {one.name}_ = {name}_of({one.name});"]
        if not is_for_all:
            return lines
        condition = f"!{one.name}_"
        if handle in _NULL_ALLOWED or handle in may_be_null:
            condition += f" && {one.name} != {_NULLS[handle]}"
        null = _NULLS[handle]
        words = f'{one.name} == {null} ? "{one.name} is {null}" : "{one.name} is no such handle"'
        error = f"error_ = fail({_CLASSES[handle]}, {words})"
        return [*lines, f"    if ({condition}) {{ {error}; goto end; }}"]
    if one.is_place:
        return [f'    if (!{one.name}) {{ error_ = fail(MPI_ERR_ARG, "{one.name} is NULL"); goto end; }}']
    text = one.large if large else one.small
    if is_for_all and one.direction == "in" and text in ("int", "MPI_Count", "MPI_Aint"):
        if "NUM_ELEM_NNI" in one.kind or one.kind in ("POLYXFER_NUM_ELEM", "POLYNUM_BYTES_NNI"):
            return [_negative(one.name, "MPI_ERR_COUNT", large)]
        if one.kind in ("ARRAY_LENGTH", "ARRAY_LENGTH_NNI", "WINDOW_SIZE"):
            error = "MPI_ERR_SIZE" if one.kind == "WINDOW_SIZE" else "MPI_ERR_ARG"
            return [_negative(one.name, error, large)]
    return []


def _array_check(one: Parameter, chosen: list[Parameter], *, large: bool) -> list[str]:
    """The check of an array that has elements and so must not be NULL."""
    text = (one.large if large else one.small).removeprefix("const.")
    lengths = [
        length.name
        for length in chosen
        if length.direction == "in" and length.kind in _LENGTHS and (length.name == "count" or length.small == "int")
    ]
    is_array = text in {f"{element}[]" for element in _ELEMENTS} | {"int[][3]"}
    if not is_array or one.kind == "WEIGHT" or one.name in _OTHER_LENGTHS or len(lengths) != 1:
        return []
    error = f'error_ = fail(MPI_ERR_ARG, "{one.name} is NULL")'
    return [f"    if ({lengths[0]} > 0 && !{one.name}) {{ {error}; goto end; }}"]


def _negative(name: str, error: str, large: bool) -> str:
    words = f'"{name} is %lld, expected 0 or more", (long long){name}'
    return f"    if ({name} < 0) {{ error_ = fail({error}, {words}); goto end; }}"


def _conversions(one: Parameter, large: bool, raw: bool) -> tuple[list[str], list[str]]:
    """The lines before the call of do_X, and those after it if it succeeded."""
    if one.is_made:
        handle = one.large[:-1]
        kind = _object_type(handle)
        made = f"{one.name}_"
        back = f"    *{one.name} = {made} ? {_OBJECTS[handle]}_handle({made}) : {_NULLS[handle]};"
        return [f"    {kind} *{made};", f"    {made} = NULL;"], [back]
    if one.is_poly and one.large.endswith("*") and not raw:
        small = (one.large if large else one.small)[:-1]
        before = [
            f"    MPI_Count {one.name}_;",
            f"    {one.name}_ = {f'*{one.name}' if one.direction == 'inout' else '0'};",
        ]
        narrow = f"narrow({one.name}_)" if small == "int" else f"({small}){one.name}_"
        return before, [f"    *{one.name} = {narrow};"]
    return [], []


def _argument(one: Parameter, large: bool, function: str) -> str:
    text = one.large if large else one.small
    if one.large in _OBJECTS:
        return f"{one.name}_"
    if one.is_made:
        return f"&{one.name}_"
    if not text:
        return "NULL" if one.large.endswith(("*", "]")) else "0"
    if function in _RAW:
        return one.name
    if one.is_poly and text.endswith("[]"):
        return f"(Counts){{{one.name}, sizeof *{one.name}}}"
    if one.is_poly and text.endswith("*"):
        return f"&{one.name}_"
    return one.name


def read_classes() -> list[tuple[str, str]]:
    """Names and words of error classes, in the order of the numbers that cross the channel."""
    text = (HERE.parent / "calls" / "error_classes.py").read_text()
    return [(f"MPI_{name}", words) for name, words in re.findall(r'^    "(\w+)": "(.*)",$', text, re.MULTILINE)]


def classes() -> str:
    """Error classes and their words, by the numbers that cross the channel."""
    found = read_classes()
    words = [f'"{words}"' for _, words in found]
    return (
        "/* Made by generate.py from calls/error_classes.py. */\n"
        f"enum {{ NUM_LOWER_CLASSES = {len(found)} }};\n"
        f"static const int lower_classes[] = {{{', '.join(name for name, _ in found)}}};\n"
        f"static const char *const lower_texts[] = {{{', '.join(words)}}};\n"
    )


def symbols() -> str:
    """The symbols whose addresses are Open MPI's predefined handles."""
    lines = (HERE / "tables" / "openmpi_symbols.txt").read_text().splitlines()
    made = "".join(f"char {name}[{size}] __attribute__((aligned(64)));\n" for name, size in map(str.split, lines))
    return f"/* Made by generate.py. */\n{made}"


def fortran(face: str, functions: list[Function]) -> dict[str, str]:
    """The entry points for Fortran, and the numbers of predefined handles where they are no handles; by their file."""
    none = {"fortran_entries.c": "/* This face has none, or has them in a library apart. */\n"}
    if face == "abi":
        return none
    # This file is run as it lies there: the package need not be there yet.
    spec = importlib.util.spec_from_file_location("fortran", HERE / "fortran.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"reading {HERE / 'fortran.py'}: it is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entries = str(module.entries(functions))
    if face == "mpich":
        return {**none, "mpifort/entries.c": entries, "mpifort/f08_entries.c": str(module.entries_of_f08(functions))}
    constants = (line.split() for line in (HERE / "tables" / "constants.txt").read_text().splitlines())
    kinds = {name: kind for name, kind, *_ in constants}
    return {"fortran_entries.c": f"{entries}\n{module.numbers(HERE / 'tables' / 'openmpi_fortran.txt', kinds)}"}


def main(face: str, folder: str) -> None:
    """Write all that one face needs."""
    functions, there = read_functions(), written()
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    (into / "mpi.h").write_text(header(face, functions))
    (into / "internal.h").write_text(internal(functions, there))
    (into / "entries.c").write_text(entries(functions, there))
    (into / "classes.h").write_text(classes())
    for name, text in fortran(face, functions).items():
        (into / name).parent.mkdir(exist_ok=True)
        (into / name).write_text(text)
    (into / "symbols.c").write_text(symbols() if face == "openmpi" else "/* This face has none. */\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
