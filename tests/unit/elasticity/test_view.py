"""What an agent reads of the store: each thing once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from remesh.elasticity.membership.phases import Phase
from remesh.elasticity.membership.view import StoreReader, Wants
from remesh.elasticity.model.generation import Generation, MeshMember


def plan_of(number: int, nodes: Sequence[int]) -> Generation:
    members = tuple(MeshMember(rank, node, 0, 100 + node) for rank, node in enumerate(nodes))
    hosts = {node: f"node-{node}" for node in nodes}
    return Generation(number, {"dp": len(nodes)}, members, (), hosts, step=0, taken=True, reason="")


@dataclass
class Keys:
    """A store that counts what is asked of it."""

    values: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self.values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[Mapping[str, Any] | None]:
        self.asked.update(keys)
        return [self.values.get(key) for key in keys]

    def count(self, key: str) -> int:
        return 0

    def add_node(self, index: int) -> None:
        info = {"index": index, "name": f"node-{index}", "address": "10.0.0.1", "port": 1, "num_slots": 1}
        self.values[f"nodes/{index}"] = info


def test_nodes_of_a_plan_are_read_once_and_those_that_were_not_there_again() -> None:
    keys, reader = Keys(), StoreReader()
    wants = Wants(0, Phase.RUNNING, 0, False)
    for index in (0, 1):
        keys.add_node(index)
    keys.values["gen/1/plan"] = plan_of(1, [0, 1, 2]).to_json()
    for _ in range(3):
        reader.read(keys, wants)
    assert keys.asked == {"nodes/0": 1, "nodes/1": 1, "nodes/2": 3}
    keys.add_node(2)
    for _ in range(3):
        reader.read(keys, wants)
    assert keys.asked["nodes/2"] == 4 and set(reader.nodes) == {0, 1, 2}


class Lost(Keys):
    """A store that is lost as the members of a plan are asked for."""

    def get_all(self, keys: Sequence[str]) -> list[Mapping[str, Any] | None]:
        raise ConnectionError("the store is gone")


def test_a_plan_counts_once_its_members_are_known() -> None:
    """One that looks for the next store asks them, and an agent that knew their numbers alone ended as a defect."""
    keys, reader = Lost(), StoreReader()
    for index in (0, 1):
        keys.add_node(index)
    keys.values["gen/1/plan"] = plan_of(1, [0, 1]).to_json()
    with pytest.raises(ConnectionError):
        reader.read(keys, Wants(0, Phase.MEETING, 0, False))
    assert reader.plan is None
    view = reader.read(Keys(keys.values), Wants(0, Phase.MEETING, 0, False))
    assert view.plan == reader.plan == plan_of(1, [0, 1]) and set(reader.nodes) == {0, 1}
