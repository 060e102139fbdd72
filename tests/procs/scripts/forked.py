"""What a forked process does to run one program, or one command of ours. `forked_programs` gives it the capitals."""

# ruff: noqa: F821
import ctypes
import faulthandler
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile

from tests.procs import main_script

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
os.environ.clear()  # what the server had when it was started
os.environ.update(ENVIRONMENT)
tempfile.tempdir = None  # the next who asks finds it by these variables
if WORDS[0] == "-m":
    sys.argv = list(WORDS[1:])
    sys.path[0] = FOLDER
    runpy.run_module(WORDS[1], run_name="__main__", alter_sys=True)
else:
    main_script.run(WORDS)
