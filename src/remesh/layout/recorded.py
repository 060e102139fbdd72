"""Recorder of weight loaders: which boxes of which sources make which targets, found by running the loader on numbers.

Definitions. A *loader* is a function that fills an engine's parameters (*targets*) from the tensors of a checkpoint or
a trainer (*sources*): it cuts, joins, transposes and permutes, in a way of its own for each model. Nothing is known of
it.

1. Every element of every source gets a number (`numbers`), and the loader runs on these.
2. What is no move is refused where it happens, by the name of the operation: only views, copies and index operations
   may touch a number. A cast leaves the number, and notes the dtype in it.
3. Numbers that have arrived in a target are read block by block: the index tells where each comes from, the check that
   nothing has changed it behind our back. Constant zeros (padding) and elements that nothing has written are known.
4. Boxes are found in these pairs of element and place (`affine`).

    source  q [4 rows]   k [2 rows]                 numbers 1..4, 6..7 (for one element a row)
    target  qkv of rank 1 of 2 = cat(q.chunk(2)[1], k.chunk(2)[1])          -> 3 4 7 -> q[2:4] at 0, k[1:2] at 2
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from remesh.foundation.errors import LayoutError
from remesh.foundation.torch_private import never_compiled
from remesh.layout.affine import AffineRuns, find_runs, join_runs, shards_of_runs
from remesh.layout.box import Box
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.layout.cover import subtract_all
from remesh.layout.from_torch import Piece
from remesh.layout.numbers import BLOCK, UNWRITTEN, ZERO, MovesOnly, NumberedSources, holds_all_of, make_untouched
from remesh.layout.shard import Shard

Loader = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object]
"""Called with sources and targets by name, all of dtype int64 on the CPU; fills the targets."""

_DOING = "recording a loader"


@dataclass(frozen=True)
class Recorded:
    """What a loader does: plain values, which hold no memory of the sources or targets."""

    sources: Mapping[str, tuple[int, ...]]
    """Whole shapes."""
    targets: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Mapping[str, tuple[Shard, ...]]]
    """Target -> source -> boxes of the source, placed in the target as if that were row-major. Holder 0 is a
    placeholder. An element may lie in several places."""
    casts: Mapping[str, frozenset[str]]
    """Source -> names of the dtypes that the loader casts it to on the way; what is moved is cast once, at its end."""
    zeros: Mapping[str, int]
    """Target -> elements that the loader sets to zero, as padding; they are not moved, so that they must be zero."""
    same_as: Mapping[str, str]
    """Target that is tied to another by its memory -> that one."""

    def made_of(self, target: str) -> frozenset[str]:
        """The sources of a target."""
        return frozenset(self.places[self.same_as.get(target, target)])

    @property
    def unused(self) -> frozenset[str]:
        """Sources of which no target takes anything."""
        return frozenset(self.sources).difference(*self.places.values())

    def bind(self, targets: Mapping[str, torch.Tensor], only: Collection[str] | None = None) -> BoundWeights:
        """Pieces of the sources, or ``only`` of some, in the memory of these targets, which may be some of all."""
        binding = _Binding(self, targets)
        return BoundWeights(binding.pieces(self.sources if only is None else only), tuple(binding.copies))


@dataclass(frozen=True)
class BoundWeights:
    """What one rank takes from a `reshard`, or gives, and what it copies beside it."""

    pieces: Mapping[str, Piece]
    """By name of the source."""
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """``(to, from)``: other places of elements that arrive in one of them."""

    def copy(self) -> None:
        """Copy what has arrived once to the other places that it belongs to. To be called behind every move."""
        with torch.no_grad():
            for to, source in self.copies:
                to.copy_(source)

    def collect(self) -> None:
        """The reverse, for a rank that gives these pieces: to be called in front of every move."""
        with torch.no_grad():
            for to, source in self.copies:
                source.copy_(to)


@never_compiled
def record(
    load: Loader,
    sources: Mapping[str, Sequence[int]],
    targets: Mapping[str, torch.Tensor],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    groups: Iterable[Collection[str]] | None = None,
    may_lack: Collection[str] = (),
) -> Recorded:
    """Run a loader on numbers, and tell from where each element of the targets comes. Calls no other rank.

    The loader works in the thread that calls it: operations of another thread are not seen.
    ``sources`` are whole shapes; of ``targets`` only shapes count, so that they may be on ``meta``. ``dtypes`` are
    those of the sources, by which a cast is judged. With ``groups`` of names, such as those of one layer, the loader
    runs once for each, and memory is that of one group: 8 bytes for each number.

    `LayoutError` for whatever is no move, for targets that are not filled unless ``may_lack`` names them, and for casts
    that lose more than the one to the target's dtype.
    """
    recording = _Recording(sources, targets, dtypes or {})
    for names in groups if groups is not None else [list(sources)]:
        recording.run(load, names)
    return recording.result(may_lack)


class _Recording:
    def __init__(
        self,
        sources: Mapping[str, Sequence[int]],
        targets: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._shapes = {name: tuple(shape) for name, shape in sources.items()}
        self._dtypes = dtypes
        self._targets = targets
        self._same_as = _ties_of(targets)
        self._stand_ins = {
            name: make_untouched(one.shape) for name, one in targets.items() if name not in self._same_as
        }
        self._places: dict[str, dict[str, tuple[Shard, ...]]] = {name: {} for name in self._stand_ins}
        self._casts: dict[str, set[torch.dtype]] = {}
        self._zeros = dict.fromkeys(self._stand_ins, 0)

    def run(self, load: Loader, names: Collection[str]) -> None:
        """Run the loader on the sources of these names, and note what it did."""
        numbered = NumberedSources({name: self._shapes[name] for name in names})
        into = dict(self._stand_ins) | {name: self._stand_ins[one] for name, one in self._same_as.items()}
        mode = MovesOnly(numbered, self._stand_ins)
        with torch.no_grad(), mode.entered():
            load(dict(numbered.tensors), into)
        for name in mode.written:
            self._note(name, numbered, mode.dtypes)
            self._stand_ins[name] = make_untouched(self._stand_ins[name].shape)

    def result(self, may_lack: Collection[str]) -> Recorded:
        """What was recorded, if all targets are filled."""
        found = {
            name: sum(shard.box.size for each in of.values() for shard in each) for name, of in self._places.items()
        }
        # Zeros alone are no weights: the loader may have read its sources where numbers are not filled in.
        zeros = {name: number if found[name] else 0 for name, number in self._zeros.items()}
        lacking = {name: one.numel() - zeros[name] - found[name] for name, one in self._stand_ins.items()}
        if wrong := [name for name, number in lacking.items() if number > 0 and name not in may_lack]:
            lines = (f"{name!r} of shape {tuple(self._targets[name].shape)}: {lacking[name]}" for name in wrong)
            raise LayoutError(
                f"{_DOING}: {len(wrong)} targets have elements that no source fills, expected none; give the sources "
                "that are missing, or name these targets in may_lack:\n  " + "\n  ".join(lines)
            )
        return Recorded(
            self._shapes,
            {name: tuple(one.shape) for name, one in self._targets.items()},
            self._places,
            {name: frozenset(str(one).removeprefix("torch.") for one in via) for name, via in self._casts.items()},
            {name: number for name, number in self._zeros.items() if number},
            self._same_as,
        )

    def _note(self, name: str, numbered: NumberedSources, dtypes: Sequence[torch.dtype]) -> None:
        flat = self._stand_ins[name].reshape(-1).numpy()
        parts: list[AffineRuns] = []
        tags: set[tuple[int, int]] = set()
        for start in range(0, len(flat), BLOCK):
            block = flat[start : start + BLOCK]
            index, tag, is_number = numbered.read(block)
            is_zero = block == ZERO
            self._zeros[name] += int(is_zero.sum())
            bad = ~(is_number | is_zero | (block == UNWRITTEN))
            if bad.any():
                self._refuse(name, start + int(bad.argmax()))
            at = np.flatnonzero(is_number)
            if not len(at):
                continue
            elements = index[at]
            if tag.any():
                whose = numbered.whose(elements)
                tags |= set(zip(whose.tolist(), tag[at].tolist(), strict=True))
            parts.append(find_runs(elements, at + start))
        self._check_casts(name, {(numbered.names[source], dtypes[one - 1]) for source, one in tags if one})
        for source, runs in numbered.split(join_runs(parts)) if parts else ():
            shards = shards_of_runs(runs, self._shapes[source], f"{_DOING}: reading source {source!r} in {name!r}")
            self._places[name][source] = self._places[name].get(source, ()) + shards

    def _refuse(self, name: str, at: int) -> None:
        where = tuple(int(i) for i in np.unravel_index(at, tuple(self._targets[name].shape)))
        raise LayoutError(
            f"{_DOING}: element {where} of target {name!r} is computed, expected an element of a source or zero; "
            "move the weights as they are, and call what computes (quantisation, products) on the target behind it"
        )

    def _check_casts(self, target: str, casts: Collection[tuple[str, torch.dtype]]) -> None:
        """Refuse casts that lose more than that of the source to the target would."""
        for source, via in sorted(casts, key=str):
            given, wanted = self._dtypes.get(source), self._targets[target].dtype
            if via not in (wanted, given) and (given is None or not holds_all_of(via, given)):
                raise LayoutError(
                    f"{_DOING}: source {source!r} of dtype {given or 'unknown'} goes to target {target!r} of {wanted} "
                    f"through {via}, expected one cast; leave that cast out, or give the sources' dtypes"
                )
            self._casts.setdefault(source, set()).add(via)


def _ties_of(targets: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Targets that are another one under a second name -> that one."""
    seen: dict[object, str] = {}
    same: dict[str, str] = {}
    for name, one in targets.items():
        key: object = id(one) if one.is_meta or not one.numel() else (one.data_ptr(), one.shape, one.stride())
        if seen.setdefault(key, name) != name:
            same[name] = seen[key]
    return same


class _Binding:
    """Pieces of sources in real targets, and copies for elements that have several places."""

    def __init__(self, recorded: Recorded, targets: Mapping[str, torch.Tensor]) -> None:
        self._recorded = recorded
        # Of those that are one memory one is filled.
        ties = _ties_of(targets)
        self._targets = {name: one.detach() for name, one in targets.items() if name not in ties}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, one in targets.items():
            if name not in recorded.targets or tuple(one.shape) != recorded.targets[name]:
                raise LayoutError(
                    f"binding a recorded loader: target {name!r} has shape {tuple(one.shape)}, expected "
                    f"{recorded.targets.get(name, 'one of the recorded targets')}; record it again"
                )

    def pieces(self, only: Collection[str]) -> dict[str, Piece]:
        """One for each source of which there is something."""
        held: dict[str, list[tuple[str, Shard]]] = {}
        for target in self._targets:
            for source, shards in self._recorded.places[self._recorded.same_as.get(target, target)].items():
                if source in only:
                    held.setdefault(source, []).extend((target, shard) for shard in shards)
        return {source: self._piece(source, places) for source, places in held.items()}

    def _piece(self, source: str, places: Sequence[tuple[str, Shard]]) -> Piece:
        shape, home = self._recorded.sources[source], places[0][0]
        memory = self._targets[home]
        at_home = [shard for target, shard in places if target == home]
        others = [place for place in places if place[0] != home]
        boxes = [shard.box for shard in at_home]
        is_once = is_disjoint(BoxArray.of(boxes, len(shape)))
        if is_once and not any(subtract_all(shard.box, boxes) for _, shard in others):
            kept = at_home
        else:  # no memory has all: they arrive in one that is made for them
            kept, size, others = [], 0, list(places)
            for _, shard in places:
                for box in subtract_all(shard.box, [one.box for one in kept]):
                    kept.append(Shard(0, box, size))
                    size += box.size
            memory = torch.empty(size, dtype=memory.dtype, device=memory.device)
        for (target, shard), one in itertools.product(others, kept):
            if (shared := shard.box.intersect(one.box)) is not None:
                self.copies.append((_view(self._targets[target], shard, shared), _view(memory, one, shared)))
        return Piece(memory, shape, tuple(kept))


def _view(memory: torch.Tensor, shard: Shard, box: Box) -> torch.Tensor:
    """A box of a shard in a tensor."""
    if not memory.is_contiguous():
        raise LayoutError(
            f"binding a recorded loader: a target of shape {tuple(memory.shape)} shares elements with others, and is "
            f"not row-major (strides {memory.stride()}); make it contiguous"
        )
    assert shard.strides is not None
    return memory.as_strided(box.shape, shard.strides, memory.storage_offset() + shard.offset_of(box))
