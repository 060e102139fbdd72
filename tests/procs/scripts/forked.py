"""What a forked process does to run one program or command of a page. `runner` gives it the names in capitals."""

# ruff: noqa: F821
import os
import runpy
import sys

log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
os.chdir(FOLDER)
os.environ.update(ENVIRONMENT)
sys.argv = list(WORDS)
sys.path[0] = FOLDER
if WORDS[0] == "remesh":
    from remesh.cli import main

    main(prog_name="remesh")
else:
    runpy.run_path(WORDS[0], run_name="__main__")
