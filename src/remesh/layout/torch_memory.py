"""Memory of torch tensors: which of them share bytes, and how a piece gets its values back from a copy.

A piece is worked on as a contiguous copy of its tensor where the tensor is not contiguous, or shares memory with
another. Of the copy only the piece's own boxes go back: what lies between them may belong to other pieces, which have
copies of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box
from remesh.layout.from_torch import Piece, reach_of
from remesh.layout.places import check_places
from remesh.layout.shard import Shard

_OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_shared(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups of tensors, by number, of which some share bytes of memory; tensors side by side in one buffer do not.

    Nearly always there is none, so that addresses alone show it. Those that reach into each other, such as columns of
    one matrix, are compared by their strides.

    >>> whole = torch.zeros(4, 4)
    >>> find_shared([whole[:, 2:], whole[:, :2], whole[0], torch.zeros(4, 4)]), find_shared([whole[1], whole[0]])
    ([[0, 1, 2]], [])
    """
    spans = [(one.get_device(), one.data_ptr(), end_of(one), at) for at, one in enumerate(tensors) if one.numel()]
    spans.sort()
    clusters: list[list[int]] = []
    before, reach = -2, 0
    for device, start, end, at in spans:
        if device == before and start < reach:
            clusters[-1].append(at)
        else:
            clusters.append([at])
            before, reach = device, end
        reach = max(reach, end)
    return [sorted(one) for one in clusters if len(one) > 1 and _share_bytes([tensors[at] for at in one])]


def places_of(piece: Piece) -> list[torch.Tensor]:
    """What a piece has of its tensor: a view for each of its boxes; the whole of a tensor that is not contiguous."""
    tensor = piece.tensor.detach()
    if _is_whole(piece) or not tensor.is_contiguous():
        return [tensor] if piece.shards else []
    first = tensor.storage_offset()
    return [
        tensor.as_strided(shard.box.shape, shard.strides or (), first + shard.offset)
        for shard in piece.shards
        if not shard.box.is_empty
    ]


def put_back(piece: Piece, copy: torch.Tensor) -> None:
    """Fill the boxes of a piece from a contiguous copy of its tensor.

    >>> held = Piece(torch.zeros(2, 2).t(), (2,), (Shard(0, Box((0,), (2,)), 2),))
    >>> put_back(held, torch.ones(2, 2)), held.tensor.tolist()
    (None, [[0.0, 0.0], [1.0, 1.0]])
    """
    tensor = piece.tensor.detach()
    if _is_whole(piece):
        tensor.copy_(copy)
        return
    own, (tensor, copy) = _own_elements(piece), _opaque(tensor, copy)
    tensor.copy_(torch.where(own, copy, tensor))


def is_there(piece: Piece, copy: torch.Tensor) -> bool:
    """Whether the boxes of a piece have the bits that they have in a contiguous copy of its tensor."""
    tensor, copy = (_bits_of(one) for one in (piece.tensor, copy))
    if _is_whole(piece):
        return torch.equal(tensor, copy)
    own = _own_elements(piece).reshape(-1)
    return torch.equal(tensor[own], copy[own])


def _is_whole(piece: Piece) -> bool:
    return len(piece.shards) == 1 and piece.shards[0].box.size == piece.tensor.numel()


def _own_elements(piece: Piece) -> torch.Tensor:
    """Of the shape of its tensor, true where a box of the piece lies."""
    own = torch.zeros(piece.tensor.numel(), dtype=torch.bool, device=piece.tensor.device)
    for shard in piece.shards:
        own.as_strided(shard.box.shape, shard.strides or (), shard.offset).fill_(True)
    return own.view(piece.tensor.shape)


def _opaque(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As integers, so that any dtype can be chosen from; those that may show something else than their memory stay."""
    dtype = tensors[0].dtype
    if dtype.is_complex or tensors[0].is_neg():
        return tensors
    return tuple(one.view(_OPAQUE[dtype.itemsize]) for one in tensors)


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in rows of bytes, row-major."""
    tensor = tensor.detach().int_repr() if tensor.is_quantized else tensor.detach().resolve_conj().resolve_neg()
    row = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8).view(tensor.numel(), tensor.element_size())


def end_of(tensor: torch.Tensor) -> int:
    """The address behind its last element."""
    return tensor.data_ptr() + reach_of(tensor) * tensor.element_size()


def _share_bytes(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some byte belongs to two of them: each is a box of bytes of its own in one buffer from the first on."""
    first = min(one.data_ptr() for one in tensors)
    ndim = max(one.ndim for one in tensors)
    shards = []
    for at, one in enumerate(tensors):
        width, fill = one.element_size(), (1,) * (ndim - one.ndim)
        start, stop = (at, *(0 for _ in range(ndim + 1))), (at + 1, *fill, *one.shape, width)
        strides = (1, *fill, *(stride * width for stride in one.stride()), 1)
        shards.append(Shard(0, Box(start, stop), one.data_ptr() - first, strides))
    bounds = [max(shard.box.stop[dim] for shard in shards) for dim in range(ndim + 2)]
    try:
        check_places(shards, bounds, "looking for bytes of two tensors")
    except LayoutError:
        return True
    return False
