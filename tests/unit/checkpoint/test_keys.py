"""Keys of plain values: each comes back under the key that it was saved under, and no other key stands for it."""

from __future__ import annotations

import enum
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, open_any
from remesh.checkpoint.storage import location_of
from remesh.cli import main
from tests.profiles import seeds


class Number(enum.IntEnum):
    ONE = 1


class Colour(enum.Enum):
    RED = 1


KEYS: list[Any] = [
    *("1", 1, True, 1.0, "1.0", 1 + 0j, "True", None, "None", 2.5, "2.5", (1, 2), "(1, 2)", b"1", "b'1'"),
    *("a.b", "Colour.RED", "", float("inf"), -1, "-1"),
]
"""Some pairs are one key to Python (1, True and 1.0), some have one text (1 and "1")."""
ASKED = [*KEYS, Number.ONE, Colour.RED]


class Holder:
    """An object that keeps a state dict."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("stored", KEYS, ids=repr)
def test_a_value_is_given_for_its_own_key_and_refused_for_every_other(tmp_path: Path, stored: Any) -> None:
    remesh.save({"d": {stored: 5, "t": torch.ones(1)}, "o": Holder({stored: 6})}, tmp_path)
    for asked in ASKED:
        place = Holder({asked: 0})
        state = {"d": {asked: 0, "t": torch.zeros(1)}, "o": place}
        if asked == stored:
            loaded = remesh.load(state, tmp_path)
            assert (loaded["d"][asked], place.state) == (5, {stored: 6}), asked
            continue
        with pytest.raises(
            CheckpointMismatchError, match="2 keys that are asked for are not in the checkpoint"
        ) as told:
            remesh.load(state, tmp_path)
        assert ("a key of another type is another key" in str(told.value)) == (str(asked) == str(stored))
        assert place.state == {asked: 0}


@pytest.mark.parametrize("stored", [1, "1"])
def test_tensors_go_by_their_names_whatever_their_keys(tmp_path: Path, stored: Any) -> None:
    """As with native torch, which has names only; what is plain beside them is refused for another key."""
    remesh.save({"state": {stored: {"w": torch.ones(2), "lr": 0.5}}}, tmp_path)
    for asked in (1, "1"):
        loaded = remesh.load({"state": {asked: {"w": torch.zeros(2)}}}, tmp_path)
        assert loaded["state"][asked]["w"].tolist() == [1, 1] and loaded["state"][stored]["lr"] == 0.5
        if asked != stored:
            with pytest.raises(CheckpointMismatchError, match=r"'state', '?1'?, 'lr'.* are stored, a key of another"):
                remesh.load({"state": {asked: {"w": torch.zeros(2), "lr": 0.0}}}, tmp_path)


def test_a_key_with_a_dot_is_no_dict_in_a_dict(tmp_path: Path) -> None:
    remesh.save({"a.b": 1, "c": {"d": 2}}, tmp_path)
    for asked in ({"a": {"b": 0}}, {"c.d": 0}):
        with pytest.raises(CheckpointMismatchError, match="a key of another type is another key"):
            remesh.load(asked, tmp_path)


def test_what_may_be_absent_keeps_its_value_under_another_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remesh.save({"d": {1: 5}}, tmp_path)
    assert remesh.load({"d": {"1": 0}}, tmp_path, strict=False) == {"d": {1: 5, "1": 0}}
    assert "1 keys are not in it and keep their values, 'd.1'" in caplog.text


def draw(chance: random.Random, depth: int) -> dict[Any, Any]:
    """A nest of dicts with keys of all kinds, of which some have one text."""
    keys = chance.sample(KEYS, chance.randint(1, 6))
    return {
        key: draw(chance, depth - 1) if depth and chance.random() < 0.4 else chance.choice([chance.random(), {}])
        for key in keys
    }


def num_leaves(nest: Any) -> int:
    return sum(map(num_leaves, nest.values())) if isinstance(nest, dict) and nest else 1


def has_clash(nest: Any) -> bool:
    """Whether two of its values, or a value and a dict, have one name; a key with a dot may make one."""
    if not isinstance(nest, dict):
        return False
    texts = [*map(str, nest)]
    return len({*texts}) < len(texts) or any("." in one for one in texts) or any(map(has_clash, nest.values()))


@pytest.mark.parametrize("seed", seeds(60, quick=20))
def test_nests_of_all_keys_come_back_are_shown_whole_and_are_converted_or_refused(tmp_path: Path, seed: int) -> None:
    nest = draw(random.Random(seed), 3)
    remesh.save({"d": nest}, tmp_path / "c")
    assert remesh.load({"d": nest}, tmp_path / "c") == {"d": nest}
    shown = CliRunner().invoke(main, ["ckpt", "show", "--json", str(tmp_path / "c")])
    assert shown.exit_code == 0, shown.output
    assert num_leaves(json.loads(shown.output)["common"]) == num_leaves(nest)
    contents = gather_contents([open_any(location_of(tmp_path / "c"))])
    try:
        convert(contents, location_of(tmp_path / "dcp"), Format.DCP)
    except CheckpointMismatchError as told:
        assert "two common values would both be called" in str(told) and has_clash(nest), told
    else:
        assert remesh.load({"d": nest}, tmp_path / "dcp") == {"d": nest}
