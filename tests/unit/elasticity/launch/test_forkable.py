"""Which scripts may be forked of a process that has loaded torch already."""

from __future__ import annotations

import pytest

from remesh.elasticity.launch.forkable import MAX_MODULES, why_plain


def _why(text: str, **beside: str) -> str | None:
    return why_plain("train", {"train": text, **{name.replace("__", "."): text for name, text in beside.items()}}.get)


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "def main():\n    from torch.nn import functional",
        "import os, torch",
        "import remesh\nremesh.elastic(train, mesh={'dp': -1})",
        "import torch\nimport os\nprint(os.environ['RANK'], os.environ.get('LOCAL_RANK'))",
        "import torch\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "import torch\nthreads = 'many'\nsystem_path = 1",
        "import torch\nPATH = 'data'\nLANG = 'en'",
        "import torch\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])",
        "import torch\nos.environ['MASTER_ADDR'] = host\nos.environ.setdefault('MASTER_PORT', '1')\nd.update(x)",
        "import torch\nprint(os.environ[name], os.environ[name] == 'x', os.environ.get(name))",
        "import torch\nos.environ.update({'NCCL_DEBUG': 'INFO'})\nos.environ |= {'HF_HOME': '/x'}",
    ],
)
def test_a_script_that_loads_torch_may_be_forked(text: str) -> None:
    assert _why(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('hello')", "it imports neither torch nor remesh"),
        ("import torchvision", "it imports neither"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "line 2 of train names OMP_NUM_THREADS"),
        ('import os\n\nos.environ.update({"MKL_NUM_THREADS": "4"})\nimport torch', "line 3 of train names MKL"),
        ("os.environ.update(OMP_NUM_THREADS='4')\nimport torch", "names OMP_NUM_THREADS"),
        ("os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', '')\nimport torch", "names PYTORCH_CUDA_ALLOC_CONF"),
        ("os.putenv('TORCHINDUCTOR_CACHE_DIR', '/x')\nimport torch", "names TORCHINDUCTOR_CACHE_DIR"),
        ("os.environ['ONEDNN_DEFAULT_FPMATH_MODE'] = 'BF16'\nimport torch", "names ONEDNN_DEFAULT_FPMATH_MODE"),
        ("settings = dict(a=1,\n    OMP_NUM_THREADS='4')\nimport torch", "line 2 of train names OMP_NUM_THREADS"),
        ("for k, v in values:\n    os.environ[k] = v\nimport torch", "line 2 of train has 'environ[k] ='"),
        ("os.environ[f'OMP_{what}'] = v\nimport torch", "may change variables"),
        ("os.environ.update(settings)\nimport torch", "may change variables"),
        ("os.environ.update(**settings)\nimport torch", "may change variables"),
        ("os.environ.update({k: str(v) for k, v in pairs})\nimport torch", "may change variables"),
        ("os.environ |= settings\nimport torch", "may change variables"),
        ("os.environ.setdefault(name, '1')\nimport torch", "may change variables"),
        ("os.environ.pop(name, None)\nimport torch", "may change variables"),
        ("del os.environ[name]\nimport torch", "may change variables"),
        ("os.environ.clear()\nimport torch", "may change variables"),
        ("os.putenv(name, '1')\nimport torch", "may change variables"),
        ("libc.setenv(name, b'1', 1)\nimport torch", "may change variables"),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", "may change variables"),
        ("import os, sys as system\nsystem.path.append('x')\nimport torch", "'import os, sys as'"),
        ("import site\nsite.addsitedir('x')\nimport torch", "'addsitedir'"),
        ("sys.modules['triton'] = None\nimport torch", "may change what is loaded"),
        ("sys.setdlopenflags(os.RTLD_GLOBAL)\nimport torch", "'setdlopenflags'"),
        ("os.sched_setaffinity(0, {0})\nimport torch", "'sched_setaffinity'"),
        ("from gevent import monkey\nmonkey.patch_all()\nimport torch", "'patch_all'"),
        ("exec(open('settings.py').read())\nimport torch", "may change what is loaded"),
        ("import torch\nprint 'hello'", "train is no Python that this interpreter can read"),
        ("import sys\nsys.path.insert(0, 'vendored')\nimport torch", "line 2 of train has 'sys.path'"),
        ("from sys import path\nimport torch", "line 1 of train has 'from sys import'"),
    ],
)
def test_a_script_that_may_change_what_is_loaded_is_started_plainly(text: str, reason: str) -> None:
    assert reason in (_why(text) or "it may be forked")


def test_modules_beside_the_script_are_read_too() -> None:
    wrong = "import os\nos.environ['OMP_NUM_THREADS'] = '4'"
    reason = "names OMP_NUM_THREADS"
    assert _why("import settings\nimport torch", settings="") is None
    assert reason in (_why("import settings\nimport torch", settings=wrong) or "")
    assert reason in (_why("from lib import a, settings\nimport torch", lib="", lib__settings=wrong) or "")
    assert reason in (_why("import lib.part as part\nimport torch", lib=wrong, lib__part="") or "")
    assert reason in (_why("import lib.part", lib="", lib__part="from . import more", lib__more=wrong) or "")
    assert reason in (_why("import lib.part", lib="", lib__part="from .more import x", lib__more=wrong) or "")
    assert reason in (_why("from lib import (\n    a,\n    settings,\n)", lib="", lib__settings=wrong) or "")
    assert reason in (_why("import json; import settings", settings=wrong) or "")
    assert reason in (_why("import importlib\nimportlib.import_module('settings')", settings=wrong) or "")
    # Nobody imports this one.
    assert _why("import torch", settings=wrong) is None


def test_what_is_loaded_before_the_script_is_read_too() -> None:
    texts = {"lib": "os.environ['OMP_NUM_THREADS'] = '4'", "lib.train": "import torch", "site": "import lib"}
    assert "of lib names OMP_NUM_THREADS" in (why_plain("lib.train", texts.get) or "")
    assert "of lib names OMP_NUM_THREADS" in (why_plain("train", {**texts, "train": ""}.get, ["site"]) or "")


def test_a_script_loads_torch_by_a_module_beside_it_too() -> None:
    assert _why("import model", model="import torch") is None
    assert _why("import model", model="import json") == "it imports neither torch nor remesh"
    # torch.py beside the script is not torch.
    assert _why("import torch", torch="") == "it imports neither torch nor remesh"


def test_no_more_than_some_modules_are_read() -> None:
    beside = {f"m{n}": f"import m{n + 1}" for n in range(2 * MAX_MODULES)}
    assert _why("import torch, m0", **beside) == f"it imports more than {MAX_MODULES} modules"
