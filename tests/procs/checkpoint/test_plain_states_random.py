"""Random states of strangers, saved on one number of ranks in one way, come back on another in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, open_any
from remesh.checkpoint.run.safetensors import load_safetensors
from remesh.checkpoint.storage import location_of
from remesh.checkpoint.values.entities import ShardedTensor
from remesh.integrations.dcp import DcpReader, DcpWriter
from remesh.testbed.pool import RankPool
from tests.procs.checkpoint.random_plain_states import Catalogue, Side, draw_side, nested
from tests.profiles import seeds

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
STEP = 2
"""Each run has two checkpoints, in the first of which are other values."""


def _by_remesh(root: Path, state: Callable[[int], dict[str, Any]], *, background: bool) -> None:
    """In the background the second is asked for, and values change, while the first is under way."""
    saved = [remesh.save(state(step), root / step_name(step), background=background) for step in (1, STEP)]
    state(1)
    for each in saved:
        each.result()


def _by_checkpoints(root: Path, state: Callable[[int], dict[str, Any]]) -> None:
    with remesh.Checkpoints(root, keep=1, background=True) as run:
        for step in (1, STEP):
            run.save(step, state(step))
        state(1)


def _by_dcp(root: Path, state: Callable[[int], dict[str, Any]]) -> None:
    for step in (1, STEP):
        dcp.save(state(step), storage_writer=DcpWriter(root / step_name(step)))


SAVES: dict[str, Callable[[Path, Callable[[int], dict[str, Any]]], None]] = {
    "save": lambda root, state: _by_remesh(root, state, background=False),
    "background": lambda root, state: _by_remesh(root, state, background=True),
    "checkpoints": _by_checkpoints,
    "dcp": _by_dcp,
}


def save_random(root: Path, seeds: range, way: str) -> None:
    for seed in seeds:
        catalogue, other = Catalogue.draw(seed), Catalogue.draw(seed)
        for name, whole in other.wholes.items():
            other.wholes[name] = torch.zeros_like(whole)
        side = draw_side(catalogue, 100 + seed, dist.get_rank(), dist.get_world_size(), pieces=way != "dcp")

        def state(step: int, side: Side = side, by_step: tuple[Catalogue, ...] = (other, catalogue)) -> dict[str, Any]:
            side.fill(by_step[step - 1])
            return {**nested(side.tensors), **by_step[step - 1].common}

        SAVES[way](root / str(seed), state)


def load_random(root: Path, seeds: range, way: str, stage: int) -> int:
    """The number of boxes that were compared."""
    num_compared = 0
    for seed in seeds:
        catalogue, place = Catalogue.draw(seed), root / str(seed) / step_name(STEP)
        side = draw_side(catalogue, 1000 * stage + seed, dist.get_rank(), dist.get_world_size(), pieces=way != "dcp")
        asked = {**nested(side.tensors), "step": -1, "plain": _nothing_of(catalogue.common["plain"])}
        if way == "load":
            assert remesh.load(asked, place)["plain"] == catalogue.common["plain"]
        elif way == "checkpoints":
            assert remesh.Checkpoints(root / str(seed)).load(asked)["step"] == seed
        elif way == "dcp":
            converted = Path(f"{place}.dcp")
            reader = DcpReader(converted if converted.exists() else place)
            dcp.load({key: asked[key] for key in ("model", "ema", "optim") if key in asked}, storage_reader=reader)
        else:
            load_safetensors(_entities_of(side, catalogue), f"{place}.safetensors")
        num_compared += side.check(catalogue, (seed, way, dist.get_rank()))
    return num_compared


def _nothing_of(value: Any) -> Any:
    """A dict of the same keys."""
    return {key: _nothing_of(inner) for key, inner in value.items()} if isinstance(value, dict) else None


def _entities_of(side: Side, catalogue: Catalogue) -> list[ShardedTensor]:
    return [
        ShardedTensor(name, view, view.dtype, box.shape, tuple(catalogue.wholes[name].shape), box.start, None)
        for name, views in side.seen.items()
        for view, box in views
    ]


def relay(root: Path, onward: Path, seeds: range) -> None:
    """A job that goes on, on other ranks, and saves what it has loaded."""
    for seed in seeds:
        catalogue = Catalogue.draw(seed)
        side = draw_side(catalogue, 5000 + seed, dist.get_rank(), dist.get_world_size())
        state = {**nested(side.tensors), "step": -1, "plain": _nothing_of(catalogue.common["plain"])}
        state = remesh.load(state, root / str(seed) / step_name(STEP))
        with remesh.Checkpoints(onward / str(seed), background=True) as run:
            run.save(STEP, state)


def export(root: Path, seeds: range) -> None:
    for seed in seeds:
        place = location_of(root / str(seed) / step_name(STEP))
        opened = open_any(place)
        formats = [Format.SAFETENSORS] if opened.is_native else [Format.SAFETENSORS, Format.DCP]
        for each in formats:
            convert(gather_contents([opened]), location_of(f"{place}.{each.value}"), each)


def check_ways(ranks: RankPool, root: Path, seeds: range, sizes: tuple[int, int, int], way: str) -> None:
    """Saved by the first, loaded in every way and handed on by the second, loaded by the third number of ranks."""
    ranks.run(save_random, sizes[0], (root, seeds, way), timeout_s=200)
    export(root, seeds)
    for how in ("load", "dcp", "safetensors", *(["checkpoints"] if way == "checkpoints" else [])):
        assert sum(ranks.run(load_random, sizes[1], (root, seeds, how, 2), timeout_s=200))
    ranks.run(relay, sizes[1], (root, root / "onward", seeds), timeout_s=200)
    assert sum(ranks.run(load_random, sizes[2], (root / "onward", seeds, "checkpoints", 3), timeout_s=200))


@pytest.mark.parametrize(
    ("sizes", "way"), [((2, 3, 1), "save"), ((3, 2, 4), "background"), ((4, 1, 2), "checkpoints"), ((1, 4, 3), "dcp")]
)
def test_random_states_come_back_in_every_way(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, int, int], way: str
) -> None:
    check_ways(ranks, tmp_path, seeds(4, quick=2), sizes, way)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 3, 1), (4, 2, 5), (6, 5, 3)])
@pytest.mark.parametrize("way", SAVES)
def test_many_random_states_come_back_in_every_way(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, int, int], way: str
) -> None:
    check_ways(ranks, tmp_path, range(100, 120), sizes, way)
