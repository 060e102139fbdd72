"""May workers with this script be forked of a process that has loaded torch already? Decided from what is written.

A script that imports torch or Remesh loads the same modules whoever loads them first, but for what it does before:

- it may set a variable that torch, OpenMP, NumPy or Python read only while they are loaded (``OMP_NUM_THREADS``), or
  one whose name stands elsewhere (``os.environ.update(settings)``);
- it may change where modules are found (``sys.path``), which they are, or on which processors they find themselves.

So workers are started plainly if the text of the script, or of a module of its author that is loaded before it or that
it imports, directly or not, has the name of such a variable, as a string or as a keyword, or does such a thing; and if
none of them imports torch or Remesh. Texts are searched for names: one in a comment counts too, which costs no more
than the saving. What else stands in the way is seen by the processes themselves
(:mod:`remesh.elasticity.node.preloaded`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

MAX_MODULES: Final = 500
"""More of them beside a script are not read."""
_FAMILIES: Final = """
    ACC AOT AOTINDUCTOR ATEN BLIS C10 COMPILE_STROBELIGHT CUTEDSL CUTLASS DNNL FX GFORTRAN GLIBC GOMP GOTO INDUCTOR
    INTEL I_MPI KINETO KMP LC LD MALLOC MKL MKLDNN MPMATH NPY NUMEXPR NUMPY OMP ONEDNN OPENBLAS OPENSSL PARTITIONER PT2
    SYMPY VECLIB
"""
_SINGLE: Final = """
    CI CUDA_MODULE_LOADING CXX DUMP_AOTI_MINIFIER ENABLE_PERSISTENT_TMA_MATMUL ENABLE_TEMPLATE_TMA_STORE
    ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE FAKE_ALLOW_META HOME LANG LANGUAGE LNAME LOGLEVEL LOGNAME LOG_AUTOTUNE_RESULTS
    LOG_TLPARSE MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE PATH SAGE_ROOT TEMP TMP TMPDIR TZ
    UNSAFE_SKIP_FSDP_MODULE_GUARDS USER USERNAME
"""
_NAMES: Final = (
    rf"(?:(?:{'|'.join(_FAMILIES.split())})_\w+|{'|'.join(_SINGLE.split())}"
    r"|(?!TORCHELASTIC_)(?:TORCH|PYTORCH|PYTHON|TRITON)[A-Z0-9]*(?:_[A-Z]\w*)?)"
)
_NAME: Final = re.compile(_NAMES)
_VARIABLE: Final = re.compile(rf"""["']({_NAMES})["']|[(,]\s*({_NAMES})\s*=(?!=)""")
# A variable whose name is no literal: a value, `f"..."`, or all that another mapping has.
_UNNAMED: Final = re.compile(
    r"""
      \benvironb? \s* \[ \s* (?: f["'] | [^"'\s\]] ) [^\]\n]* \] \s* =(?!=)
    | \benvironb? \s* \. \s* (?:update|setdefault|pop) \s* \( \s*
      (?: f["'] | \*\* | \{ \s* [^"'\s}] | \w[\w.]* \s* (?![\w\s.=]) )
    | \benvironb? \s* (?: \. \s* clear\b | \|= (?! \s* \{ \s* ["'] ) )
    | \bdel \s+ (?:os\s*\.\s*)? environb? \s* \[ \s* [^"'\s]
    | \b(?:un|)(?:put|set)env \s* \( \s* [^"'\s]
    | \bload_dotenv\b
    """,
    re.VERBOSE,
)
_ACT: Final = re.compile(
    r"""
      \bsys \s* \. \s* (?:path|meta_path|path_hooks)\b
    | \bsys \s* \. \s* modules \s* \[ [^\]\n]* \] \s* =(?!=)
    | \bfrom \s+ sys \s+ import\b | \bimport \s [\w.,\t ]* \bsys \s+ as\b
    | \baddsitedir\b | \bsetdlopenflags\b | \b(?:sched_set|cpu_)affinity\b | \bpatch_all\b
    | \brunpy\b | \bexec \s* \( \s* (?:compile \s* \( \s*)? open\b
    """,
    re.VERBOSE,
)
LOADED: Final = {"torch", "remesh"}
"""What is loaded before workers are forked."""


def is_read_while_loading(name: str) -> bool:
    """Whether it is a variable that torch, or what torch loads, may read while it is loaded, and never again."""
    return _NAME.fullmatch(name) is not None


def why_plain(script: str, text_of: Callable[[str], str | None], before: Sequence[str] = ()) -> str | None:
    """Why workers with a script of this name are started plainly; None when they may be forked.

    ``text_of`` gives the text of a module of the script's author, by its dotted name, and None where it is none of
    those; ``before`` names modules that Python loads before the script.

    >>> texts = {"train": "import setup\\nimport torch", "setup": "import os\\nos.environ['OMP_NUM_THREADS'] = '4'"}
    >>> why_plain("train", texts.get)
    'line 2 of setup names OMP_NUM_THREADS, which is read while modules are loaded'
    >>> why_plain("train", {"train": "import torch\\ntorch.manual_seed(1)"}.get) is None
    True
    """
    # The packages around a module are loaded before it.
    waiting = [*before, *_with_packages(script)]
    seen, num_read, imports_ours = {*waiting}, 0, False
    while waiting:
        name = waiting.pop()
        if (text := text_of(name)) is None:
            imports_ours |= name.partition(".")[0] in LOADED
            continue
        if why := _why_not(text):
            line = text.count("\n", 0, why[0]) + 1
            return f"line {line} of {name} {why[1]}"
        num_read += 1
        if num_read > MAX_MODULES:
            return f"it imports more than {MAX_MODULES} modules"
        try:
            new = {*_imported(name, text)} - seen
        except (SyntaxError, ValueError):
            return f"{name} is no Python that this interpreter can read"
        seen |= new
        waiting += sorted(new)
    return None if imports_ours else "it imports neither torch nor remesh"


def _why_not(text: str) -> tuple[int, str] | None:
    """Where a text has what speaks against forking, and what."""
    if found := _VARIABLE.search(text):
        return found.start(
            found.lastindex or 0
        ), f"names {found[1] or found[2]}, which is read while modules are loaded"
    if found := _UNNAMED.search(text):
        return found.start(), f"has {found[0]!r}, and may change variables that are read while modules are loaded"
    if found := _ACT.search(text):
        return found.start(), f"has {found[0]!r}, and may change what is loaded"
    return None


def _imported(name: str, text: str) -> Iterator[str]:
    """The modules that a text of this name may import, with the packages around them. SyntaxError if it cannot run."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names):
                whole = [alias.name for alias in names]
            case ast.ImportFrom(module, names, level):
                base = _absolute(name, module or "", level or 0)
                whole = [f"{base}.{alias.name}".strip(".") for alias in names]
            case ast.Call(
                ast.Name("__import__") | ast.Attribute(attr="import_module"), [ast.Constant(str(called)), *_]
            ):
                whole = [called]
            case _:
                continue
        for each in whole:
            yield from _with_packages(each)


def _absolute(name: str, module: str, level: int) -> str:
    """What ``from module import`` with so many dots means in a module of this name."""
    around = name.split(".")[:-level] if level else []
    return ".".join([*around, *filter(None, [module])])


def _with_packages(name: str) -> list[str]:
    """The packages around a module, the outermost first, and the module."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
