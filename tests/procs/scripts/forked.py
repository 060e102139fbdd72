"""What a forked process does to run one program, or one command of ours. `forked_programs` gives it the capitals."""

# ruff: noqa: F821
import ctypes
import faulthandler
import multiprocessing.forkserver
import os
import signal
import sys
import types

# Told by the server from which this process was forked: children of the program would be made by such a server, too.
multiprocessing.set_start_method(None, force=True)
# It ends with that server, and the server with those who have this descriptor: nothing outlives who runs the program.
os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
os.setsid()
for descriptor, path in ((1, OUTPUT), (2, ERRORS)):
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, descriptor)
    os.close(log)
faulthandler.enable(2)
os.chdir(FOLDER)
os.environ.update(ENVIRONMENT)
sys.argv = list(WORDS)
if WORDS[0] == "remesh":
    from remesh.cli import main

    sys.path[0] = FOLDER
    main(prog_name="remesh")
else:
    sys.path[0] = os.path.dirname(os.path.abspath(WORDS[0]))
    program = types.ModuleType("__main__")
    program.__file__ = WORDS[0]
    # What a program has, Python lets go of last of all; `runpy` does at the program's last line. There torch may stand
    # still: who lets go of a group of gloo waits, and holds the interpreter, for gloo's thread, which needs that to let
    # go of a tensor. Here all lasts as long as the process, under the second name that `multiprocessing` has for it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program
    with open(WORDS[0], "rb") as source:
        code = compile(source.read(), WORDS[0], "exec", dont_inherit=True)
    exec(code, vars(program))
