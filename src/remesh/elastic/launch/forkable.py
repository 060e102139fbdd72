"""May workers with this script be forked of a process that has loaded torch already? Decided from what is written.

A script that imports torch or Remesh loads the same modules whoever loads them first, but for what it does before:

- it may set a variable that torch, OpenMP, NumPy or Python read only while they are loaded (``OMP_NUM_THREADS``);
- it may change where modules are found (``sys.path``).

So workers are started plainly if the text of the script, or of a module beside it that it imports, directly or not,
has the name of such a variable, as a string or as a keyword, or ``sys.path``; and if none of them imports torch or
Remesh. Texts are searched, not parsed: a name in a comment counts too, which costs no more than the saving. What else
stands in the way is seen by the processes themselves (:mod:`remesh.elastic.node.preloaded`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

MAX_MODULES: Final = 500
"""More of them beside a script are not read."""
_NAMES: Final = (
    r"(?:(?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|GOTO|NUMEXPR|VECLIB|NPY|NUMPY|LD|MALLOC|GLIBC|ATEN|C10|KINETO|LC)_[A-Z]\w*"
    r"|(?:TORCH|PYTORCH|PYTHON|TRITON)[A-Z0-9]*(?:_[A-Z]\w*)?|LANG|LANGUAGE|TZ|TMPDIR|HOME|PATH|CUDA_MODULE_LOADING)"
)
_VARIABLE: Final = re.compile(rf"""["']({_NAMES})["']|\b({_NAMES})\s*=(?!=)""")
_PATH: Final = re.compile(r"\bsys\s*\.\s*(?:path|meta_path|path_hooks)\b|\bfrom\s+sys\s+import\b")
_IMPORT: Final = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t(\\]*(.*)|import[ \t]+(.+))", re.MULTILINE)
_LOADED: Final = {"torch", "remesh"}


def why_plain(script: str, text_of: Callable[[str], str | None]) -> str | None:
    """Why workers with a script of this name are started plainly; None when they may be forked.

    ``text_of`` gives the text of a module of the script's folder, by its dotted name, and None where there is none.

    >>> texts = {"train": "import setup\\nimport torch", "setup": "import os\\nos.environ['OMP_NUM_THREADS'] = '4'"}
    >>> why_plain("train", texts.get)
    'line 2 of setup names OMP_NUM_THREADS, which is read while modules are loaded'
    >>> why_plain("train", {"train": "import torch\\ntorch.manual_seed(1)"}.get) is None
    True
    """
    waiting, seen, imports_ours = [script], {script}, False
    while waiting:
        name = waiting.pop()
        if (text := text_of(name)) is None:
            imports_ours |= name.partition(".")[0] in _LOADED
            continue
        if why := _why_not(text):
            line = text.count("\n", 0, why[0]) + 1
            return f"line {line} of {name} {why[1]}"
        if len(seen) > MAX_MODULES:
            return f"it imports more than {MAX_MODULES} modules"
        new = {*_imported(name, text)} - seen
        seen |= new
        waiting += sorted(new)
    return None if imports_ours else "it imports neither torch nor remesh"


def _why_not(text: str) -> tuple[int, str] | None:
    """Where a text has what speaks against forking, and what."""
    if found := _VARIABLE.search(text):
        return found.start(), f"names {found[1] or found[2]}, which is read while modules are loaded"
    if found := _PATH.search(text):
        return found.start(), f"has {found[0]!r}, and may change what is loaded"
    return None


def _imported(name: str, text: str) -> Iterator[str]:
    """The modules that a text of this name may import, with the packages around them."""
    for found in _IMPORT.finditer(text):
        if found[3]:
            whole = [part.split()[0] for part in found[3].split(",") if part.strip()]
        else:
            base = _absolute(name, found[1])
            whole = [f"{base}.{one}".strip(".") for one in re.findall(r"\w+", found[2])] or [base]
        for each in whole:
            parts = each.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _absolute(name: str, imported: str) -> str:
    """What ``from imported import`` means in a module of this name."""
    module = imported.lstrip(".")
    level = len(imported) - len(module)
    around = name.split(".")[:-level] if level else []
    return ".".join([*around, *filter(None, [module])])
