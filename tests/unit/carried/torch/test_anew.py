"""Which collectives can begin anew, and what is kept of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, GatherOptions, ReduceOptions, ScatterOptions

from remesh.carried.torch import anew
from remesh.carried.torch.anew import MOST_COPIED_BYTES, Kept, restore, rule_of
from remesh.carried.torch.short import SHORT


@pytest.fixture(autouse=True, params=["built", "not built"])
def _extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extension in C, and without."""
    if request.param == "not built":
        monkeypatch.setattr(anew, "SHORT", None)
    elif anew.SHORT is None:
        pytest.skip("needs the C extension of torch_programs: python hatch_build.py")


def _keep(name: str, arguments: Sequence[Any], rank: int, **options: Any) -> Kept | None:
    return rule_of(name)(arguments, options, rank)


def _rooted(options, root: int):
    options.rootRank = root
    return options


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(4.0),
        torch.arange(8.0)[2:6],
        torch.arange(8.0)[::2],
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
        torch.arange(4.0, requires_grad=True),
        torch.tensor(3 + 4j).conj(),
    ],
    ids=["dense", "a part", "every second", "transposed", "bool", "nan", "leaf", "conjugate"],
)
def test_what_a_collective_changes_in_place_is_what_it_was_when_it_begins_anew(value: torch.Tensor) -> None:
    kept = _keep("allreduce", ([value], AllreduceOptions()), 0)
    assert kept is not None
    before, around, version = value.tolist(), value.untyped_storage().tolist(), value._version
    value.data.fill_(1)
    restore(kept)
    assert str(value.tolist()) == str(before)
    assert value.untyped_storage().tolist() == around
    assert value._version == version


@pytest.mark.skipif(SHORT is None, reason="needs the C extension of torch_programs: python hatch_build.py")
def test_the_extension_copies_what_lies_side_by_side_in_memory_and_nothing_else() -> None:
    value = torch.arange(6, dtype=torch.int16)
    pairs = SHORT.keep([value[1:3], value.reshape(2, 3)], 16)
    assert [copy for _, copy in pairs] == [bytes([1, 0, 2, 0]), value.numpy().tobytes()]
    strange = [value[::2], value.reshape(2, 3).T, value[:0], value.to("meta"), value.float().to_sparse(), 3, None]
    for one in strange:
        assert SHORT.keep([value, one], 1 << 20) is None
    assert SHORT.keep([value], 11) is None
    assert SHORT.keep(value, 1 << 20) is None


def test_large_tensors_are_not_copied_and_so_have_to_end() -> None:
    large = torch.zeros(MOST_COPIED_BYTES // 4 + 1)
    assert _keep("allreduce", ([large], AllreduceOptions()), 0) is None
    assert _keep("_allgather_base", (large, large[:1]), 0) == ()


def test_what_moves_no_element_may_end_before_others_have_entered() -> None:
    nothing = torch.zeros(0)
    assert _keep("allreduce", ([nothing], AllreduceOptions()), 0) is None
    assert _keep("allgather", ([[nothing, nothing]], [nothing]), 0) is None
    one = torch.zeros(2)
    assert _keep("all_to_all_single", (one, one, [2, 0], [2, 0]), 0) is None
    assert _keep("all_to_all_single", (one, one, [], []), 0) == ()


@pytest.mark.parametrize(
    ("name", "options", "of_root", "of_another"),
    [
        ("broadcast", BroadcastOptions, None, ()),
        ("scatter", ScatterOptions, None, ()),
        ("gather", GatherOptions, (), None),
    ],
)
def test_who_may_be_through_before_the_others_has_to_end(name: str, options, of_root, of_another) -> None:
    arguments = ([torch.zeros(2)], [torch.zeros(2)], _rooted(options(), 1))
    assert _keep(name, arguments, 1) == of_root
    assert _keep(name, arguments, 0) == of_another


def test_the_root_of_a_reduce_keeps_its_input_and_others_have_to_end() -> None:
    arguments = ([torch.ones(2)], _rooted(ReduceOptions(), 0))
    kept = _keep("reduce", arguments, 0)
    assert kept is not None
    assert [tensor is arguments[0][0] for tensor, _ in kept] == [True]
    assert _keep("reduce", arguments, 1) is None


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_have_to_end(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(2).to_sparse(layout=layout)
    assert _keep("allreduce", ([sparse], AllreduceOptions()), 0) is None


def test_what_is_called_in_another_way_than_by_place_has_to_end() -> None:
    one = torch.ones(1)
    assert _keep("allreduce", (), 0, tensors=[one]) is None
    assert _keep("_allgather_base", (one, torch.ones(2)), 0, opts=None) is None
    assert _keep("barrier", (), 0, opts=None) == ()
