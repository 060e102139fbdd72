"""File format of a process image: a folder with one JSON file per kind of kernel object, and one file of pages.

    image.json      header: version, machine, what it builds upon, length and SHA-256 of every other file
    tree.json       what the processes of the tree have in common: relatives, open files (`tree_format`)
    process.json    what there is once: addresses of the program's parts, signal actions, folder, clocks
    threads.json    per thread: ids, registers, signal mask, addresses the kernel keeps for it
    areas.json      the memory map, and the identity of every mapped file
    files.json      descriptors, and to which open file each leads
    pages.json      which pages are saved, and where their bytes are
    pages.bin       the bytes of the pages, in chunks, each of which may be compressed
    chunks.json     length and CRC-32 of each chunk
    carried.bin     the bytes of shared memory and of files without a name, one behind the other, when there are some
    channel.bin     the bytes of the file behind the channel, when the process has one; zeros at its end are left out

Each descendant of the process has a folder of the same kind inside, named by its id, without what is there once for the
tree (``tree.json``, ``carried.bin``, ``channel.bin``); the header names theirs. The header is written last: a folder
without it is no image. *Raw offsets* count bytes of the uncompressed pages, one behind the other. A run of pages names
its source: 0 is this image, k is the k-th image of ``builds_upon``, so an increment's index is complete and restoring
needs no walk through its ancestors. Runs of several sources may hold the same page: the lowest source is the newest,
and counts (`layers`).
"""

from __future__ import annotations

import array
import bisect
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from remesh.carried.images.form.layers import Layer, own_layer
from remesh.carried.images.form.ranges import PageSet
from remesh.foundation.linux.proc_text import Area, AreaKind

VERSION: Final = 5
HEADER_FILE: Final = "image.json"
PROCESS_FILE: Final = "process.json"
THREADS_FILE: Final = "threads.json"
AREAS_FILE: Final = "areas.json"
FILES_FILE: Final = "files.json"
PAGES_INDEX_FILE: Final = "pages.json"
PAGES_FILE: Final = "pages.bin"
CHUNKS_FILE: Final = "chunks.json"
CHANNEL_FILE: Final = "channel.bin"
TREE_FILE: Final = "tree.json"
CARRIED_FILE: Final = "carried.bin"
LOCKS_FILE: Final = "locks.json"
RECORD_FILES: Final = (PROCESS_FILE, THREADS_FILE, AREAS_FILE, FILES_FILE, PAGES_INDEX_FILE, CHUNKS_FILE)
"""The files that are JSON, besides the header."""
_OF_THE_TREE: Final = (PAGES_FILE, TREE_FILE, CHANNEL_FILE, CARRIED_FILE, LOCKS_FILE)
MAX_JSON_BYTES: Final = 1 << 30
CHUNK_BYTES: Final = 2 << 20
"""Raw bytes of a full chunk of pages: one huge page. Disks are busy with that already, and less is waited for."""
_PAGE_BYTES: Final = 4096
_ADDRESS_END: Final = 1 << 47
_MAX_CHAIN: Final = 1000
_MAX_DESCRIPTOR: Final = 1 << 20


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


# --- header ---


@dataclass(frozen=True, slots=True)
class Seal:
    """The outer form of ``image.json``: a header, and the proof that it is as it was written."""

    header: str  # the JSON of a `Header`
    sha256: str  # of its bytes


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Another file of the image."""

    num_bytes: int
    sha256: str  # of JSON files; "" for blobs whose checksums stand in their index


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An image whose pages this one needs."""

    folder: str  # relative to the folder of this image
    sha256: str  # of its header


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of the machine that are built into a process; a restore elsewhere needs the same."""

    vdso_sha256: str  # the kernel's code in every process; libc keeps addresses into it
    special_areas: dict[str, int]  # bytes of each of SPECIAL_AREAS
    xstate_bytes: int  # size of the processor's extended state
    cpu_flags: str  # as in /proc/cpuinfo; libc and BLAS chose their code by them
    kernel: str  # release, for people


@dataclass(frozen=True, slots=True)
class Header:
    """``image.json``, inside its seal."""

    version: int  # VERSION
    pid: int  # inner id of the process
    compressed: bool
    builds_upon: tuple[Ancestor, ...]  # empty for a full image
    machine: Machine
    files: dict[str, StoredFile]  # by name
    members: dict[int, str]  # of the root of a tree: SHA-256 of the header of each descendant, by inner id

    def __post_init__(self) -> None:
        _check(self.version == VERSION, f"the version is {self.version}, this program reads {VERSION}")
        _check(self.pid > 1, f"the process id is {self.pid}, expected more than 1")
        _check(set(RECORD_FILES) <= set(self.files), f"the files {sorted(self.files)} lack some of {RECORD_FILES}")
        unknown = sorted(set(self.files) - set(RECORD_FILES) - set(_OF_THE_TREE))
        _check(not unknown, f"the files {unknown} are unknown")
        _check(len(self.builds_upon) <= _MAX_CHAIN, f"it builds upon {len(self.builds_upon)} images")
        for ancestor in self.builds_upon:
            _check(not ancestor.folder.startswith("/"), f"it builds upon {ancestor.folder!r}, which is not relative")


# --- process and threads ---


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Addresses that the kernel keeps of a program's parts: ``struct prctl_mm_map``, in its order."""

    start_code: int
    end_code: int
    start_data: int
    end_data: int
    start_brk: int
    brk: int
    start_stack: int
    arg_start: int
    arg_end: int
    env_start: int
    env_end: int


@dataclass(frozen=True, slots=True)
class ProcessState:
    """``process.json``: the state that exists once per process."""

    executable: str  # the program file, as the process sees it
    folder: str  # working directory
    umask: int
    bounds: MemoryBounds
    auxv: bytes
    signal_actions: dict[int, bytes]  # struct kernel_sigaction by number; signals with the default action are left out
    pending_signals: int  # sent to the process and blocked by all its threads; bit n-1 for signal n
    limits: dict[int, tuple[int, int]]  # soft and hard resource limits by number; -1 for none
    dumpable: bool
    monotonic_ns: int  # CLOCK_MONOTONIC of the process
    boottime_ns: int  # CLOCK_BOOTTIME of the process
    is_subreaper: bool  # orphans among its descendants become its children
    death_signal: int  # that it gets when its parent ends; 0 for none
    interval_timers: dict[int, bytes] = field(default_factory=dict)  # struct itimerval by kind, of those that run
    attributes: dict[str, int] = field(default_factory=dict)  # by name, see `attributes.OF_PROCESSES`
    seat: int = 1  # processors that it was given, bit n for number n; see `seat`

    def __post_init__(self) -> None:
        _check(self.seat > 0, "the process has no processor to run on")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread of ``threads.json``. An address of 0 stands for none."""

    tid: int  # inner id; the leader's is the process id
    name: str
    registers: dict[str, int]
    xstate: bytes
    signal_mask: int
    pending_signals: int  # sent to this thread and blocked by it
    robust_list: int
    robust_list_bytes: int
    clear_child_tid: int
    rseq: int
    rseq_bytes: int
    rseq_signature: int
    signal_stack: bytes  # stack_t
    processors: int  # that it may run on, bit n for number n
    attributes: dict[str, int]  # by name, see `attributes.OF_THREADS`
    timer_slack_ns: int
    no_new_privs: bool

    def __post_init__(self) -> None:
        _check(self.processors > 0, f"thread {self.tid} has no processor to run on")


@dataclass(frozen=True, slots=True)
class ThreadsState:
    """``threads.json``."""

    threads: tuple[ThreadState, ...]  # the leader first; ids differ

    def __post_init__(self) -> None:
        tids = [thread.tid for thread in self.threads]
        _check(bool(tids) and len(set(tids)) == len(tids), f"thread ids {tids}: expected some, each once")


# --- memory ---


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of a file, by which it is known again."""

    num_bytes: int
    mtime_ns: int
    sha256: str  # of its bytes, or of samples (`identity.hash_of`); compared when the time differs


@dataclass(frozen=True, slots=True)
class AreaState:
    """One area of ``areas.json``. ``start < end``, multiples of the page size."""

    start: int
    end: int
    protection: str  # "rwxp"
    kind: AreaKind
    offset: int
    path: str
    grows_down: bool  # the stack
    carried: int | None  # of `AreaKind.CARRIED`: which of the tree's carried files, from 0

    def __post_init__(self) -> None:
        if not _is_range(self.start, self.end):  # a program has hundreds: no message is made for the good ones
            raise ValueError(f"the area {self.start:#x}-{self.end:#x} is no range of pages")
        if (self.carried is not None) != (self.kind is AreaKind.CARRIED):
            raise ValueError(f"the area {self.start:#x}-{self.end:#x} is of the carried file {self.carried}")


@dataclass(frozen=True, slots=True)
class AreasState:
    """``areas.json``."""

    areas: tuple[AreaState, ...]  # in order, disjoint
    files: dict[str, FileIdentity]  # mapped files by path

    def __post_init__(self) -> None:
        for earlier, later in zip(self.areas, self.areas[1:], strict=False):
            if later.start < earlier.end:
                raise ValueError(f"the areas at {earlier.start:#x} and {later.start:#x} overlap")

    def written_files(self) -> dict[str, FileIdentity]:
        """The files that the process may write to by its memory, where their time shows nothing."""
        paths = {each.path for each in self.areas if is_written(each)}
        return {path: identity for path, identity in self.files.items() if path in paths}


def is_written(area: Area | AreaState) -> bool:
    """Whether what is written to the area comes to a file that has a name."""
    return area.kind is AreaKind.SHARED_FILE and "w" in area.protection


def _is_range(start: int, end: int) -> bool:
    # The one area above user addresses is the kernel's page of old system calls.
    return 0 <= start < end and start % _PAGE_BYTES == 0 == end % _PAGE_BYTES and end < 1 << 64


@dataclass(frozen=True, slots=True)
class PageChunk:
    """A piece of ``pages.bin``. Its raw bytes follow those of the chunk before it."""

    num_raw_bytes: int
    num_stored_bytes: int
    crc32: int  # of the stored bytes


@dataclass(frozen=True, slots=True)
class ChunksState:
    """``chunks.json``."""

    chunks: tuple[PageChunk, ...]  # in order

    @property
    def num_raw_bytes(self) -> int:
        return sum(chunk.num_raw_bytes for chunk in self.chunks)

    @property
    def num_stored_bytes(self) -> int:
        return sum(chunk.num_stored_bytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class PagesState:
    """``pages.json``. A page that stands in several images is that of the one with the lowest number.

    Its runs are numbers of 64 bits, one behind the other: there may be a million, and JSON's own take twenty times as
    long.
    """

    own: bytes  # start and number of pages of each run in this image, in the order of the bytes
    inherited: bytes  # start, number of pages, source and raw offset of other runs, by source and address

    def __post_init__(self) -> None:
        for numbers, each in ((self.own, 16), (self.inherited, 32)):
            _check(len(numbers) % each == 0, f"runs of pages have {len(numbers)} bytes, expected {each} for each")

    def layers(self, num_ancestors: int) -> list[Layer]:
        """The pages by source, this image first; with `ValueError` where they are not as they should be."""
        own, inherited = array.array("Q", self.own), array.array("Q", self.inherited)
        for numbers, each in ((own, 2), (inherited, 4)):
            _check(min(numbers[1::each], default=1) >= 1, "a run of pages is empty")
            _check(max(*numbers, sum(numbers[1::each]), 0) < _ADDRESS_END, "a run of pages has too large a number")
        sources = inherited[2::4]
        _check(all(map(operator.le, sources, sources[1:])), "inherited pages are not in the order of their sources")
        _check(set(sources) <= set(range(1, num_ancestors + 1)), "pages are of an image that is not known")
        layers = [own_layer(_page_set(own[0::2], own[1::2]))]
        for source in range(1, num_ancestors + 1):
            some = inherited[4 * bisect.bisect_left(sources, source) : 4 * bisect.bisect_right(sources, source)]
            layers.append(Layer(_page_set(some[0::4], some[1::4]), some[3::4]))
        for layer in layers:
            _check(all(map(operator.le, layer.pages.ends, layer.pages.starts[1:])), "runs of pages overlap")
        return layers


def _page_set(starts: array.array[int], nums_pages: array.array[int]) -> PageSet:
    lengths = map(operator.mul, nums_pages, itertools.repeat(_PAGE_BYTES))
    return PageSet(starts, array.array("Q", map(operator.add, starts, lengths)))


def _nums_pages(pages: PageSet) -> array.array[int]:
    return array.array("Q", map(operator.floordiv, pages.lengths(), itertools.repeat(_PAGE_BYTES)))


def index_pages(own: Iterable[PageSet], inherited: Iterable[Layer]) -> PagesState:
    """The record of an image whose own pages stand in this order; the first inherited layer is of source 1."""
    pages = PageSet.chain(own)
    numbers = array.array("Q", bytes(16 * len(pages)))
    numbers[0::2], numbers[1::2] = pages.starts, _nums_pages(pages)
    return PagesState(numbers.tobytes(), b"".join(map(_rows_of, inherited, itertools.count(1))))


def _rows_of(layer: Layer, source: int) -> bytes:
    rows = array.array("Q", bytes(32 * len(layer.pages)))
    rows[0::4], rows[1::4], rows[3::4] = layer.pages.starts, _nums_pages(layer.pages), layer.raw_offsets
    rows[2::4] = array.array("Q", itertools.repeat(source, len(layer.pages)))
    return rows.tobytes()


# --- descriptors ---


@dataclass(frozen=True, slots=True)
class DescriptorState:
    """One descriptor of ``files.json``."""

    number: int
    file: int  # which of the tree's open files, from 0
    closes_on_exec: bool


@dataclass(frozen=True, slots=True)
class FilesState:
    """``files.json``."""

    descriptors: tuple[DescriptorState, ...]  # by number, each once

    def __post_init__(self) -> None:
        numbers = [each.number for each in self.descriptors]
        _check(numbers == sorted(set(numbers)), f"descriptors {numbers} are not in order")
        _check(not numbers or (numbers[0] >= 0 and numbers[-1] < _MAX_DESCRIPTOR), f"descriptors {numbers} are no such")
