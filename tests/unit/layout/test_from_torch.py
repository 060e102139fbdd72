"""DTensor and DeviceMesh, compared with what torch itself cuts; no processes and no process group."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from remesh import layout as rl
from remesh.foundation.errors import LayoutError
from remesh.layout.dtypes import ITEMSIZE_BYTES
from remesh.layout.from_torch import (
    Piece,
    dtype_name,
    join_if_alike,
    layout_of,
    mesh_from_torch,
    piece_of,
    placements_from_torch,
    torch_dtype,
)

SHAPES = [(), (0,), (1,), (5,), (10,), (13,), (4, 6), (7, 3), (2, 0, 3), (3, 5, 4)]
MESHES = [(1,), (2,), (4,), (5,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]


def _device_mesh(shape, rank=0):
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def _plain_placements(ndim):
    return [Replicate(), *(Shard(dim) for dim in range(ndim))]


def _strided_placements(ndim):
    return [_StridedShard(dim, split_factor=factor) for dim in range(ndim) for factor in (2, 3)]


def _all_placements(shape, mesh_shape):
    """Every combination of plain placements, and every strided one in each position."""
    plain = _plain_placements(len(shape))
    yield from itertools.product(plain, repeat=len(mesh_shape))
    if 0 in shape or len(mesh_shape) > 2:
        return
    for axis in range(len(mesh_shape)):
        choices = [plain] * len(mesh_shape)
        choices[axis] = _strided_placements(len(shape))
        yield from itertools.product(*choices)


def _local_by_torch(whole, mesh_shape, coordinate, placements):
    """The local tensor that torch's own splitting gives, axis after axis."""
    local = whole
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, size, with_padding=False, contiguous=True)
            local = parts[at]
    return local


def _read(piece, whole):
    """What the shards of a piece say its row-major buffer contains."""
    flat = torch.full((piece.tensor.numel(),), -1, dtype=whole.dtype)
    for shard in piece.shards:
        box = whole[shard.box.slices()]
        if box.numel():
            flat.as_strided(box.shape, shard.strides, shard.offset).copy_(box)
    return flat.reshape(piece.tensor.shape)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_placement_gives_torchs_elements_shapes_and_offsets(shape, mesh_shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for placements in _all_placements(shape, mesh_shape):
        ours = placements_from_torch(placements)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            boxes = rl.boxes_at(shape, mesh_shape, coordinate, ours)
            local = _local_by_torch(whole, mesh_shape, coordinate, placements)
            case = (placements, coordinate)
            torch_shape, torch_offset = _compute_local_shape_and_global_offset(
                shape, mesh_shape, list(coordinate), placements
            )
            assert rl.local_shape_at(shape, mesh_shape, coordinate, ours) == torch_shape == tuple(local.shape), case
            if local.numel() or len(boxes) == 1:
                assert boxes[0].box.start == torch_offset, case
            shards = tuple(rl.Shard(0, box, offset, strides) for box, offset, strides in boxes)
            assert torch.equal(_read(Piece(local, shape, shards), whole), local), case


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 3)], ids=str)
def test_piece_of_a_dtensor_says_what_distribute_tensor_put_there(mesh_shape):
    whole = torch.arange(7 * 5).reshape(7, 5)
    for rank in range(torch.Size(mesh_shape).numel()):
        mesh = _device_mesh(mesh_shape, rank)
        for placements in itertools.product(_plain_placements(2), repeat=len(mesh_shape)):
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            piece = piece_of(tensor)
            assert piece.global_shape == (7, 5)
            assert torch.equal(_read(piece, whole), tensor.to_local()), (rank, placements)
            layout = layout_of(tensor)
            assert [s.box for s in layout.shards_of(rank)] == [s.box for s in piece.shards]


def test_piece_shares_memory_with_the_dtensor():
    tensor = distribute_tensor(torch.zeros(4), _device_mesh((2,)), [Shard(0)], src_data_rank=None)
    parameter = torch.nn.Parameter(tensor)
    piece_of(parameter).tensor.fill_(3)
    assert not piece_of(parameter).tensor.requires_grad
    assert parameter.to_local().tolist() == [3, 3]


def test_plain_tensor_is_one_whole_shard_and_a_piece_is_itself():
    piece = piece_of(torch.zeros(2, 3).t())
    assert piece.global_shape == (3, 2)
    assert piece.shards == (rl.Shard(0, rl.Box((0, 0), (3, 2))),)
    assert piece_of(piece) is piece
    assert piece_of(torch.tensor(1.0)).shards == (rl.Shard(0, rl.Box((), ())),)


@pytest.mark.parametrize(("dtype", "partial"), [(torch.float32, None), (torch.float64, None), (torch.float32, "sum")])
@pytest.mark.parametrize("sum_first", [True, False])
def test_pieces_are_joined_where_they_can_be_one(dtype, partial, sum_first):
    old = Piece(torch.zeros(2), (4,), (rl.Shard(0, rl.Box((0,), (2,))),), partial if sum_first else None)
    new = Piece(torch.ones(2, dtype=dtype), (4,), (rl.Shard(0, rl.Box((2,), (4,))),), None if sum_first else partial)
    joined = join_if_alike(old, new)
    if dtype != torch.float32 or partial:
        assert joined is old
    else:
        assert joined.tensor.tolist() == [0, 0, 1, 1]
        assert [(shard.box.start, shard.offset) for shard in joined.shards] == [((0,), 0), ((2,), 2)]


def test_a_rank_outside_the_mesh_holds_nothing():
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False, _rank=5)
    tensor = DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    assert piece_of(tensor).shards == ()


def test_partial_dtensor_names_its_addend():
    mesh = _device_mesh((2, 2), rank=3)
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial(), Shard(0)], run_check=False)
    piece = piece_of(tensor)
    assert piece.partial == "sum"
    assert [(shard.addend, shard.box) for shard in piece.shards] == [(1, rl.Box((2,), (4,)))]
    assert layout_of(tensor).partial == "sum"


def test_uneven_local_tensor_that_torchs_rule_does_not_make_is_refused():
    mesh = _device_mesh((2,))
    tensor = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    with pytest.raises(LayoutError, match=r"has shape \(3,\), expected \(2,\)"):
        piece_of(tensor)


def test_unknown_placement_is_refused_by_name():
    with pytest.raises(LayoutError, match="_MaskPartial has no known rule"):
        placements_from_torch([_MaskPartial(offset_shape=torch.Size([4]))])


def test_what_is_no_tensor_is_refused():
    with pytest.raises(LayoutError, match="boxes of a list"):
        piece_of([1, 2])


def test_mesh_of_a_device_mesh_keeps_ranks_names_and_hosts():
    device_mesh = DeviceMesh(
        "cpu", torch.tensor([[4, 2], [7, 0]]), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=2
    )
    mesh = mesh_from_torch(device_mesh, {4: "a", 2: "a", 7: "b", 0: "b"})
    assert (mesh.axis_names, mesh.shape, mesh.world_ranks) == (("dp", "tp"), (2, 2), (4, 2, 7, 0))
    assert [mesh.host_of(rank) for rank in (0, 2)] == ["b", "a"]
    assert mesh_from_torch(_device_mesh((2, 2))).axis_names == ("axis0", "axis1")
    with pytest.raises(LayoutError, match="rank 7 has no host"):
        mesh_from_torch(device_mesh, {4: "a", 2: "a"})


def test_every_dtype_of_torch_has_a_name_and_its_size():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        if str(dtype).removeprefix("torch.") in ITEMSIZE_BYTES:
            assert rl.itemsize_bytes(dtype_name(dtype)) == dtype.itemsize, dtype
            assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(LayoutError, match="torch dtype 'int'"):
        torch_dtype("int")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint16])
def test_dtypes_of_training_are_known(dtype):
    assert rl.itemsize_bytes(dtype_name(dtype)) == dtype.itemsize
