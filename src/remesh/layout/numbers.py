"""Numbers that stand in for the elements of tensors, and a mode of torch in which they may be moved and not changed.

A number has an index, a check of that index which no arithmetic keeps, and the dtype to which it was cast on its way. A
source gets its numbers where and when they are first read, so that of a large one only what is used takes memory and
time. Zero is a constant, and -1 what nothing has written.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from remesh.foundation.errors import LayoutError
from remesh.foundation.torch_private import TorchDispatchMode
from remesh.layout.affine import AffineRuns, join_runs
from remesh.layout.box_array import IntArray
from remesh.layout.places import has_own_places

_DOING = "recording a loader"
_CHECK_BITS, _DTYPE_BITS = 22, 5
_SHIFT = _CHECK_BITS + _DTYPE_BITS
_MOST_ELEMENTS = 1 << (63 - _SHIFT)
_FACTOR, _ADDEND = -0x61C8864680B583EB, 0x5851F42D4C957F2D
UNWRITTEN, ZERO = -1, 0
BLOCK = 1 << 20
"""Numbers that are made or read at a time, so that they stay in a cache."""
_MOVES = frozenset(
    (
        *("copy_", "clone", "cat", "stack", "index", "index_put_", "index_put", "index_select", "index_copy"),
        *("index_copy_", "index_fill_", "gather", "scatter", "scatter_", "where", "masked_fill", "masked_fill_"),
        *("constant_pad_nd", "roll", "flip", "rot90", "repeat", "repeat_interleave", "tril", "triu", "fill_"),
        *("zero_", "empty_like", "zeros_like", "new_empty", "new_zeros", "new_empty_strided", "slice_scatter"),
        *("select_scatter", "diagonal_scatter", "as_strided_scatter", "narrow_copy", "split_copy"),
        *("split_with_sizes_copy", "unbind_copy", "permute_copy", "transpose_copy", "view_copy", "slice_copy"),
        *("select_copy", "expand_copy", "t_copy", "_unsafe_view", "_reshape_copy", "lift_fresh"),
        *("_local_scalar_dense", "take", "masked_select", "masked_scatter", "masked_scatter_", "pixel_shuffle"),
        *("channel_shuffle", "block_diag", "empty_strided", "set_", "resize_", "detach_", "swap_", "cartesian_prod"),
    )
)
"""Operations of torch, besides views, that put elements elsewhere and change none."""
_PAST_DISPATCH = frozenset(["numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"])
"""Methods by which memory is read or written without an operation."""


def make_untouched(shape: Sequence[int]) -> torch.Tensor:
    """Of a large one only what is written takes memory."""
    return torch.empty(tuple(shape), dtype=torch.int64, device="cpu")


def holds_all_of(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a cast changes no value."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    one, other = torch.finfo(wide), torch.finfo(narrow)
    return one.eps <= other.eps and one.max >= other.max and one.smallest_normal <= other.smallest_normal


class NumberedSources:
    """Sources whose elements are numbers; filled where they are read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.names = list(shapes)
        # One number stays free between sources, so that no run crosses from one to the next.
        self._starts = np.cumsum([1, *(size + 1 for size in sizes)])
        if self._starts[-1] > _MOST_ELEMENTS:
            raise LayoutError(
                f"{_DOING}: sources have {self._starts[-1]} elements, expected at most {_MOST_ELEMENTS}; give groups"
            )
        self.tensors = {name: make_untouched(shape) for name, shape in shapes.items()}
        self.start_of = {name: int(start) for name, start in zip(self.names, self._starts, strict=False)}
        self._salt = secrets.randbits(40)

    def fill(self, view: torch.Tensor, name: str) -> None:
        """Write the numbers of what a view of a source shows."""
        narrowed = view
        for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
            if step == 0 and size > 1:
                narrowed = narrowed.narrow(dim, 0, 1)
        if not has_own_places(tuple(narrowed.shape), tuple(narrowed.stride())):
            narrowed = self.tensors[name]
        self._fill(narrowed, self.start_of[name])

    def _fill(self, view: torch.Tensor, first: int) -> None:
        if view.is_contiguous():
            flat, at = view.view(-1), first + int(view.storage_offset())
            for start in range(0, len(flat), BLOCK):
                part = flat[start : start + BLOCK]
                self._write(part, torch.arange(at + start, at + start + len(part), dtype=torch.int64, device="cpu"))
            return
        # The longest dims are cut, so that a block is at most so large.
        longest = max(range(view.ndim), key=lambda dim: view.shape[dim])
        if view.numel() > BLOCK and view.shape[longest] > 1:
            rows = max(1, BLOCK * view.shape[longest] // view.numel())
            for part in torch.split(view, rows, longest):
                self._fill_block(part, first)
        else:
            self._fill_block(view, first)

    def _fill_block(self, view: torch.Tensor, first: int) -> None:
        index = torch.full((), first + int(view.storage_offset()), dtype=torch.int64, device="cpu")
        for size, step in zip(view.shape, view.stride(), strict=True):
            index = index.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device="cpu") * step
        self._write(view, index)

    def _write(self, to: torch.Tensor, index: torch.Tensor) -> None:
        check = index + self._salt
        check.mul_(check).mul_(_FACTOR).add_(_ADDEND)
        check.bitwise_right_shift_(64 - _CHECK_BITS).bitwise_and_((1 << _CHECK_BITS) - 1)
        to.copy_(check.bitwise_or_(index << _SHIFT))

    def read(self, numbers: IntArray) -> tuple[IntArray, IntArray, Any]:
        """Index and dtype of each number, and whether it is one."""
        index = numbers >> _SHIFT
        check = index + self._salt
        check *= check
        check *= _FACTOR
        check += _ADDEND
        check >>= 64 - _CHECK_BITS
        check ^= numbers
        check &= (1 << _CHECK_BITS) - 1
        is_number = check == 0
        is_number &= index > 0
        return index, (numbers >> _CHECK_BITS) & ((1 << _DTYPE_BITS) - 1), is_number

    def whose(self, index: IntArray) -> IntArray:
        """The number of the source of each index."""
        return np.searchsorted(self._starts, index, side="right") - 1

    def split(self, runs: AffineRuns) -> Iterator[tuple[str, AffineRuns]]:
        """Runs by source, with the elements of that source."""
        last = runs.element + (runs.length - 1) * runs.element_step
        crosses = self.whose(runs.element) != self.whose(last)
        if crosses.any():
            runs = join_runs([runs.select(~crosses), runs.select(crosses).points()])
        whose = self.whose(runs.element)
        for number in np.unique(whose).tolist():
            of_it = runs.select(whose == number)
            yield self.names[number], replace(of_it, element=of_it.element - self._starts[number])


@dataclass
class MovesOnly(TorchDispatchMode):  # type: ignore[misc]
    """Fills numbers in where they are read, and refuses what is no move."""

    numbered: NumberedSources
    stand_ins: Mapping[str, torch.Tensor]
    dtypes: list[torch.dtype] = field(default_factory=list)
    """To which something was cast; a number has the place in this list, from 1 on."""
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._lazy = {one.untyped_storage().data_ptr(): name for name, one in self.numbered.tensors.items()}
        self._unwritten = {one.untyped_storage().data_ptr(): name for name, one in self.stand_ins.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.is_view or name in ("detach", "alias", "_reshape_alias"):
            return func(*args, **kwargs)
        given = [one for one in _leaves((args, kwargs)) if one.device.type == "cpu"]
        changed = [id(one) for one in _changed_by(func, args, kwargs)]
        for one in given:
            self.touch(one, is_changed=id(one) in changed)
        is_move = func.namespace == "aten" and name in _MOVES
        if is_move or not any(map(self._has_numbers, given)):
            out = func(*args, **kwargs)
            if is_move and any(one.dtype != torch.int64 for one in _leaves(out)) and any(map(self._has_numbers, given)):
                raise LayoutError(
                    f"{_DOING}: {func} puts weights into a tensor of dtype {next(iter(_leaves(out))).dtype} that the "
                    "loader makes; make it of the dtype of what it copies, as empty_like and new_empty do"
                )
            return out
        if name == "_to_copy":
            return self._cast(args[0], kwargs.get("dtype"))
        raise LayoutError(
            f"{_DOING}: it calls {func} on weights, which is no move, expected views, copies and indices; leave it out "
            "of what is recorded, and call it on the targets behind the move"
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The mode, and its guard of what reads memory without an operation."""
        with _ReadsPastTorch(self), self:
            yield

    def touch(self, one: torch.Tensor, *, is_changed: bool) -> None:
        """Make sure that what is about to be read, or written, has its numbers."""
        at = one.untyped_storage().data_ptr() if one.numel() else 0
        if target := self._unwritten.pop(at, None):
            self.stand_ins[target].fill_(UNWRITTEN)
            self.written.append(target)
        if (source := self._lazy.get(at)) is not None:
            if is_changed or one.dtype != torch.int64:
                del self._lazy[at]
                self.numbered.fill(self.numbered.tensors[source], source)
            else:
                self.numbered.fill(one, source)

    def _has_numbers(self, one: torch.Tensor) -> bool:
        return one.dtype == torch.int64 and any(
            bool(self.numbered.read(rows.reshape(-1).numpy())[2].any()) for rows in _rows(one)
        )

    def _cast(self, one: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A copy with the dtype noted in every number; the dtype of what is moved is decided by sources and targets."""
        out = one.clone()
        if dtype is None or dtype == torch.int64:
            return out
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
        tag = self.dtypes.index(dtype) + 1
        before = (out >> _CHECK_BITS) & ((1 << _DTYPE_BITS) - 1)
        is_number = out > 0
        others = [self.dtypes[int(one) - 1] for one in torch.unique(before[is_number]) if int(one)]
        if not all(holds_all_of(dtype, other) for other in others):
            raise LayoutError(
                f"{_DOING}: it casts weights to {others[0]} and then to {dtype}, expected one cast; leave out the first"
            )
        out += torch.where(is_number & (before == 0), tag << _CHECK_BITS, 0)
        return out


class _ReadsPastTorch(TorchFunctionMode):
    """Fills numbers in where a loader reads memory without an operation, by NumPy say."""

    def __init__(self, mode: MovesOnly) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _PAST_DISPATCH:
            self._mode.touch(args[0], is_changed=True)
        return func(*args, **(kwargs or {}))


def _rows(one: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts that are not much larger than a block."""
    if one.numel() <= BLOCK or not one.ndim:
        yield one
    else:
        yield from torch.split(one, max(1, BLOCK * one.shape[0] // one.numel()))


def _changed_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes into."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _leaves(args[at] if at < len(args) else kwargs.get(argument.name))


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
