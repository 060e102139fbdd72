"""Eight ways to take a request that does not fit, where it fits on some ranks only, and however deep it stands."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.mapping import ShardedTensorFactory
from remesh.testbed.pool import RankPool

pytestmark = pytest.mark.procs
CULPRIT = 2
Answer = tuple[str, str, frozenset[str], frozenset[str], tuple[str, ...]]
"""Kind of the error or none, its text, keys told missing and unexpected, paths that were loaded."""


def mine() -> tuple[int, int, int]:
    return 0, dist.get_rank(), dist.get_world_size()


def part(key: str, value: float = 0.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value + dist.get_rank()), mine())


def halves(key: str, *place: tuple[int, int, int]) -> ShardedTensorFactory:
    """Two stored tensors behind one of the program's."""

    def build(key: str, data: torch.Tensor, *_: Any) -> dict[str, ShardedTensor]:
        made = zip(("first", "second"), data.chunk(2), strict=True)
        return {name: ShardedTensor.from_rank_offsets(f"{key}.{name}", one, *place) for name, one in made}

    return ShardedTensorFactory(key, torch.zeros(4), build, lambda loaded: torch.cat(list(loaded.values())))


def save_nested(directory: Path) -> None:
    state = {
        "layers": [{"w": part("w0", 10.0)}, {"w": part("w1", 20.0)}],
        "mlp": {"fc": halves("fc", mine())},
        "spare": part("spare"),
    }
    dist_checkpointing.save(state, directory)


def load_unfit(directory: Path, strict: str) -> Answer:
    """Nobody asks for ``spare``; one rank alone asks for ``novel``, in a list, and for a factory's ``gone`` halves."""
    request: dict[str, Any] = {"layers": [{"w": part("w0")}, {"w": part("w1")}], "mlp": {"fc": halves("fc", mine())}}
    if dist.get_rank() == CULPRIT:
        request["layers"][1]["extra"] = ShardedTensor.from_rank_offsets("novel", torch.zeros(2))
        request["mlp"]["more"] = {"deep": halves("gone")}
    logger = logging.getLogger("remesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        found: Any = dist_checkpointing.load(request, directory, strict=strict)
    except Exception as error:
        return type(error).__name__, str(error), frozenset(), frozenset(), ()
    finally:
        logger.setLevel(level)
    missing: set[str] = set()
    unexpected: set[str] = set()
    if strict.startswith("return"):
        found, missing, unexpected = found
    rank = dist.get_rank()
    assert found["layers"][0]["w"].tolist() == [10.0 + rank] * 2
    assert found["layers"][1]["w"].tolist() == [20.0 + rank] * 2
    return "", "", frozenset(missing), frozenset(unexpected), tuple(sorted(_paths(found)))


def _paths(nest: Any, at: str = "") -> list[str]:
    if isinstance(nest, dict):
        return [path for key, inner in nest.items() for path in _paths(inner, f"{at}/{key}")]
    if isinstance(nest, list):
        return [path for index, inner in enumerate(nest) for path in _paths(inner, f"{at}/{index}")]
    return [at]


FIT = ("/layers/0/w", "/layers/1/w", "/mlp/fc")
UNEXPECTED = frozenset({"novel", "gone.first", "gone.second"})


@pytest.fixture
def saved(ranks: RankPool, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ranks.run(save_nested, 3, (folder,))
    return folder


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_what_one_rank_should_not_ask_for_is_the_same_error_on_all(ranks: RankPool, saved: Path, strict: str) -> None:
    answers = ranks.run(load_unfit, 3, (saved, strict))
    kinds, texts = {answer[0] for answer in answers}, {answer[1] for answer in answers}
    assert len(kinds) == len(texts) == 1 and "" not in kinds, answers
    text = texts.pop()
    assert "novel" in text
    whose = {"raise_unexpected": "Unexpected keys (for this rank)", "raise_all": "Unexpected keys (for all ranks)"}
    assert whose.get(strict, "") in text


@pytest.mark.parametrize("strict", ["log_unexpected", "log_all", "ignore_all"])
def test_logging_modes_load_what_fits_on_every_rank(ranks: RankPool, saved: Path, strict: str) -> None:
    answers = ranks.run(load_unfit, 3, (saved, strict))
    assert [answer[0] for answer in answers] == ["", "", ""], answers
    assert {answer[4] for answer in answers} == {FIT}


@pytest.mark.parametrize("strict", ["return_unexpected", "return_all"])
def test_returning_modes_tell_each_rank_its_own_unexpected_keys_and_all_the_missing(
    ranks: RankPool, saved: Path, strict: str
) -> None:
    answers = ranks.run(load_unfit, 3, (saved, strict))
    assert [answer[0] for answer in answers] == ["", "", ""], answers
    assert {answer[4] for answer in answers} == {FIT}
    assert [answer[3] for answer in answers] == [frozenset(), frozenset(), UNEXPECTED]
    assert {answer[2] for answer in answers} == {frozenset({"spare"}) if strict == "return_all" else frozenset()}
