"""Gather of small JSON values from all ranks, with errors raised on all ranks alike.

Definitions. *Doing* is the first part of an error message, such as ``"saving checkpoint runs/a"``. The *envelope*
of a rank is the JSON text of its value, or of the error that kept it from having one.

One gather, in steps:

1. Each rank turns its value into an envelope. A failure to do so travels as the rank's envelope, because a rank
   that raised before the collective would leave the others waiting in it.
2. Every rank receives the heads of all: the length of the envelope, and the envelope when it is short. Most gathers end
   here. Over gloo heads go through a tree (`tree`), elsewhere they are a collective.
3. If one is longer, all ranks know it from the heads, and a collective carries all of them in full, padded to the
   longest. Sizes beyond the limit are refused by all ranks, from the same heads.
4. If an envelope holds an error, every rank raises that of the lowest failing rank.
5. An envelope also carries what its rank is doing. Ranks that are in different calls meet in the same gather, and would
   take each other's values for something else; they all raise. The first word counts: paths may have other names.

`step_together` is the whole of it: a local step, whose value stays on its rank, and what the others receive of it.

Only JSON crosses the wire, in ``uint8`` tensors on the group's own device, so gloo and NCCL are served alike and no
peer can make another one unpickle anything. A peer that is gone ends the gather with `PeerError` after the group's
timeout at the latest.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from remesh.comm.word_tree import describe_ranks, gather_words, naming_late
from remesh.device.nccl import agree_on_members, member_here
from remesh.foundation.errors import ConfigError, Error, PeerError
from remesh.foundation.options import check_option
from remesh.foundation.torch_private import (
    backends_of,
    is_known_group,
    nccl_error,
    never_compiled,
    store_of,
    without_fake_tensors,
    world_rank_of,
)

_HEADER_BYTES = 1024
_LENGTH = struct.Struct("<Q")
_INLINE_BYTES = _HEADER_BYTES - _LENGTH.size
_LIMIT_BYTES = 256 << 20
"""Largest envelope of one rank: metadata of a million shards fits; anything longer is data in the wrong place."""
_BREAK_OFF_TAG = 0x5E53
_AT_ONCE = timedelta(milliseconds=1)
_NCCL_PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other at their first call over NCCL, as torch lets collectives of NCCL wait."""
_nccl_verdicts: WeakKeyDictionary[dist.ProcessGroup, ConfigError | None] = WeakKeyDictionary()
"""Of the groups over NCCL that were looked at, why their ranks cannot talk; None where they can."""
_MAX_TEXT = 16_000
"""Characters of an error message that travel to the other ranks."""
_MAX_DOING = 48
"""Characters of what a rank is doing that travel with every value."""

_LAUNCHED = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables in which launchers give a process its rank and their number."""
logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
"""A process group; None is the default group, or this process alone when there is none."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Together(Generic[T]):
    """The result of a step that every rank has done."""

    mine: T
    """What the step returned on this rank."""
    told: list[Any]
    """What every rank sent, by group rank, as JSON returns it."""


def check_group(group: object) -> None:
    """Raise `OptionError` for what is no group; what torch gives to processes that are no members, a number, passes."""
    doing = "taking part in a collective"
    members = dist.group.WORLD if group is None else group
    if members is None or members == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if not isinstance(members, dist.ProcessGroup):
        check_option(doing, "group", members, dist.ProcessGroup)
        return
    if not is_known_group(members):
        raise ConfigError(f"{doing}: the group was destroyed, expected one that is there; make another one")
    if "fake" in backends_of(members).values():
        raise ConfigError(
            f"{doing}: the backend of the group is 'fake', which carries no messages, expected gloo or NCCL"
        )


@cache
def warn_if_alone(doing: str) -> None:
    """Log once a call that a process of many makes by itself, for want of a process group. No communication."""
    for rank, size in _LAUNCHED:
        if dist.group.WORLD is None and os.environ.get(size, "1") not in ("", "1") and rank in os.environ:
            logger.warning(
                "%s: this process is rank %s of %s by %s and %s, and takes itself for one alone, since there is no "
                "process group; call torch.distributed.init_process_group first if all of them take part",
                *(doing, os.environ[rank], os.environ[size], rank, size),
            )
            return


def group_rank(group: Group = None) -> int:
    """This process's rank in the group; 0 without a process group. No communication."""
    check_group(group)
    members = group or dist.group.WORLD
    if members is None:
        return 0
    # torch answers by the rank in the default group; a group beside that one (`remesh.groups.beside`) knows its own.
    rank = members.rank() if isinstance(members, dist.ProcessGroup) else -1
    if rank < 0:
        raise PeerError(
            f"taking part in a collective: world rank {dist.get_rank()} is not a member of the group it was given; "
            "only the group's own ranks may call this"
        )
    return rank


def group_size(group: Group = None) -> int:
    """Number of ranks in the group; 1 without a process group. No communication."""
    members = group or dist.group.WORLD
    return 1 if members is None else dist.get_world_size(members)


def group_device(group: Group = None) -> torch.device:
    """Device whose tensors the group can carry: the CPU wherever it has a backend for it, else a GPU.

    That is the group's ``device_id``, or the one in use where the group was made without.
    """
    if not is_queued(group):
        return torch.device("cpu")
    members = group or dist.group.WORLD
    assert members is not None
    return members.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def is_queued(group: Group = None) -> bool:
    """Whether operations of the group have only been queued on a device when a wait for them returns; so with NCCL.

    Then `check_end` raises if one of them was given up.
    """
    if group is None and not dist.is_initialized():
        return False
    return backends_of(group).get("cpu", "nccl") == "nccl"


def check_end(group: Group, doing: str) -> None:
    """Return when all that this rank has queued on the group's device is done; elsewhere at once. No communication.

    Raises `PeerError` when an operation of the group was given up, whose result is whatever was in its memory before:
    torch aborts what hangs, and does not report it to the program.
    """
    if not is_queued(group):
        return
    torch.cuda.current_stream(group_device(group)).synchronize()
    if (lost := find_given_up(group, doing)) is not None:
        raise lost


def find_given_up(group: Group, doing: str) -> PeerError | None:
    """The error to raise where an operation of the group was given up before now; None elsewhere. Waits for nothing."""
    members = group or dist.group.WORLD
    if members is None or not is_queued(group) or (found := nccl_error(members)) is None:
        return None
    return peer_error(doing, group, RuntimeError(f"{found}: torch gave an operation up"))


def is_of_own_device(raised: BaseException) -> bool:
    """Whether an error means that this rank has no memory left or that its device is lost: no peer has caused it."""
    return isinstance(raised, torch.AcceleratorError) or is_out_of_memory(raised)


def is_out_of_memory(raised: BaseException) -> bool:
    """Whether an error means that a device or the host has no memory left; torch has no type for the host's."""
    return isinstance(raised, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(raised)


def lack_of_memory(raised: BaseException) -> str | None:
    """The allocator's words, in a line, if an error means that no memory is left; None for any other."""
    if not is_out_of_memory(raised):
        return None
    words = str(raised).strip() or type(raised).__name__
    return words.splitlines()[0]


@contextlib.contextmanager
def reporting_lack_of_memory(tell: Callable[[str], Exception]) -> Iterator[None]:
    """Raise what ``tell`` makes of the allocator's words where no memory is left, on a device or on the host."""
    try:
        yield
    except (RuntimeError, MemoryError) as raised:
        found = lack_of_memory(raised)
        if found is None:
            raise
        raise tell(found) from raised


@never_compiled
def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, by group rank, as JSON returns it (tuples become lists, keys become strings).

    Called by every rank of the group; blocks until all have called it. Raises `Error` on all ranks alike when a
    value is not JSON or too long, `PeerError` when a rank is gone.
    """
    return gather_from(lambda: value, group, "gathering values from all ranks")


@never_compiled
def gather_from(produce: Callable[[], Any], group: Group = None, doing: str = "working together") -> list[Any]:
    """Run ``produce`` on every rank and return all its values; if it raised, all raise the lowest such rank's error.

    Called by every rank of the group; blocks until all have called it. All ranks raise the same type with the same
    text, which names the rank. Types known to every rank travel as themselves (children of `Error` by name, built-in
    exceptions); others as their nearest known base. An interrupt or exit stays what it is on its own rank and is a
    `PeerError` on the others.
    """
    return step_together(produce, group, doing, tell=lambda value: value).told


@never_compiled
def step_together(
    step: Callable[[], T],
    group: Group = None,
    doing: str = "working together",
    *,
    tell: Callable[[T], Any] = lambda _: None,
    translate: Callable[[str, BaseException], BaseException] | None = None,
) -> Together[T]:
    """Run a local step on every rank, and go on only if it has succeeded everywhere: else all raise the same error.

    What the step returns stays here, of whatever type it is; every rank receives what ``tell`` makes of it. What
    either raises is raised as ``translate`` gives it, which knows what was being done. Called by every rank of the
    group; blocks until all have called it.
    """
    check_group(group)
    error: BaseException | None = None
    with without_fake_tensors() as fake_mode:  # what carries the answers is real in any case
        try:
            if fake_mode is not None:
                raise ConfigError(
                    f"{doing}: FakeTensorMode is on, in which tensors have no values, expected real ones; call it "
                    "outside of the mode"
                )
            mine = step()
            envelope = _encode({"value": tell(mine), "doing": doing[:_MAX_DOING]}, doing)
        except BaseException as raised:  # travels to all ranks, and is raised again below
            error = raised if translate is None else translate(doing, raised)
            envelope = _encode({"error": _describe(error, doing)}, doing)
        if group_size(group) == 1:
            if error is not None:
                raise error
            if group is None:
                warn_if_alone(doing.partition(" ")[0])
            return Together(mine, [json.loads(envelope)["value"]])
        answers = [json.loads(text) for text in _all_gather_bytes(envelope, group, doing)]
    failed = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if failed:
        _raise_first(failed, error, group)
    _check_same_call([answer["doing"] for answer in answers], group)
    return Together(mine, [answer["value"] for answer in answers])


def peer_error(doing: str, group: Group, raised: BaseException, waited_for: Sequence[int] = ()) -> PeerError:
    """The error to raise when a transport call failed because another rank died, left or stayed away.

    The group is of no use any more. This rank closes its connections in it first, so that ranks which wait for this
    one, or for a rank that does, learn of it now and not after their timeout.
    """
    break_off(group)
    late = f", while it waited for {describe_ranks(waited_for)}" if waited_for else ""
    return PeerError(
        f"{doing}: rank {group_rank(group)} of {group_size(group)} expected an answer from every peer, found the "
        f"connection broken or timed out ({_first_line(raised)}){late}; see that every rank makes this call; this "
        "process group cannot be used any more, meet again in a new one"
    )


def break_off(group: Group) -> None:
    """Close this rank's connections in the group; a peer that waits on one fails at once. Calls no other rank.

    gloo closes a connection on both sides when a wait on it times out, so a receive of nothing is waited for, shortly.
    Other backends have their own watchdogs; there this does nothing.
    """
    if group_size(group) == 1 or is_queued(group):
        return
    for peer in range(group_size(group)):
        if peer != group_rank(group):
            with contextlib.suppress(RuntimeError, ValueError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(nothing, group=group, group_src=peer, tag=_BREAK_OFF_TAG)
                if work is not None:
                    work.wait(_AT_ONCE)


def _encode(value: Any, doing: str) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError) as raised:
        raise Error(
            f"{doing}: the value of this rank cannot be sent to the others, expected JSON (dicts with string keys, "
            f"lists, strings, numbers, booleans, None), found: {raised}; send one of these"
        ) from raised


@never_compiled
def gather_bytes(mine: torch.Tensor, group: Group = None, doing: str = "gathering bytes") -> list[torch.Tensor]:
    """The ``uint8`` tensor of every rank, of any lengths, on the device of this rank's. Called by every rank.

    For data; what describes it goes through `all_gather_json`. `PeerError` when a rank is gone.
    """
    if group_size(group) == 1:
        return [mine]
    lengths = all_gather_json(mine.numel(), group)
    return _all_gather_padded(mine, lengths, group, doing)


def _all_gather_bytes(payload: bytes, group: Group, doing: str) -> list[bytes]:
    head = _LENGTH.pack(len(payload)) + (payload if len(payload) <= _INLINE_BYTES else b"")
    heads = _gather_heads(head, group, doing)
    lengths = [_LENGTH.unpack_from(head)[0] for head in heads]
    longest = max(lengths)
    if longest > _LIMIT_BYTES:
        raise Error(
            f"{doing}: rank {_world_rank(lengths.index(longest), group)} has a value of {longest} bytes for the other "
            f"ranks, expected at most {_LIMIT_BYTES}; send data as tensors and only its description this way"
        )
    if longest <= _INLINE_BYTES:
        return [head[_LENGTH.size : _LENGTH.size + n] for head, n in zip(heads, lengths, strict=True)]
    return _gather_on_device(payload, lengths, group, doing)


def _gather_heads(head: bytes, group: Group, doing: str) -> list[bytes]:
    if is_queued(group):
        return _gather_on_device(head.ljust(_HEADER_BYTES, b"\0"), [_HEADER_BYTES] * group_size(group), group, doing)
    with naming_late(doing, group_rank(group)) as wait:
        try:
            return gather_words(head, _HEADER_BYTES, group, wait)
        except RuntimeError as raised:
            raise peer_error(doing, group, raised, wait.peers) from raised


def _check_nccl(group: Group) -> None:
    """See once that the ranks of a group can talk over NCCL; raises on all alike. Called by every rank."""
    members = group or dist.group.WORLD
    assert members is not None
    if members not in _nccl_verdicts:
        mine = member_here(members.bound_device_id)
        try:
            agree_on_members(store_of(members), group_rank(group), group_size(group), mine, _NCCL_PATIENCE)
            _nccl_verdicts[members] = None
        except ConfigError as raised:
            _nccl_verdicts[members] = raised
    if (verdict := _nccl_verdicts[members]) is not None:
        raise verdict


def _gather_on_device(payload: bytes, lengths: Sequence[int], group: Group, doing: str) -> list[bytes]:
    if is_queued(group):
        _check_nccl(group)
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(group_device(group))
    return [raw.cpu().numpy().tobytes() for raw in _all_gather_padded(mine, lengths, group, doing)]


def _all_gather_padded(mine: torch.Tensor, lengths: Sequence[int], group: Group, doing: str) -> list[torch.Tensor]:
    """Gather the bytes of every rank, given all lengths; nothing is sent if all are empty."""
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=mine.device)
    padded[: mine.numel()] = mine
    theirs = [torch.empty_like(padded) for _ in lengths]
    if max(lengths):
        try:
            dist.all_gather(theirs, padded, group=group)
        except (RuntimeError, TypeError) as raised:  # a TypeError where torch's log looks for a group kept apart
            if is_of_own_device(raised):
                raise
            raise peer_error(doing, group, raised.__context__ or raised) from raised
        check_end(group, doing)
    return [raw[:length] for raw, length in zip(theirs, lengths, strict=True)]


def _describe(error: BaseException, doing: str) -> dict[str, Any]:
    """An error as it travels: what was done there, and what ``str()`` gave; types are the nearest first."""
    reason = getattr(error, "reason", None)
    text = str(error) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"missing key {text}"
    if not text.startswith(doing):  # its text may already begin with what was being done
        text = f"{doing}: {text}"
    return {
        "types": [[cls.__module__, cls.__qualname__] for cls in type(error).__mro__],
        "text": text[:_MAX_TEXT],
        "reason": reason if isinstance(reason, str) else None,
        "leaving": not isinstance(error, Exception),
    }


def _check_same_call(doings: list[str], group: Group) -> None:
    """Raise `ConfigError`, on all ranks alike, unless all are in the same call."""
    for rank, doing in enumerate(doings):
        if doing.split()[:1] != doings[0].split()[:1]:
            raise ConfigError(
                f"{doings[0]}: rank {_world_rank(0, group)} is in this call, while rank {_world_rank(rank, group)} "
                "is in "
                f"{doing!r}, expected all {len(doings)} ranks in the same call; call the same function on every rank, "
                "with the same form of arguments"
            )


def _raise_first(failed: dict[int, Any], mine: BaseException | None, group: Group) -> None:
    if mine is not None and not isinstance(mine, Exception):
        raise mine
    first = min(failed)
    failure = failed[first]
    where = f"rank {_world_rank(first, group)}"
    if len(failed) > 1:
        others = [str(_world_rank(rank, group)) for rank in sorted(failed)[1:9]]
        where += f", and others: {', '.join(others)}{', ...' if len(failed) > 9 else ''}"
    raise _rebuild(failure, f"{failure['text']} (raised on {where})") from _what_adds_to(failure["text"], mine)


def _what_adds_to(text: str, error: BaseException | None) -> BaseException | None:
    """The cause worth a traceback of its own: Remesh's errors whose words the text repeats add nothing."""
    while isinstance(error, Error) and str(error) in text:
        error = error.__cause__
    return error


def _rebuild(failure: Mapping[str, Any], text: str) -> Exception:
    if failure["leaving"]:
        return PeerError(f"{text}; the rank is leaving on {failure['types'][0][1]}, meet again without it")
    known = {(cls.__module__, cls.__qualname__): cls for cls in _descendants(Error)}
    for module, name in failure["types"]:
        cls = getattr(builtins, name, None) if module == "builtins" else known.get((module, name))
        if not isinstance(cls, type) or not issubclass(cls, Exception):
            continue
        for arguments in ((text,), (failure["reason"], text)):
            try:
                rebuilt = cls(*arguments)
            except TypeError:  # a type that needs other arguments, such as UnicodeDecodeError
                continue
            return rebuilt
    return Error(text)


def _descendants(cls: type[Error]) -> Iterator[type[Error]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _descendants(child)


def _world_rank(rank: int, group: Group) -> int:
    return world_rank_of(rank, group) if group is not None else rank


def _first_line(raised: BaseException) -> str:
    return (str(raised).strip().splitlines() or [type(raised).__name__])[0][:300]
