"""Rules of collectives that can be restarted after a cut, and the inputs that have to be kept for that.

A cut may come while a rank is inside of a collective that another rank has not entered. The collective can be dropped
with its process group and begun in the next group if

1. it cannot be complete on any rank before that other rank has entered it, and
2. its inputs are then what they were.

    every rank waits for all others  barrier, all_reduce, all_gather, reduce_scatter, all_to_all in equal parts
    receivers wait for the root      broadcast, scatter; a root may be through long before the others
    the root waits for all others    reduce, gather; a sender may be through long before the root

Inputs stay as they are unless outputs lie in the same tensors; of such inputs a copy is kept, if it is small. All
other collectives have to end on all members before a cut, and so do those that move no element, since no rank may wait
in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import memmove, string_at
from typing import Any, Final

import torch

from remesh.carried.torch.short import SHORT

if SHORT is not None:
    SHORT.learn(torch.Tensor)

MOST_COPIED_BYTES: Final = 1 << 16
"""The most bytes copied of tensors that a collective changes in place: to copy more would slow each step."""

IN_PLACE: Final = ("allreduce", "allreduce_coalesced")
"""The collectives that leave their output in their input on all ranks."""

Kept = Sequence[tuple[torch.Tensor, torch.Tensor | bytes]]
"""Tensors that a collective changes in place, each with a copy of its former values, or of their bytes."""


Rule = Callable[[Sequence[Any], Mapping[str, Any], int], Kept | None]
"""What a collective with these arguments needs to begin anew, on this rank of its group; None if it cannot."""


def rule_of(name: str) -> Rule:
    """The rule of a collective."""
    return _RULES.get(name, _never)


def restore(kept: Kept) -> None:
    """Give the tensors the values that they had."""
    for tensor, before in kept:
        if isinstance(before, bytes):
            memmove(tensor.data_ptr(), before, len(before))
        else:
            # Of no interest to autograd, which would take it for a change by the program.
            tensor.data.copy_(before)


def has_inference_tensor(arguments: Sequence[Any]) -> bool:
    """Whether a tensor among a collective's arguments was made in torch's inference mode, and changes only there."""
    return any(tensor.is_inference() for tensor in _tensors_of(arguments))


def _in_place(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    if options:  # torch passes tensors by place
        return None
    if SHORT is not None and (copies := SHORT.keep(arguments[0], MOST_COPIED_BYTES)) is not None:
        return copies  # type: ignore[no-any-return]
    left_bytes = MOST_COPIED_BYTES
    kept = []
    for tensor in arguments[0]:
        try:
            num_bytes, lies_flat = tensor.nbytes, tensor.is_contiguous() and tensor.is_cpu
        except RuntimeError:  # a sparse tensor has no bytes of its own
            return None
        if not num_bytes or num_bytes > left_bytes:
            return None
        left_bytes -= num_bytes
        # Bytes, where they lie side by side, take a fifth of the time of a clone.
        kept.append((tensor, string_at(tensor.data_ptr(), num_bytes) if lies_flat else tensor.detach().clone()))
    return kept


def _apart(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    return () if not options and all(tensor.numel() for tensor in _tensors_of(arguments[:2])) else None


def _in_equal_parts(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    is_equal = not any(isinstance(each, list) and each for each in arguments[2:])
    return _apart(arguments, options, rank) if is_equal else None


def _for_receivers(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    return None if _root_of(arguments) in (rank, None) else _apart(arguments[:1], options, rank)


def _for_root(of_root: Rule) -> Rule:
    return lambda arguments, options, rank: of_root(arguments, options, rank) if _root_of(arguments) == rank else None


def _root_of(arguments: Sequence[Any]) -> int | None:
    return next((each.rootRank for each in arguments if hasattr(each, "rootRank")), None)


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)


def _always(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    return ()


def _never(arguments: Sequence[Any], options: Mapping[str, Any], rank: int) -> Kept | None:
    return None


_RULES: Final[Mapping[str, Rule]] = {
    "barrier": _always,
    **dict.fromkeys(IN_PLACE, _in_place),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"), _apart),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), _apart),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), _apart),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall"), _apart),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _in_equal_parts),
    **dict.fromkeys(("broadcast", "scatter"), _for_receivers),
    "reduce": _for_root(_in_place),
    "gather": _for_root(_apart),
}
