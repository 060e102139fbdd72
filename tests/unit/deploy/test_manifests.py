"""What we give to clusters is what their schema tools accept, and uses flags that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remesh.cli.run import run
from tests.support.pods import After, rules_after

DEPLOY = Path(__file__).resolve().parents[3] / "examples" / "deploy"
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra test")
yaml = pytest.importorskip("yaml", reason="needs PyYAML, which kubernetes-validate brings")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def flags_of_run() -> set[str]:
    return {name for parameter in run.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("at", [0, 1], ids=["service", "job"])
def test_manifests_are_valid_for_kubernetes(at: int) -> None:
    kubernetes_validate.validate(documents()[at], "1.33", strict=True)


def test_the_validator_refuses_what_is_wrong() -> None:
    job = documents()[1]
    job["spec"]["completionMood"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError, match="completionMood"):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_the_service_finds_the_pods_and_names_hosts_of_the_store() -> None:
    service, job = documents()
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    hosts = [f"{job['metadata']['name']}-{index}.{service['metadata']['name']}:29400" for index in range(3)]
    assert f"--rdzv-endpoint={','.join(hosts)}" in pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("code", "is_disrupted", "num_failures", "after"),
    [
        (0, False, 0, After.SUCCEEDED),
        (0, True, 0, After.SUCCEEDED),  # a pod that has ended with 0 never comes back, evicted or not
        (80, False, 0, After.AGAIN),
        (81, False, 20, After.AGAIN),
        (137, True, 20, After.AGAIN),
        (137, False, 0, After.COUNTED),
        (1, False, 19, After.COUNTED),
        (1, False, 20, After.INDEX_FAILED),
    ],
)
def test_what_the_job_does_after_a_pod(code: int, is_disrupted: bool, num_failures: int, after: After) -> None:
    spec = documents()[1]["spec"]
    assert rules_after(spec, code, is_disrupted=is_disrupted, num_failures=num_failures) is after


def test_every_flag_is_one_of_remesh_run() -> None:
    arguments = documents()[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    used = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    used |= set(re.findall(r"^ {4}(--[a-z-]+)", (DEPLOY / "slurm.sh").read_text(), re.MULTILINE))
    assert len(used) >= 7
    assert used <= flags_of_run()


@pytest.mark.procs
def test_the_batch_script_is_sound_shell_and_its_options_are_slurms() -> None:
    script = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    # Long options of sbatch, from its manual page.
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "requeue", "open-mode"}
    assert set(options) <= known | {"signal", "no-kill"}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck, not on the path")
def test_the_batch_script_passes_shellcheck() -> None:
    # What bash -c is given in single quotes is expanded on the nodes, not here.
    done = subprocess.run(
        ["shellcheck", "-e", "SC2016", DEPLOY / "slurm.sh"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
