import pytest

from remesh.elasticity.launch.mode import Mode, decide_mode


@pytest.mark.parametrize(
    "source",
    [
        "import remesh\ndef train(job): ...\nremesh.elastic(train, mesh={})",
        "import remesh as r\nif True:\n    r.elastic(1, mesh={})",
        "from remesh import elastic\nelastic(1)",
        "from remesh import save, elastic as go",
        "import remesh.elasticity",
        "from remesh.elasticity.job_api import elastic",
    ],
)
def test_script_that_names_us_keeps_its_processes(source: str) -> None:
    assert decide_mode(source).mode is Mode.IN_PROCESS
    assert "line" in decide_mode(source).reason


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n",
        "import remesh\nremesh.save({}, 'x')",
        "# remesh.elastic is not used here\nimport other\nother.elastic()",
        "text = 'import remesh; remesh.elastic(train)'",
        "import torch.distributed.elastic",
        "print 'an old script'",
        "\0",
        "",
    ],
)
def test_any_other_script_is_restarted_as_torchrun_does(source: str) -> None:
    assert decide_mode(source).mode is Mode.RESTART
