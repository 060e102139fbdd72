"""Words of the command that need no torch load none: what each loads is listed, not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

_LINES = (
    *(
        "--help",
        "--version",
        "fly",
        "run --help",
        "ckpt --help",
        "ckpt ls --help",
        "ckpt ls no-such-folder",
        "ckpt lst",
    ),
    *("mpi ls", "torch ls", "pipeline compare --stages 2 -m 2", "testbed --help", "top no-such-folder"),
    "plan --shape 4,4 --src S0R@2x2 --dst RS0@2x2",
)
_HEAVY = ("torch", "fsspec", "starlette", "uvicorn", "safetensors")
# `remesh run` takes its flags from torchrun, and what a checkpoint holds is read with torch: these may load it.
_LOAD_TORCH = {"run --help": ["torch"]}
_CODE = """
import json, sys
from remesh.cli import main
new = []
for line in json.loads(sys.argv[1]):
    before = set(sys.modules)
    try:
        main(line.split())
    except SystemExit:
        pass
    new.append(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print(json.dumps(new))
"""


def test_words_that_need_no_torch_load_none(tmp_path: Path) -> None:
    lines = sorted(_LINES, key=lambda line: line in _LOAD_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    for line, loaded in zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert {*loaded} & {*_HEAVY} <= {*_LOAD_TORCH.get(line, ())}, f"remesh {line} loads {loaded}"
