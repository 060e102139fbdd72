"""A script runs in a process that was forked, and has loaded much already, as Python runs one."""

import os
import sys
import types
from collections.abc import Sequence


def run(words: Sequence[str]) -> None:
    """Run a script with its arguments as ``__main__``; what it has lasts as long as the process."""
    sys.argv = list(words)
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    program = types.ModuleType("__main__")
    program.__file__ = words[0]
    # What a program has, Python lets go of last of all; `runpy` does at the program's last line. There torch may stand
    # still: who lets go of a group of gloo waits, and holds the interpreter, for gloo's thread, which needs that to let
    # go of a tensor. Here all lasts as long as the process, under the second name that `multiprocessing` has for it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program
    with open(words[0], "rb") as source:
        code = compile(source.read(), words[0], "exec", dont_inherit=True)
    exec(code, vars(program))
