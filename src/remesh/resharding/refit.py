"""Refit of generators with new weights: a repeated move in which each version is seen whole or not at all.

Definitions. *Trainers* give a state, *generators* take it; a rank may be both. A *version* is the number that the
trainers assign to one state of their weights. A generator has two buffers of each tensor: the *front*, which readers
see, and the *back*, which the next version is moved into. A *snapshot* is the front buffer with its version, held by a
reader.

One refit, in steps:

1. Generators wait until no reader holds the back buffer any more, for a limited time.
2. All ranks agree on the version and the plan: one small gather, from the second refit on.
3. The weights move into the back buffers. Readers go on with the front, undisturbed. On a device the stream that moves
   them waits for what readers have queued there before, and readers' streams for what was moved.
4. All ranks know that all are done; each generator turns its buffers over.

A generator without room for a second buffer takes *in place*: both are one. Readers wait while a version moves, and no
reader sees a version that did not arrive whole.

If a rank dies in step 3, every generator keeps its front: an older version, but a whole one; one that takes in place
has none until the next has arrived. `regroup` goes on with the ranks that are left, or with new ones.

       refit      1         2         3
       buffer A   ====1=====front======....=====3=====front
       buffer B             ====2=====front======......
       readers              1 1 1 1 1  2 2 2 2 2 2      3 3
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group, lack_of_memory
from remesh.device.streams import CallersStreams, StreamOrder
from remesh.foundation.errors import PeerError, PlanError
from remesh.foundation.options import check_option, check_range
from remesh.foundation.torch_private import never_compiled
from remesh.layout.from_torch import Piece, dtensor_of
from remesh.layout.recorded import Recorded
from remesh.resharding.model.tasks import Missing
from remesh.resharding.planning.transfer import PlanOptions
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.check_pieces import check_memories
from remesh.resharding.running.describe import Tensors, check_tensors, pieces_of
from remesh.resharding.running.handle import Handle
from remesh.resharding.running.run import Moved

_DOING = "refitting the generators"
_READERS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Snapshot:
    """One complete version of the weights, which does not change while it is held."""

    version: int
    """As the trainers numbered it."""
    tensors: Mapping[str, torch.Tensor | Piece]
    """By name, in the layout that the generator asked for. Read only."""


@never_compiled
class Refit:
    """Sends weights from trainers to generators, one version after the other.

    ``take`` names the tensors that this rank wants, as they should be: they become one of its two buffers, the other
    is allocated like them (the first push raises a lack of memory on all ranks), so give no other `Refit` the same
    memory. Empty on a rank that only trains. With what was ``recorded`` of a loader they are its targets, local tensors
    under their own names, and its sources are what is taken. With ``in_place`` there is no other buffer, and this
    rank's readers wait while a version moves, at most ``readers_timeout_s``; ranks may differ in it.
    """

    def __init__(
        self,
        take: Tensors | None = None,
        *,
        group: Group = None,
        readers_timeout_s: float = _READERS_TIMEOUT_S,
        in_place: bool = False,
        recorded: Recorded | None = None,
        **options: Unpack[PlanOptions],
    ) -> None:
        check_option(_DOING, "readers_timeout_s", readers_timeout_s, float)
        check_range(_DOING, "readers_timeout_s", readers_timeout_s, least=0, most=threading.TIMEOUT_MAX)
        check_option(_DOING, "in_place", in_place, bool)
        check_tensors({} if take is None else take, "take")
        self._resharder = Resharder(group, **options)
        check_memories(pieces_of(take or {}), dist.get_rank() if dist.is_initialized() else 0)
        self._options = options
        self._group = group
        self._readers_timeout_s = readers_timeout_s
        self._lack: PlanError | None = None
        """No memory for a second buffer; the first push raises it on all ranks."""
        self._buffers: tuple[dict[str, torch.Tensor | Piece], ...] = (dict(take or {}),)
        if not in_place:
            self._make_second_buffer()
        self._bound = [None if recorded is None else recorded.bind(_locals_of(each)) for each in self._buffers]
        self._is_written_in_place = False
        """Whether a version is being moved into the buffer that readers see."""
        self._torn: int | None = None
        """The version of which a part has been written over what readers saw, and that never arrived."""
        self._front: int | None = None
        self._version: int | None = None
        self._num_readers = [0, 0]
        self._orders = tuple(map(_order_of, self._buffers))
        """Of what is queued on devices, for each buffer: a reader that has left may still be at work there."""
        self._under_way: RefitHandle | None = None
        """The last one that was started, until a caller has asked for its result."""
        self._lock = threading.Condition()

    def _make_second_buffer(self) -> None:
        front = self._buffers[0]
        try:
            self._buffers = (front, _like(front))
        except (RuntimeError, MemoryError) as raised:
            found = lack_of_memory(raised)
            if found is None:
                raise
            num_bytes = sum(piece.tensor.nbytes for piece in pieces_of(front).values())
            self._lack = PlanError(
                f"{_DOING}: found no memory for a second buffer of {num_bytes} bytes on a rank ({found}); nothing has "
                "moved; free memory and make the Refit again, or give it in_place=True"
            )

    @property
    def version(self) -> int | None:
        """Version that readers of this rank see; None while there is none. On a trainer the last that went out."""
        return self._version

    @property
    def num_planned(self) -> int:
        """Refits of this group that had to plan."""
        return self._resharder.num_planned

    def push(self, give: Tensors | None = None, version: int | None = None) -> Moved:
        """Move one version from the trainers to the generators; returns what was moved.

        Called by every rank of the group: trainers with what they hold and the version, generators with nothing.
        Blocks until all generators have it. Raises the same error on all ranks, and readers then still see the previous
        version, if it was not written over in place: `PlanError` when the trainers disagree, or no trainer has a tensor
        that is wanted; `PeerError` when a rank died, or a reader kept the buffer for too long.
        """
        return self.start(give, version).result()

    def start(self, give: Tensors | None = None, version: int | None = None) -> RefitHandle:
        """As `push`, in a thread; blocks until all ranks have agreed. Readers may read meanwhile.

        One refit at a time: `PlanError` on all ranks while some rank has not asked for the result of the previous one.
        """
        back = 1 if self._front == 0 and len(self._buffers) > 1 else 0

        def tell() -> int | None:
            if self._lack is not None:
                raise self._lack
            self._check_is_free()
            self._wait_for_readers(back)
            return version

        try:
            meeting = self._resharder.meet(lambda: (give or {}, self._taken_into(back)), tell, _DOING)
            agreed = _agree_on_version(meeting.said)
        except BaseException:
            if self._under_way is None:  # nothing has moved
                self._let_readers_in()
            raise
        if self._options.get("missing") is Missing.LEAVE:
            self._keep_left(back, meeting.job.transfer.missing)
        self._under_way = RefitHandle(self, meeting.start(), back, agreed)
        return self._under_way

    def _taken_into(self, buffer: int) -> Tensors:
        bound = self._bound[buffer]
        return self._buffers[buffer] if bound is None else dict(bound.pieces)

    def _keep_left(self, back: int, missing: Iterable[str]) -> None:
        """Bring the back buffer up to date where no rank gives anything: its values are those of two versions ago."""
        if self._front not in (None, back):
            front, behind = (pieces_of(self._taken_into(at)) for at in (self._front, back))
            for name, piece in {name: behind[name] for name in front.keys() & missing}.items():
                piece.tensor.copy_(front[name].tensor)

    @contextlib.contextmanager
    def read(self) -> Iterator[Snapshot]:
        """The newest complete version, unchanged until the context ends. For any thread; talks to no other rank.

        Raises `PlanError` before the first version has arrived. Where weights are taken in place it waits for one that
        is on its way, and raises `PeerError` when that takes too long, `PlanError` when it came to nothing.
        """
        with self._lock:
            self._wait_for_writer()
            if self._torn is not None:
                raise PlanError(
                    f"reading the weights of a generator: version {self._torn} was moved into them in place and did "
                    "not arrive whole, expected a whole version; push again"
                )
            if self._front is None or self._version is None:
                raise PlanError(
                    "reading the weights of a generator: no version has arrived, expected at least one; push one first"
                )
            front = self._front
            self._num_readers[front] += 1
            self._orders[front].begin_read()
            snapshot = Snapshot(self._version, self._buffers[front])
        try:
            yield snapshot
        finally:
            with self._lock:
                self._num_readers[front] -= 1
                self._orders[front].end_read()
                self._lock.notify_all()

    def regroup(self, group: Group = None, host_of: Mapping[int, str] | None = None) -> None:
        """Continue in another group, after members have left or joined; the next push makes a new plan.

        Called by every rank of the new group before its next push. Readers keep the version that they see.
        """
        if host_of is not None:
            self._options["host_of"] = host_of
        self._group = group
        self._resharder = Resharder(group, **self._options)

    def settle(self, handle: RefitHandle, back: int, has_arrived: bool) -> None:
        """The end of a refit, once: if its version has arrived, show its buffer to the readers. Done by its handle."""
        with self._lock:
            if self._under_way is handle:
                self._under_way = None
                with handle.streams.followed():
                    bound = self._bound[back]
                    if has_arrived and bound is not None:
                        bound.copy()
                    self._orders[back].end_write()
                if has_arrived:
                    self._front, self._version, self._torn = back, handle.version, None
                elif self._is_written_in_place:
                    self._front, self._version, self._torn = None, None, handle.version
                self._let_readers_in()

    def _let_readers_in(self) -> None:
        with self._lock:
            self._is_written_in_place = False
            self._lock.notify_all()

    def _wait_for_writer(self) -> None:
        if not self._lock.wait_for(lambda: not self._is_written_in_place, self._readers_timeout_s):
            raise PeerError(
                "reading the weights of a generator: a version is being moved into them in place, expected its end "
                f"after {self._readers_timeout_s} s; call result() of its handle, in another thread than this one"
            )

    def _check_is_free(self) -> None:
        under_way = self._under_way
        if under_way is not None:
            raise PlanError(
                f"{_DOING}: version {under_way.version} was started and its result was never asked for, expected one "
                "refit at a time, since both would use one buffer; call result() of its handle first, on every rank"
            )

    def _wait_for_readers(self, buffer: int) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not self._num_readers[buffer], self._readers_timeout_s):
                raise PeerError(
                    f"{_DOING}: {self._num_readers[buffer]} readers hold a snapshot of what is to be written over, "
                    f"expected none after {self._readers_timeout_s} s; leave `read()` sooner, or copy what is kept"
                )
            self._is_written_in_place = len(self._buffers) == 1
            self._orders[buffer].begin_write()


def _agree_on_version(told: Sequence[int | None]) -> int:
    # Every rank looks at the same list, so every rank raises the same error.
    versions = {rank: each for rank, each in enumerate(told) if each is not None}
    if len(set(versions.values())) != 1:
        raise PlanError(
            f"{_DOING}: the trainers push versions {sorted(set(versions.values()))[:4]} on {len(versions)} ranks, "
            "expected one version; push with the same number on every trainer"
        )
    return next(iter(versions.values()))


@never_compiled
class RefitHandle:
    """A refit under way. A caller must ask for its result: only then do readers see the new version."""

    def __init__(self, refit: Refit, handle: Handle, back: int, version: int) -> None:
        self._refit = refit
        self._handle = handle
        self._back = back
        self.streams = CallersStreams()
        """On which it is written; those of the thread that has started it."""
        self.version = version
        """The version that is on its way."""

    @property
    def is_done(self) -> bool:
        """Whether the weights have arrived everywhere, or never will."""
        return self._handle.is_done

    def result(self, timeout_s: float | None = None) -> Moved:
        """What was moved, once it has arrived everywhere; from now on readers see it. As `Handle.result`."""
        try:
            moved = self._handle.result(timeout_s)
        except TimeoutError:  # goes on
            raise
        except BaseException:
            self._refit.settle(self, self._back, has_arrived=False)
            raise
        self._refit.settle(self, self._back, has_arrived=True)
        return moved


def _locals_of(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Targets of a recorded loader, which has places in the memory of a rank."""
    found: dict[str, torch.Tensor] = {}
    for name, one in tensors.items():
        if isinstance(one, Piece | DTensor):
            raise PlanError(
                f"{_DOING}: target {name!r} of a recorded loader is a {type(one).__name__}, expected this rank's own "
                "tensor; record the loader with local tensors"
            )
        found[name] = one
    return found


def _order_of(tensors: Tensors) -> StreamOrder:
    return StreamOrder.of([one.tensor if isinstance(one, Piece) else one for one in tensors.values()])


def _like(tensors: Tensors) -> dict[str, torch.Tensor | Piece]:
    """Buffers of the same layouts; tensors that share memory, such as the parts of a fused one, share it again."""
    storages: dict[int, torch.UntypedStorage] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            local = twin(tensor.to_local())
            return dtensor_of(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())

    made: dict[str, torch.Tensor | Piece] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if isinstance(tensor, Piece):
                made[name] = replace(tensor, tensor=twin(tensor.tensor))
            else:
                made[name] = twin(tensor)
    return made
