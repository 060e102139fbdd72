"""Pods on one machine, with the rules of a Kubernetes Job: what `examples/deploy/kubernetes.yaml` says is what runs.

A pod has namespaces of its own for network, process ids, mounts and its name; its first process has id 1. A pod that is
created again has another address, and the headless service's name of its index leads there. `PodCluster` is kubelet and
Job controller: an eviction is SIGTERM, a grace period, SIGKILL; `rules_after` is what an Indexed Job does with a pod
that has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from remesh.foundation.linux.procfs import children_of

_POLL_S = 0.05
_INIT = """
trap 'kill -TERM -1' TERM
"$@" & agent=$!
wait $agent; code=$?
while kill -0 $agent 2>/dev/null; do wait $agent; code=$?; done
exit $code
"""
"""A first process that passes SIGTERM on to every other one, as many images have it."""
_ENTER = """
hostname "$1"; mount --bind "$2" /etc/hosts; shift 2
exec "$@"
"""


class After(Enum):
    """What a Job does after a pod of an index has ended."""

    SUCCEEDED = "the index is complete, for good"
    AGAIN = "the pod is created again, and nothing is counted"
    COUNTED = "the pod is created again, and a failure of its index is counted"
    INDEX_FAILED = "the index has failed, for good"
    JOB_FAILED = "the Job has failed, and its pods are ended"


def rules_after(spec: Mapping[str, Any], code: int, *, is_disrupted: bool, num_failures: int) -> After:
    """What an Indexed Job of this spec does after a pod has ended with a code, and its index failed so often before.

    Source: Kubernetes, "Pod failure policy" and "Backoff limit per index". A pod whose container has ended with 0 has
    succeeded, evicted or not.
    """
    if code == 0:
        return After.SUCCEEDED
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        is_met = is_disrupted and any(one["type"] == "DisruptionTarget" for one in conditions)
        if codes is not None:
            is_met = (code in codes["values"]) == (codes["operator"] == "In")
        if is_met:
            by_action = {"Ignore": After.AGAIN, "FailIndex": After.INDEX_FAILED, "FailJob": After.JOB_FAILED}
            if rule["action"] in by_action:
                return by_action[rule["action"]]
            break
    return After.COUNTED if num_failures < spec["backoffLimitPerIndex"] else After.INDEX_FAILED


@dataclass
class Pod:
    """One pod, from its creation to its end."""

    index: int
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    is_disrupted: bool = False
    killed_at: float = float("inf")
    is_killed: bool = False

    def poll(self) -> int | None:
        """Exit code of its container, once it has ended; `unshare` does not pass on that it was killed."""
        code = self.process.poll()
        return 128 + signal.SIGKILL if code is not None and self.is_killed else code

    def signal_first(self, number: signal.Signals) -> None:
        """Send a signal to its process 1; SIGKILL ends all of it."""
        self.is_killed |= number is signal.SIGKILL
        for child in children_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)


@dataclass
class PodCluster:
    """The pods of one Indexed Job and its headless service. A context manager; `step` is one look of its controller."""

    job: Mapping[str, Any]
    folder: Path
    args: Sequence[str]
    """Of the container, in which $(POD_IP) and $(POD_NAME) are replaced."""
    backoff_s: float = 0.5
    pods: dict[int, Pod] = field(default_factory=dict)
    ended: list[tuple[int, int, After]] = field(default_factory=list)
    """Index, exit code and what followed, of each pod that has ended."""

    def __post_init__(self) -> None:
        self._spec = self.job["spec"]
        self._name = self.job["metadata"]["name"]
        self._subdomain = self._spec["template"]["spec"]["subdomain"]
        self._numbers = itertools.count()
        self._failures = dict.fromkeys(range(self._spec["completions"]), 0)
        self._due: dict[int, float] = dict.fromkeys(self._failures, 0.0)
        self.over: dict[int, After] = {}
        """Indexes that are complete or have failed."""
        self._addresses: dict[int, str] = {}
        self._switch = f"rmpod{os.getpid()}s"
        self._hosts = self.folder / "hosts"
        self._hosts.write_text("")

    def __enter__(self) -> PodCluster:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for index in list(self.pods):
            self.pods[index].signal_first(signal.SIGKILL)
            self.pods[index].process.kill()
            self.pods[index].process.wait(60)
            self._forget(self.pods.pop(index))
        _ip("netns", "del", self._switch)

    @property
    def is_over(self) -> bool:
        """Whether every index is complete or has failed."""
        return len(self.over) == len(self._failures)

    def evict(self, index: int, *, grace_s: float | None = None) -> None:
        """Ask a pod to leave, as a drain, a spot notice and a preemption by the scheduler do."""
        if grace_s is None:
            grace_s = self._spec["template"]["spec"]["terminationGracePeriodSeconds"]
        pod = self.pods[index]
        pod.is_disrupted, pod.killed_at = True, time.monotonic() + grace_s
        pod.signal_first(signal.SIGTERM)

    def lose_node(self, index: int) -> None:
        """End a pod without notice; its node is gone, which the control plane calls a disruption, too."""
        self.pods[index].is_disrupted = True
        self.pods[index].signal_first(signal.SIGKILL)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        """Run the controller until something is so; AssertionError with the pods' last lines after so many seconds."""
        limit = time.monotonic() + limit_s
        while not is_so():
            self.step()
            assert time.monotonic() < limit, f"after {limit_s} s not yet: {what}\n{self.story()}"
            time.sleep(_POLL_S)

    def step(self) -> None:
        """One look: kill what is past its grace, take note of what has ended, create what is due."""
        now = time.monotonic()
        for index, pod in list(self.pods.items()):
            if now > pod.killed_at:
                pod.signal_first(signal.SIGKILL)
            if (code := pod.poll()) is not None:
                self._end(index, self.pods.pop(index), code)
        for index, due in self._due.items():
            if index not in self.pods and index not in self.over and now >= due:
                self.pods[index] = self._create(index)

    def _end(self, index: int, pod: Pod, code: int) -> None:
        self._forget(pod)
        failures = self._failures[index]
        after = rules_after(self._spec, code, is_disrupted=pod.is_disrupted, num_failures=failures)
        self.ended.append((index, code, after))
        if after is After.COUNTED:
            self._failures[index] += 1
            self._due[index] = time.monotonic() + self.backoff_s * 2**failures
        elif after is not After.AGAIN:
            self.over[index] = after
        num_failed = sum(one is After.INDEX_FAILED for one in self.over.values())
        if after is After.JOB_FAILED or num_failed > self._spec["maxFailedIndexes"]:
            for other in self._failures:
                self.over.setdefault(other, After.JOB_FAILED)
            for left in self.pods.values():
                left.signal_first(signal.SIGKILL)

    def _create(self, index: int) -> Pod:
        number = next(self._numbers)
        address, namespace, link = f"10.99.{number // 200}.{number % 200 + 10}", self._namespace(number), f"p{number}"
        _ip("netns", "add", namespace)
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", link, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", link, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        host, self._addresses[index] = f"{self._name}-{index}", address
        self._write_hosts()
        known = {"$(POD_IP)": address, "$(POD_NAME)": f"{host}-{number:05d}"}
        command = [sys.executable, "-m", "remesh.run", *self.args]
        for variable, value in known.items():
            command = [word.replace(variable, value) for word in command]
        log = self.folder / f"pod-{index}-{number}.log"
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        entry = ["bash", "-c", _ENTER, "enter", host, str(self._hosts), "bash", "-c", _INIT, "init", *command]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        with log.open("wb") as output:
            words = ["ip", "netns", "exec", namespace, *alone, *entry]
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=self.folder)
        return Pod(index, number, process, log)

    def _forget(self, pod: Pod) -> None:
        self._addresses.pop(pod.index, None)
        self._write_hosts()
        _ip("netns", "del", self._namespace(pod.number))

    def _namespace(self, number: int) -> str:
        return f"rmpod{os.getpid()}n{number}"

    def _write_hosts(self) -> None:
        """In place: every pod has this very file for its own."""
        lines = ["127.0.0.1 localhost"]
        for index, address in self._addresses.items():
            host = f"{self._name}-{index}"
            lines.append(f"{address} {host}.{self._subdomain} {host}")
        with self._hosts.open("r+") as file:
            file.write("\n".join(lines) + "\n")
            file.truncate()

    def story(self) -> str:
        """What has ended how, and the last lines of each pod that runs."""
        lines = [f"pod of index {index} ended with {code}: {after.value}" for index, code, after in self.ended]
        for path in sorted(self.folder.glob("pod-*.log"), key=lambda path: path.stat().st_mtime)[-8:]:
            lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-6:]]
        return "\n".join(lines)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
