"""Plain state dicts in one process: ``remesh.save`` and ``remesh.load``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.plain import entities_of
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.plan.writes import SMALL_BYTES, HeldBoxes, choose_writers
from remesh.comm.gather import warn_if_alone
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.foundation.errors import ConfigError, FormatError, LayoutError, PlanError, StorageError
from remesh.foundation.options import OptionError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(2, 4)).square().sum().backward()
    optim.step()
    return model, optim


def state_of(model: torch.nn.Module, optim: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optim.state_dict(), "step": step, "rng": torch.get_rng_state()}


def test_a_training_state_comes_back(tmp_path: Path) -> None:
    saved = trained(0)
    remesh.save(state_of(*saved, step=7), tmp_path / step_name(7))
    model, optim = trained(1)
    newest = remesh.latest_complete(tmp_path)
    assert newest is not None
    loaded = remesh.load(state_of(model, optim, step=0), newest)
    optim.load_state_dict(loaded["optim"])
    assert loaded["step"] == 7
    assert optim.param_groups[0]["lr"] == 0.1
    for expected, found in zip(saved[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert str(optim.state_dict()) == str(saved[1].state_dict())


def test_a_load_fills_the_dict_that_it_is_given(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "step": 7, "plan": {"lr": 0.5, "names": ["a", "b"], "shape": (1, 2)}, "more": {"k": 1}}
    remesh.save(saved, tmp_path)
    plan = {"lr": 0.0, "names": ["x"], "shape": (0, 0)}
    state: dict[str, Any] = {"w": torch.zeros(2), "step": 0, "plan": plan}
    assert remesh.load(state, tmp_path) is state
    assert state["step"] == 7 and state["plan"] is plan and plan == saved["plan"] and state["more"] == {"k": 1}
    assert torch.equal(state["w"], torch.ones(2))


def test_a_load_right_behind_a_save_in_the_background_waits_for_it(tmp_path: Path) -> None:
    for step in range(5):
        remesh.save({"w": torch.full((1 << 20,), float(step))}, tmp_path / str(step), background=True)
        assert remesh.load({"w": torch.zeros(1 << 20)}, tmp_path / str(step))["w"][-1] == step


def test_a_load_that_fails_leaves_the_dict_as_it_was(tmp_path: Path) -> None:
    remesh.save({"w": torch.ones(2), "step": 7}, tmp_path)
    state = {"w": torch.zeros(2), "step": 0, "other": 1}
    with pytest.raises(LayoutError):
        remesh.load(state, tmp_path)
    assert state["step"] == 0 and torch.equal(state["w"], torch.zeros(2))  # type: ignore[arg-type]


def test_a_process_of_many_without_a_group_is_told_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_alone.cache_clear()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for step in (1, 2):
        remesh.save({"w": torch.ones(2)}, tmp_path / step_name(step))
    warn_if_alone.cache_clear()
    told = [one.getMessage() for one in caplog.records if "init_process_group" in one.getMessage()]
    assert len(told) == 1 and "rank 2 of 4 by RANK and WORLD_SIZE" in told[0]


def test_the_home_of_the_user_is_no_folder_named_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    remesh.save({"w": torch.ones(2)}, "~/run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ConfigError, match="name a user who is there"):
        remesh.save({"w": torch.ones(2)}, "~no-such-user-here/run")


def test_lists_and_nones_and_tuples_keep_their_places(tmp_path: Path) -> None:
    state = {"l": [torch.ones(1), 5, {"t": torch.ones(2)}, (1, 2)], "none": None, 0: {"x": 1}}
    remesh.save(state, tmp_path)
    target = {"l": [torch.zeros(1), 0, {"t": torch.zeros(2)}, 0], "none": 1}
    loaded = remesh.load(target, tmp_path)
    assert loaded["l"][0] is target["l"][0]  # type: ignore[index]
    assert target["l"][2]["t"].tolist() == [1, 1]  # type: ignore[index]
    assert loaded["l"][1::2] == [5, (1, 2)]
    assert (loaded["none"], loaded[0]) == (None, {"x": 1})  # type: ignore[index]


_KEPT: dict[str, Any] = {
    "model": {"w": torch.ones(2), "n": 5},
    "lr": {"a": 1},
    "list": [torch.ones(1), 3],
    "none": None,
}
_ASKED_AS_PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"model": 0}, "'model' is asked for as one plain value, .* parts that are stored there, 'model"),
    ({"model": {}}, "'model' is asked for"),
    ({"model": {"w": None}}, "'model.w' is asked for .* 1 parts"),
    ({"list": []}, "'list' is asked for"),
    ({"list": 0}, "'list' is asked for"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("is_native", [False, True])
def test_a_tensor_that_is_asked_for_as_a_plain_value_is_not_left_out_in_silence(
    tmp_path: Path, is_native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a script that loads before its optimizer has made a step."""
    if is_native:
        dcp.save(_KEPT, checkpoint_id=tmp_path)
    else:
        remesh.save(_KEPT, tmp_path)
    for asked, told in _ASKED_AS_PLAIN:
        with pytest.raises(CheckpointingException, match=told):
            remesh.load(asked, tmp_path)
    assert remesh.load({"model": {"w": None}}, tmp_path, strict=False)["model"]["w"] is None
    assert "'model.w'" in caplog.text
    if is_native:
        with pytest.raises(CheckpointingException, match="'lr' is asked for .* 'lr.a'"):
            remesh.load({"lr": {}}, tmp_path)
    else:
        assert remesh.load({"lr": {}}, tmp_path)["lr"] == {"a": 1}
    assert remesh.load({"lr": {"a": 0}, "none": 7}, tmp_path)["lr"] == {"a": 1}


@pytest.mark.parametrize("background", [False, True])
def test_a_state_without_tensors_is_saved_again_and_again(tmp_path: Path, background: bool) -> None:
    for step in range(3):
        remesh.save({"step": step}, tmp_path / step_name(step), background=background).result()
    assert [remesh.load({}, tmp_path / step_name(step)) for step in range(3)] == [{"step": step} for step in range(3)]


def test_pieces_say_where_their_boxes_lie_in_a_buffer(tmp_path: Path) -> None:
    # A packed buffer: rows 0 and 3 of a [4, 2] tensor, then its rows 1 and 2, all in one flat tensor.
    boxes = [Box((0, 0), (1, 2)), Box((3, 0), (4, 2)), Box((1, 0), (3, 2))]
    shards = tuple(Shard(0, box, offset) for box, offset in zip(boxes, (0, 2, 4), strict=True))
    packed = torch.tensor([0.0, 1, 6, 7, 2, 3, 4, 5])
    remesh.save({"w": Piece(packed, (4, 2), shards)}, tmp_path)
    plain = torch.zeros(4, 2)
    remesh.load({"w": plain}, tmp_path)
    assert plain.flatten().tolist() == list(range(8))
    for target in (torch.zeros(8), torch.zeros(16)[::2]):
        remesh.load({"w": Piece(target, (4, 2), shards)}, tmp_path)
        assert torch.equal(target, packed)


def test_empty_tensors_and_scalars_are_kept(tmp_path: Path) -> None:
    remesh.save({"e": torch.zeros(0, 3), "s": torch.tensor(2)}, tmp_path)
    target = {"e": torch.zeros(0, 3), "s": torch.tensor(0)}
    remesh.load(target, tmp_path)
    assert target["s"] == 2
    with pytest.raises(CheckpointingException, match="Global shape mismatch"):
        remesh.load({"e": torch.zeros(0, 4)}, tmp_path)


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"would both be stored as 'a\.b'"):
        remesh.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_bad_input_is_told_in_full(tmp_path: Path) -> None:
    remesh.save({"model": {"weight": torch.ones(2, 3)}}, tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "file").touch()
    state = {"model": {"weight": torch.zeros(2, 3)}}
    cases: list[tuple[Any, str, type[Exception], str]] = [
        (state, "nowhere", StorageError, "nowhere does not exist, expected the directory of a saved checkpoint"),
        (state, "empty", FormatError, "is not a distributed checkpoint, expected the marker metadata.json"),
        ({"weight": torch.zeros(2, 3)}, "good", LayoutError, "'weight'; it holds 1, 'model.weight'"),
        ({"model": {"weight": torch.zeros(3, 2)}}, "good", LayoutError, "loaded ((2, 3)) and expected ((3, 2))"),
        (torch.nn.Linear(1, 1), "good", LayoutError, "found a Linear, expected a dict; give the object a name"),
        ({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, "good", LayoutError, "'w' is a ShardedTensor"),
        (state, "", FormatError, "it holds checkpoints, the newest is "),
        (state, "file", StorageError, "file is a file, expected the directory"),
    ]
    for asked, name, kind, said in cases:
        with pytest.raises(kind) as caught:
            remesh.load(asked, tmp_path / name)
        assert isinstance(caught.value, CheckpointingException)
        assert said in str(caught.value)
        assert str(caught.value).startswith("loading checkpoint")
    assert not state["model"]["weight"].any()


def test_a_state_of_shards_is_refused_not_left_out(tmp_path: Path) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(1))
    with pytest.raises(LayoutError, match="'w' is a ShardedTensor, .* dist_checkpointing.save"):
        remesh.save({"w": shard, "step": 1}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda state: remesh.load(state, None), "found None, expected a path or a URL; where there is no checkpoint"),
        (lambda state: remesh.save("place", state), "found a value of type dict, expected a path or a URL"),
        (lambda state: remesh.save(state, "place", background="yes"), "option 'background' is 'yes', of type str"),
        (lambda state: remesh.load(state, "place", strict="no"), "option 'strict' is 'no', of type str"),
        (lambda state: remesh.Checkpoints("place").load(1, state), "option 'step' is {'w'"),
    ],
)
def test_wrong_arguments_are_told_by_name(call: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        call({"w": torch.zeros(1)})
    assert said in str(caught.value)


def test_a_checkpoint_is_not_taken_for_the_folder_of_a_run(tmp_path: Path) -> None:
    remesh.save({"w": torch.ones(1)}, tmp_path / "step-00000001")
    with pytest.raises(StorageError, match="this is a checkpoint itself"):
        remesh.latest_complete(tmp_path / "step-00000001")
    assert remesh.latest_complete(tmp_path) == tmp_path / "step-00000001"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_native_torch_and_we_read_each_other(tmp_path: Path) -> None:
    model, optim = trained(0)
    state = state_of(model, optim, step=7)
    remesh.save(state, tmp_path / "ours")
    other, other_optim = trained(1)
    target = {"model": other.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "ours")
    assert all(map(torch.equal, model.parameters(), other.parameters()))

    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    other, other_optim = trained(2)
    loaded = remesh.load(state_of(other, other_optim, step=0), tmp_path / "theirs")
    other_optim.load_state_dict(loaded["optim"])
    assert loaded["step"] == 7
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert str(other_optim.state_dict()) == str(optim.state_dict())


def test_writers_share_the_bytes_of_replicas() -> None:
    sizes = [SMALL_BYTES * share for share in (50, 30, 30, 20, 10, 10)]
    held = HeldBoxes([(f"w{index}", (size,), size) for index, size in enumerate(sizes)], [0] * len(sizes))
    writes = [choose_writers([held, held, held], rank).is_mine for rank in range(3)]
    assert [sum(writer) for writer in zip(*writes, strict=True)] == [1] * len(sizes)
    assert [sum(itertools.compress(sizes, of_rank)) for of_rank in writes] == [50 * SMALL_BYTES] * 3


def test_the_first_holder_writes_what_is_small_and_large_boxes_are_shared_around_it() -> None:
    small, large = SMALL_BYTES, SMALL_BYTES + 1
    form = [("mean", (small,), small), ("w", (large,), large), ("variance", (small,), small), ("v", (large,), large)]
    both, last = HeldBoxes(form, [0] * 4), HeldBoxes([*form[2:], ("alone", (4,), 4)], [0] * 3)
    writes = [choose_writers([both, last, last, both], rank).is_mine for rank in range(4)]
    assert writes == [
        [True, False, True, False],
        [False, False, True],
        [False, True, False],
        [False, True, False, False],
    ]
    unlike = [HeldBoxes([], []), both, last, both]
    assert [choose_writers(unlike, rank).is_mine[2 * (rank != 2)] for rank in (1, 2, 3)] == [True, False, False]


def test_who_alone_holds_a_box_writes_it() -> None:
    shared, alone = ("a", (SMALL_BYTES + 1,), SMALL_BYTES + 1), ("b", (9,), 36)
    held = [HeldBoxes([], []), HeldBoxes([shared, alone], [0, 0]), HeldBoxes([shared], [0])]
    assert [choose_writers(held, rank).is_mine for rank in range(3)] == [[], [False, True], [True]]


def test_boxes_of_one_form_at_other_places_are_not_replicas() -> None:
    form = [("w", (2, 3), 24), ("v", (), 4)]
    held = [HeldBoxes(form, [2 * rank, 0]) for rank in range(3)]
    assert [choose_writers(held, rank).is_mine for rank in range(3)] == [[True, True], [True, False], [True, False]]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that quantized tensors are to go
def test_small_tensors_that_no_frame_fits_and_views_of_complex_ones_come_back_each(tmp_path: Path) -> None:
    parts = [torch.tensor([1 + 2j, 3 - 4j]).mul(n) for n in (1, 2)]
    views = {
        f"{name}{at}": view
        for at, one in enumerate(parts)
        for name, view in (("c", one.conj()), ("n", one.conj().imag))
    }
    state = {
        **views,
        **{f"q{n}": torch.quantize_per_tensor(torch.arange(4.0) + n, 0.1, 0, torch.qint8) for n in (0, 1)},
    }
    remesh.save(state, tmp_path)
    loaded = remesh.load({name: torch.empty_like(value) for name, value in state.items()}, tmp_path)
    for name, value in state.items():
        wanted, found = (one.dequantize() if one.is_quantized else one for one in (value, loaded[name]))
        assert torch.equal(found, wanted), name


def test_a_plain_state_is_saved_in_the_background_too(tmp_path: Path) -> None:
    state = {**state_of(*trained(0), step=7), "none": torch.empty(0, 3)}
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        request = dist_checkpointing.save(entities_of(state), directory, async_sharded_save=True)
        assert request is not None
        request.execute_sync()
        wanted = {**state_of(*trained(1), step=-1), "none": torch.empty(0, 3)}
        loaded = remesh.load(wanted, directory)
        assert loaded["step"] == 7
        assert torch.equal(loaded["model"]["0.weight"], state["model"]["0.weight"])
        assert loaded["optim"]["param_groups"] == state["optim"]["param_groups"]
    remesh.save(state, tmp_path / "plain")
    for name in ("__0_0.distcp", "common.pt"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert entities_of({"step": 1}) == {"step": 1}
    with pytest.raises(LayoutError, match="rename that key"):
        entities_of({"w": torch.ones(1), "tensors of a plain state": 1})


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.zeros(2, 3, device="meta"), "on the device meta"),
        (lambda: torch.nn.Parameter(torch.zeros(2, 3, device="meta")), "on the device meta"),
        (lambda: torch.zeros(2, 3).to_sparse(), "of layout torch.sparse_coo"),
    ],
)
def test_a_tensor_without_memory_is_refused_by_name_also_after_a_good_save_of_its_shape(
    tmp_path: Path, make: Callable[[], torch.Tensor], found: str, background: bool
) -> None:
    state = {"good": torch.ones(1), "w": torch.ones(2, 3)}
    remesh.save(state, tmp_path / "first", background=background).result()
    with pytest.raises(CheckpointingException, match=f"tensor 'w': it is {found}"):
        remesh.save({**state, "w": make()}, tmp_path / "second", background=background)
    with pytest.raises(CheckpointingException, match=f"tensor 'w': it is {found}"):
        entities_of({**state, "w": make()})
    assert not (tmp_path / "second").exists()


def test_a_piece_that_reaches_past_its_buffer_is_refused_by_name_at_every_save_and_load(tmp_path: Path) -> None:
    def state_at(offset: int) -> dict[str, Any]:
        return {"w": Piece(torch.ones(6), (2, 3), (Shard(0, Box((0, 0), (2, 3)), offset),))}

    remesh.save(state_at(0), tmp_path / "first")
    for act in (lambda: remesh.save(state_at(4), tmp_path / "n"), lambda: remesh.load(state_at(4), tmp_path / "first")):
        with pytest.raises(LayoutError, match="tensor 'w': box .* reaches to element 10 of a local tensor that has 6"):
            act()


_CASTS = [
    (torch.int64, torch.int8, False),
    (torch.int64, torch.int32, False),
    (torch.uint8, torch.int16, True),
    (torch.int32, torch.int64, True),
    (torch.float32, torch.int32, False),
    (torch.float32, torch.bool, False),
    (torch.int32, torch.float32, False),
    (torch.complex64, torch.float32, False),
    (torch.float32, torch.complex64, False),
    (torch.float64, torch.float16, True),
    (torch.bfloat16, torch.float32, True),
    (torch.complex64, torch.complex128, True),
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("held", "wanted", "is_safe"), _CASTS, ids=str)
def test_a_cast_that_changes_the_kind_of_values_is_asked_for(
    tmp_path: Path, held: torch.dtype, wanted: torch.dtype, is_safe: bool
) -> None:
    saved, filled = torch.tensor([1, 300 if held.itemsize > 1 else 3]).to(held), torch.zeros(2, dtype=wanted)
    remesh.save({"w": saved}, tmp_path / step_name(1))
    if not is_safe:
        for strict in (True, False):
            with pytest.raises(CheckpointingException, match=r"'w' is stored as .* found .* allow_unsafe_types=True"):
                remesh.load({"w": filled}, tmp_path / step_name(1), strict=strict)
        assert not filled.any(), "nothing is changed"
    remesh.load({"w": filled}, tmp_path / step_name(1), allow_unsafe_types=not is_safe)
    assert filled.equal(saved.to(wanted))
    again = torch.zeros(2, dtype=wanted)
    remesh.Checkpoints(tmp_path).load({"w": again}, allow_unsafe_types=not is_safe)
    assert again.equal(filled)


def _cut_storages() -> dict[str, torch.Tensor]:
    """Tensors whose storage was freed or cut since."""
    freed, cut, strided = torch.ones(1 << 20), torch.ones(10), torch.ones(4, 4)
    parameter = torch.nn.Parameter(torch.ones(8))
    views = {"strided": strided.t(), "view": cut[4:], "column": strided[:, 3]}
    for one, num_bytes in ((freed, 0), (cut, 39), (parameter, 0), (strided, 63)):
        one.untyped_storage().resize_(num_bytes)
    return {"freed": freed, "cut": cut, "parameter": parameter, **views}


@pytest.mark.parametrize("kind", ["freed", "cut", "parameter", "strided", "view", "column"])
def test_a_tensor_beyond_its_storage_is_refused_wherever_it_is_given(tmp_path: Path, kind: str) -> None:
    """Torch reads, and writes, what is behind; nothing stands there at all where all was freed."""
    bad, good = _cut_storages()[kind], torch.ones_like(_cut_storages()[kind], device="meta")
    whole = torch.empty_strided(good.shape, good.stride()).fill_(2.0)
    told = "larger than its storage of"
    for background in (False, True):
        with pytest.raises(CheckpointingException, match=told):
            remesh.save({"w": bad}, tmp_path / "c", background=background)
    remesh.save({"w": whole}, tmp_path / "d")
    with pytest.raises(CheckpointingException, match=told):
        remesh.load({"w": bad}, tmp_path / "d")
    for give, take in ((bad, whole), (whole, bad)):
        with pytest.raises(PlanError, match=told):
            remesh.reshard({"w": give}, {"w": take})
    (tmp_path / "e").mkdir()
    with pytest.raises(CheckpointingException, match=told):
        dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", bad.detach())}, tmp_path / "e")


def test_a_save_that_is_planned_already_looks_at_storages_again(tmp_path: Path) -> None:
    remesh.save({"w": torch.ones(100)}, tmp_path / "a")
    weight = torch.ones(100)
    weight.untyped_storage().resize_(0)
    with pytest.raises(CheckpointingException, match="larger than its storage of 0 bytes"):
        remesh.save({"w": weight}, tmp_path / "b")
    weight.untyped_storage().resize_(400)
    remesh.save({"w": weight.fill_(3.0)}, tmp_path / "b")


_OPTIMIZERS = sorted(
    (one for one in vars(torch.optim).values() if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)),
    key=lambda one: one.__name__,
)


def _stepped(model: torch.nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    given = torch.randn(5, 4)

    def loss() -> torch.Tensor:
        optim.zero_grad()
        found: torch.Tensor = model(given).square().sum()
        found.backward()
        return found

    optim.step(loss)


@pytest.mark.parametrize("kind", _OPTIMIZERS, ids=lambda one: one.__name__)
def test_the_load_that_every_user_writes_fills_an_optimizer_that_has_made_no_step(tmp_path: Path, kind: type) -> None:
    def fresh(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3, bias=kind.__name__ != "Muon")
        options = {"momentum": 0.9} if kind.__name__ in ("SGD", "RMSprop") else {}
        decay = {} if kind.__name__ == "Rprop" else {"weight_decay": 0.1}
        return model, kind(model.parameters(), lr=0.01, **decay, **options)

    if kind is torch.optim.Optimizer or kind in (torch.optim.SparseAdam, torch.optim.LBFGS):
        pytest.skip("it cannot step with dense gradients, without a closure, or at all")
    model, optim = fresh(0)
    for seed in range(3):
        _stepped(model, optim, seed)
    remesh.save({"model": model, "optim": optim}, tmp_path)
    other, theirs = fresh(1)
    before = [one.detach().clone() for one in other.parameters()]
    with pytest.raises(CheckpointingException, match="shape"):  # and an unfinished load leaves the parameters alone
        remesh.load({"model": {"weight": torch.ones(7)}, "optim": theirs}, tmp_path)
    assert all(map(torch.equal, before, other.parameters()))
    other, theirs = fresh(1)
    remesh.load({"model": other, "optim": theirs}, tmp_path)
    assert str(theirs.state_dict()) == str(optim.state_dict())
    assert all(one.grad is None for one in other.parameters())
    for one in (model, other):
        one.zero_grad()
    _stepped(model, optim, 9)
    _stepped(other, theirs, 9)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def _sparse(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.ModuleList([torch.nn.Embedding(6, 3, sparse=True) for _ in range(2)])
    return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)


def _look_up(model: torch.nn.Module, optim: torch.optim.Optimizer, which: int, *rows: int) -> None:
    optim.zero_grad()
    model[which](torch.tensor(rows)).square().sum().backward()  # type: ignore[index]
    optim.step()


def test_an_optimizer_of_sparse_gradients_is_filled_before_its_first_step(tmp_path: Path) -> None:
    model, optim = _sparse(0)
    for rows in ((1, 2), (2, 5)):  # the first table has no gradient yet, and its optimizer no moments of it
        _look_up(model, optim, 1, *rows)
    remesh.save({"model": model, "optim": optim}, tmp_path)
    other, theirs = _sparse(1)
    remesh.load({"model": other, "optim": theirs}, tmp_path)
    assert str(theirs.state_dict()) == str(optim.state_dict())
    for one in ((model, optim), (other, theirs)):
        _look_up(*one, 0, 0, 3)
        _look_up(*one, 1, 1, 5)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_lbfgs_without_steps_is_refused_with_what_to_do_and_its_model_loads_without_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optim = torch.optim.LBFGS(model.parameters(), max_iter=4)
    _stepped(model, optim, 0)
    remesh.save({"model": model, "optim": optim}, tmp_path)
    other = torch.nn.Linear(4, 3)
    theirs = torch.optim.LBFGS(other.parameters(), max_iter=4)
    before = [one.detach().clone() for one in other.parameters()]
    with pytest.raises(CheckpointingException, match="leave LBFGS out, whose state grows with its steps"):
        remesh.load({"model": other, "optim": theirs}, tmp_path)
    assert all(map(torch.equal, before, other.parameters())) and not theirs.state
    remesh.load({"model": other}, tmp_path)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
