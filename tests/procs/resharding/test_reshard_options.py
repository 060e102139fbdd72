"""One rank that is called otherwise than the others: all raise the same error at once, and the group still works."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import remesh
from remesh.foundation.errors import Error
from remesh.foundation.options import OptionError
from remesh.resharding import Missing, Network, redistribute_across, reshard_tensor
from remesh.resharding.model.network import HostLink
from remesh.resharding.refit import Refit
from remesh.resharding.reshard_api import gather_moves, reshard, reshard_async
from remesh.resharding.running import cache
from remesh.resharding.running.cache import Resharder
from remesh.resharding.target import Target
from remesh.testbed.pool import RankPool

NUM_RANKS = 3
HOSTS = {rank: f"h{rank}" for rank in range(NUM_RANKS)}


class Other(Enum):
    LEAVE = "leave"


def network_of(rate: float) -> Network:
    return Network({host: HostLink(rate) for host in HOSTS.values()}, 1e-5)


# What all are given but one, what that one is given, and what the error must say.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"strategy": "split"}, {"strategy": "tree"}, "option strategy is 'split' on rank 0 and 'tree' on rank 2"),
    ({}, {"strategy": "naive"}, "option strategy is 'auto' on rank 0 and 'naive' on rank 2"),
    ({"chunk_bytes": 4096}, {"chunk_bytes": 8192}, "option chunk_bytes is 4096 on rank 0 and 8192 on rank 2"),
    ({}, {"missing": Missing.LEAVE}, "option missing is 'refuse' on rank 0 and 'leave' on rank 2"),
    ({"host_of": HOSTS}, {}, "option host_of is {'0': 'h0', '1': 'h1', '2': 'h2'} on rank 0 and None on rank 2"),
    ({"host_of": HOSTS}, {"host_of": {**HOSTS, 1: "h0"}}, "option host_of['1'] is 'h1' on rank 0 and 'h0' on rank 2"),
    (
        {"host_of": HOSTS, "network": network_of(1e9)},
        {"host_of": HOSTS, "network": network_of(2e9)},
        "option network['hosts']['h0']['rate_bytes_per_s'] is 1000000000.0 on rank 0 and 2000000000.0 on rank 2",
    ),
]
# What nobody may be given, and what the error must say.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_staging_byte": 1}, "no option 'max_staging_byte' (did you mean 'max_staging_bytes'?)"),
    ({"missing": "leave"}, "option 'missing' is 'leave', of type str, expected Missing"),
    ({"missing": Other.LEAVE}, "of type Other, expected Missing"),
    ({"network": {"hosts": {}}}, "of type dict, expected Network or None"),
    ({"host_of": ["h0", "h1", "h2"]}, "of type list, expected Mapping[int, str] or None"),
    ({"chunk_bytes": "4096"}, "of type str, expected int"),
    ({"max_staging_bytes": 1.5}, "of type float, expected int or None"),
    ({"strategy": 3}, "of type int, expected str"),
    ({"strategy": "splitt"}, "strategy 'splitt' is unknown"),
    ({"chunk_bytes": 1}, "at least 64"),
    ({"max_staging_bytes": 1}, "max_staging_bytes is 1, too small"),
]


def mesh_of(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)


def on(mesh: DeviceMesh, fill: float = 0.0) -> DTensor:
    return distribute_tensor(torch.full((12, 4), fill), mesh, [Shard(0)], src_data_rank=None)


def verbs() -> dict[str, Callable[..., object]]:
    """Every collective verb that takes options, as a call that works with right ones."""
    source, target = mesh_of(0, 1), mesh_of(1, 2)
    give, take = {"w": on(source, 7.0)}, {"w": on(target)}
    buffer = torch.full((12, 4), 7.0)
    return {
        "reshard": lambda **options: reshard(give, take, **options),
        "reshard to": lambda **options: reshard(give, to=Target(target, [Replicate()]), **options),
        "reshard_async": lambda **options: reshard_async(give, take, **options).result(),
        "redistribute_across": lambda **options: redistribute_across(give["w"], target, [Shard(1)], **options),
        "reshard_tensor": lambda **options: reshard_tensor(
            buffer,
            source,
            [Shard(0)],
            target,
            [Replicate()],
            src_local_shape=(6, 4),
            dst_local_shape=(12, 4),
            **options,
        ),
    }


def repeated() -> dict[str, Callable[..., object]]:
    """Verbs of objects that keep their options; those look at names and types when they are made."""
    source, target = mesh_of(0, 1), mesh_of(1, 2)
    give, take = {"w": on(source, 7.0)}, {"w": on(target)}
    return {
        "Resharder": lambda **options: Resharder(**options).reshard(give, take),
        "Refit": lambda **options: Refit(take, **options).push(give, 1 if dist.get_rank() < 2 else None),
    }


def text_on_all(act: Callable[[], object]) -> str:
    """The text of the error, which must be raised on all ranks alike."""
    try:
        act()
    except Error as error:
        texts: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(texts, [type(error).__name__, str(error)])
        assert all(each == texts[0] for each in texts), texts
        return str(error)
    raise AssertionError("nothing was raised")


def differ_on_one_rank() -> int:
    is_other = dist.get_rank() == NUM_RANKS - 1
    num = 0
    for name, verb in (verbs() | repeated()).items():
        for usual, other, told in DIFFERENT:
            text = text_on_all(lambda verb=verb, usual=usual, other=other: verb(**(other if is_other else usual)))  # type: ignore[misc]
            assert told in text, (name, text)
            num += 1
        verb()
    return num


def test_an_option_that_differs_on_one_rank_is_named_on_all_with_both_values(ranks: RankPool) -> None:
    assert ranks.run(differ_on_one_rank, NUM_RANKS) == [7 * len(DIFFERENT)] * NUM_RANKS


def be_wrong_on_one_rank_and_on_all() -> None:
    rank = dist.get_rank()
    for name, verb in verbs().items():
        for wrong, told in WRONG:
            for everywhere in (False, True):
                options = wrong if everywhere or rank == 1 else {}
                if not everywhere and "max_staging_bytes" in wrong and wrong["max_staging_bytes"] == 1:
                    continue
                text = text_on_all(lambda verb=verb, options=options: verb(**options))  # type: ignore[misc]
                differs = "strategy" if wrong == {"strategy": "splitt"} else "chunk_bytes"
                assert told in text or (not everywhere and f"option {differs} is" in text), (name, text)
        verb()


def test_a_wrong_option_of_one_rank_or_all_is_refused_on_all(ranks: RankPool) -> None:
    ranks.run(be_wrong_on_one_rank_and_on_all, NUM_RANKS)


def test_objects_that_keep_options_look_at_them_when_they_are_made() -> None:
    for make in (Resharder, Refit):
        for wrong, told in WRONG[:8]:
            with pytest.raises(OptionError) as caught:
                make(**wrong)
            assert told in str(caught.value)


def differ_in_caps() -> list[int | None]:
    caps = [None, 1 << 12, 1 << 16]
    cap = caps[dist.get_rank()]
    take = {"w": torch.zeros(1 << 14)}
    give = {"w": torch.ones(1 << 14)} if dist.get_rank() == 0 else {}
    moved = reshard(give, take, max_staging_bytes=cap)
    assert moved.peak_staging_bytes <= moved.planned_staging_bytes <= 1 << 12
    assert take["w"].eq(1).all()
    return caps


def test_of_caps_that_differ_all_keep_to_the_least(ranks: RankPool) -> None:
    ranks.run(differ_in_caps, NUM_RANKS)


def fail_to_plan_on_one_rank() -> str:
    def run_out(*args: Any) -> Any:
        raise MemoryError("no room for the plan")

    verb = verbs()["reshard"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_planned", {})
        if dist.get_rank() == 1:
            patch.setattr(cache, "plan_stacked", run_out)
        with pytest.raises(MemoryError) as caught:
            verb()
    verb()
    return str(caught.value)


def test_a_rank_that_cannot_plan_keeps_nobody_waiting(ranks: RankPool) -> None:
    texts = ranks.run(fail_to_plan_on_one_rank, NUM_RANKS)
    assert "no room for the plan" in texts[0]
    assert texts[0] == texts[2]


# What one rank is called with, and what the error must say.
ODD: list[tuple[str, Callable[[], object]]] = [
    ("give is a NoneType,", lambda: reshard(None, {})),  # type: ignore[call-overload]
    ("give is a list,", lambda: reshard([torch.zeros(2)], {})),  # type: ignore[call-overload]
    ("give is a Tensor,", lambda: reshard(torch.zeros(2), {})),  # type: ignore[call-overload]
    ("give is a mapping with keys such as 0", lambda: reshard({0: torch.zeros(2)}, {})),  # type: ignore[dict-item]
    ("neither of take and to", lambda: reshard({"w": torch.zeros(2)})),  # type: ignore[call-overload]
    ("torch.sparse_coo", lambda: reshard({"w": torch.zeros(2).to_sparse()}, {})),
    ("on the device meta", lambda: reshard({"w": torch.zeros(2, device="meta")}, {})),
]


def be_odd_on_one_rank() -> None:
    for told, act in ODD:
        usual = lambda: reshard({"w": torch.zeros(2)}, {"w": torch.zeros(2)})  # noqa: E731
        text = text_on_all(act if dist.get_rank() == 1 else usual)
        assert told in text, text


def test_what_is_no_state_is_refused_by_name_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(be_odd_on_one_rank, NUM_RANKS)


def differ_in_targets() -> str:
    mesh = mesh_of(0, 1, 2)
    wrong = {"v": Target(mesh, [Shard(0)])}
    return text_on_all(
        lambda: reshard({"w": on(mesh)}, to=wrong if dist.get_rank() == 1 else {"w": Target(mesh, [Shard(0)])})
    )


def test_a_target_that_nobody_gives_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    assert "'v' are of tensors that no rank gives" in ranks.run(differ_in_targets, NUM_RANKS)[0]


# Ways to call for the same thing: ranks that mix them are in one call.
SAME = [{"reshard", "reshard_async", "Resharder"}, {"reshard to", "redistribute_across"}]


def forms_of_call(root: Path) -> dict[str, Callable[[], object]]:
    """Every collective verb, and every form of its arguments."""
    state = {"w": torch.ones(3)}
    return {
        **verbs(),
        **repeated(),
        "save": lambda: remesh.save(state, root / "other"),
        "load": lambda: remesh.load(state, root / "saved"),
        "gather_moves": lambda: gather_moves(state, state),
    }


def call_otherwise_on_one_rank(root: Path) -> int:
    remesh.save({"w": torch.ones(3)}, root / "saved")
    num = 0
    for usual, other in itertools.permutations(forms_of_call(root), 2):
        if any({usual, other} <= same for same in SAME):
            continue
        called = other if dist.get_rank() == 1 else usual
        text = text_on_all(lambda called=called: forms_of_call(root)[called]())  # type: ignore[misc]
        assert "expected all 3 ranks in the same call" in text, (usual, other, text)
        num += 1
    forms_of_call(root)["reshard"]()
    assert not (root / "other").exists() or not any((root / "other").iterdir())
    return num


def test_another_form_of_call_on_one_rank_is_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    nums = ranks.run(call_otherwise_on_one_rank, NUM_RANKS, (tmp_path,), timeout_s=100)
    assert min(nums) > 60
