"""Stories of jobs, told as transcripts: what happens, then what the agents decide.

Each file of ``tests/scenarios`` is a list of commands, each followed by ``----`` and what it brought about. After a
change that is meant, ``REGENERATE=1 make test TESTS=tests/unit/elasticity/test_scenarios.py`` writes them anew: read
the difference.
"""

import os
import random
from pathlib import Path

import pytest

from remesh.elasticity.membership.exclusion import ExclusionRules
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.generation import MeetingRules
from remesh.elasticity.model.mesh_policy import format_axes
from tests.unit.elasticity.cluster import FakeCluster

FOLDER = Path(__file__).parents[2] / "scenarios"


_TOLD_NOTES = ("excluded", "straggler-kept")


class Teller:
    """Performs commands on a cluster and tells what is new after each."""

    def __init__(self) -> None:
        self._cluster: FakeCluster | None = None
        self._num_told = 0
        self._num_noted = 0
        self._ended: set[int] = set()

    def perform(self, command: str) -> list[str]:
        verb, *words = command.split()
        if verb == "job":
            options = dict(word.split("=") for word in words)
            num_nodes, tp = int(options["nodes"]), int(options["tp"])
            min_nodes = int(options.get("min", 1))
            meeting = MeetingRules(min_nodes, num_nodes, last_call_s=1.0, join_timeout_s=5.0, absence_timeout_s=20.0)
            exclusion = ExclusionRules(first_delay_s=float(options.get("delay", 30)))
            rules = AgentRules(
                int(options["workers"]), int(options["restarts"]), meeting, 10.0, 5.0, exclusion=exclusion
            )
            dp, last_step = int(options.get("dp", -1)), int(options.get("steps", 12))
            self._cluster = FakeCluster(rules, {"dp": dp, "tp": tp}, last_step=last_step, rng=random.Random(0))
            for _ in range(num_nodes):
                self._cluster.add_node()
            return []
        cluster = self._cluster
        assert cluster is not None, "a story begins with: job nodes=... workers=... tp=... restarts=..."
        match verb, [int(word) for word in words]:
            case "until-step", [step]:
                cluster.run_until_step(step)
            case "kill-node", [index]:
                cluster.kill_node(index)
            case "kill-worker", [index, slot]:
                cluster.kill_worker(index, slot)
            case "kill-in-vote", [index, slot]:
                cluster.kill_worker_while_voting(index, slot)
            case "slow", [index, slot, percent]:
                cluster.find_straggler(index, slot, percent / 100)
            case "preempt", [index]:
                cluster.preempt_node(index)
            case "start-node", []:
                cluster.add_node()
            case "settle", []:
                cluster.settle()
            case _:
                raise ValueError(f"no such command: {command!r}")
        return self._tell_news(cluster)

    def _tell_news(self, cluster: FakeCluster) -> list[str]:
        notes = [note for note in cluster.notes[self._num_noted :] if note.kind in _TOLD_NOTES]
        self._num_noted = len(cluster.notes)
        plans = cluster.generations()
        lines = [f"{note.kind}: {note.values['reason']}" for note in notes]
        lines += [
            f"generation {plan.number}: {format_axes(plan.axes)} from step {plan.step}: {plan.reason}"
            for plan in plans[self._num_told :]
        ]
        self._num_told = len(plans)
        for index, agent in sorted(cluster.agents.items()):
            if agent.finish is not None and index not in self._ended:
                self._ended.add(index)
                outcome = agent.finish.outcome
                lines.append(f"node-{index} ends {'well' if outcome.is_ok else 'badly'}: {outcome.text}")
        return lines


def retell(text: str) -> str:
    """The transcript that the commands of ``text`` bring about now."""
    teller = Teller()
    out = []
    for block in text.split("\n\n"):
        title = [line for line in block.splitlines() if line.startswith("#")]
        commands = block.partition("----")[0].splitlines()[len(title) :]
        told = [line for command in commands for line in teller.perform(command)]
        out.append("\n".join([*title, *commands, "----", *told]))
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_story_ends_as_it_is_told(path: Path) -> None:
    now = retell(path.read_text().rstrip("\n"))
    if os.environ.get("REGENERATE"):
        path.write_text(now)
    assert now == path.read_text()


def test_there_are_stories() -> None:
    assert list(FOLDER.glob("*.txt"))
