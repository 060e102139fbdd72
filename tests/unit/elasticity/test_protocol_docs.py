"""The protocol's page is what the machine's table says, and the table is what the machine does.

``REMESH_WRITE_DOCS=1`` writes the diagram anew.
"""

from __future__ import annotations

import ast
import os
import random
import re
from pathlib import Path

import pytest

from remesh.elasticity.membership.membership_machine import AgentMachine
from remesh.elasticity.membership.phase_state import PhaseState
from remesh.elasticity.membership.phases import ALLOWED, DEEDS, TRANSITIONS, Deed, Phase, draw_mermaid
from tests.unit.elasticity.test_membership import happen, make_cluster

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "elastic"
_DIAGRAM = re.compile(r"(```mermaid\n)(.*?)(```)", re.DOTALL)
_TEST = re.compile(r"\[`(\w+)`\]\(([^)]+\.py)\)")


def test_the_diagram_is_the_machines_table() -> None:
    page = FOLDER / "protocol.md"
    text = page.read_text()
    if os.environ.get("REMESH_WRITE_DOCS"):
        page.write_text(_DIAGRAM.sub(lambda found: found[1] + draw_mermaid() + found[3], text))
    found = _DIAGRAM.search(page.read_text())
    assert found is not None
    assert found[2] == draw_mermaid(), "the protocol's diagram is old; write it anew with REMESH_WRITE_DOCS=1"


def test_a_pair_of_phases_has_one_row_and_all_phases_are_there() -> None:
    assert len(ALLOWED) == len(TRANSITIONS)
    assert {phase for pair in ALLOWED for phase in pair} == set(Phase)


def test_a_change_that_is_not_in_the_table_is_refused() -> None:
    cluster = make_cluster(num_nodes=1)
    with pytest.raises(AssertionError, match="no way from"):
        cluster.agents[0].machine._set_phase(Phase.LEAVING, 0.0)


def test_what_is_done_once_has_its_phases() -> None:
    assert DEEDS.keys() == set(Deed)
    with pytest.raises(AssertionError, match="does not belong to"):
        PhaseState(Phase.RUNNING).first(Deed.FINISH)


def test_every_row_of_the_table_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random stories of deaths, joins and frozen nodes; and what is done once in a phase is done in one of its."""
    seen: set[tuple[Phase, Phase]] = set()
    done: dict[Deed, set[Phase]] = {deed: set() for deed in Deed}
    elsewhere = (Deed.ASK_BACK, Deed.KILL)  # stories of their own, in test_scenarios and test_membership
    set_phase, first = AgentMachine._set_phase, PhaseState.first

    def watch(self: AgentMachine, phase: Phase, now_s: float) -> None:
        seen.add((self.phase, phase))
        set_phase(self, phase, now_s)

    def watch_deed(self: PhaseState, deed: Deed, detail: object = None) -> bool:
        done[deed].add(self.phase)
        return first(self, deed, detail)

    monkeypatch.setattr(AgentMachine, "_set_phase", watch)
    monkeypatch.setattr(PhaseState, "first", watch_deed)
    for seed in range(400):
        cluster = make_cluster(num_nodes=3, max_restarts=seed % 3, seed=seed)
        rng = random.Random(seed)
        for _ in range(40):
            happen(cluster, rng)
        for index in cluster.agents:
            cluster.thaw_node(index)
        cluster.settle(200)
        if seen == ALLOWED and all(done[deed] for deed in Deed if deed not in elsewhere):
            assert all(phases <= DEEDS[deed] for deed, phases in done.items())
            return
    never = [deed.name for deed in Deed if not done[deed]]
    pytest.fail(f"never seen: {[(a.value, b.value) for a, b in ALLOWED - seen]}, never done: {never}")


def test_every_test_that_the_failure_matrix_names_exists() -> None:
    named = _TEST.findall((FOLDER / "failures.md").read_text())
    assert len(named) >= 10
    for name, link in named:
        path = (FOLDER / link).resolve()
        functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"docs/elastic/failures.md names {name}, which is not in {path.relative_to(ROOT)}"


def test_every_kind_of_fault_of_the_soak_is_in_the_failure_matrix() -> None:
    text = (FOLDER / "failures.md").read_text()
    story = ast.parse((ROOT / "tests" / "procs" / "chaos" / "story.py").read_text())
    (kinds,) = [node for node in story.body if isinstance(node, ast.ClassDef) and node.name == "Kind"]
    names = [node.value.value for node in kinds.body if isinstance(node, ast.Assign)]
    missing = [name for name in names if f"`{name}`" not in text]
    assert len(names) == 10 and not missing, missing
