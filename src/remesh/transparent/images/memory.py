"""Which pages of a process are worth saving? Asked of the kernel by ``PAGEMAP_SCAN``, or of ``pagemap`` page by page.

A page is saved when it is present or swapped, is not the zero page, and, in a private mapping of a file, is no longer
the file's own. Everything else comes back by mapping again. Source: Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from remesh.transparent.images.linux import PAGE_BYTES
from remesh.transparent.images.proc_text import Area, AreaKind
from remesh.transparent.images.procfs import seen_from_here
from remesh.transparent.images.ranges import PageRange, join

_PAGEMAP_SCAN: Final = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_SCAN_FORM: Final = struct.Struct("<12Q")
_REGION_FORM: Final = struct.Struct("<3Q")
_REGIONS_PER_CALL: Final = 8192
_WRITTEN: Final = 1 << 1
_FILE: Final = 1 << 2
_PRESENT: Final = 1 << 3
_SWAPPED: Final = 1 << 4
_ZERO: Final = 1 << 5
_WP_MATCHING: Final = 1 << 0
_CHECK_WPASYNC: Final = 1 << 1

# Bits of an entry of /proc/P/pagemap.
_ENTRY_PRESENT: Final = 1 << 63
_ENTRY_SWAPPED: Final = 1 << 62
_ENTRY_FILE: Final = 1 << 61


@dataclass(frozen=True, slots=True)
class _Query:
    """Which pages a scan returns: all of ``mask`` after flipping ``inverted``, and one of ``any_of`` unless 0."""

    mask: int
    inverted: int
    any_of: int
    flags: int = 0


def can_scan(pid: int) -> bool:
    """Whether the kernel has ``PAGEMAP_SCAN`` (Linux 6.7)."""
    try:
        _scan_process(pid, PageRange(PAGE_BYTES, 2 * PAGE_BYTES), _Query(_PRESENT, 0, 0))
    except OSError:
        return False
    return True


def saved_ranges(pid: int, area: Area) -> list[PageRange]:
    """The pages of an area that an image saves, by ``PAGEMAP_SCAN``."""
    if area.kind not in (AreaKind.ANONYMOUS, AreaKind.PRIVATE_FILE):
        return []
    own = _FILE if area.kind is AreaKind.PRIVATE_FILE else 0
    query = _Query(mask=_ZERO | own, inverted=_ZERO | own, any_of=_PRESENT | _SWAPPED)
    return _scan_process(pid, PageRange(area.start, area.end), query)


def mark_written(pid: int, where: PageRange) -> None:
    """Write-protect the pages that are there and are not, in memory that `track` has registered."""
    query = _Query(mask=_WRITTEN, inverted=0, any_of=_PRESENT | _SWAPPED, flags=_CHECK_WPASYNC | _WP_MATCHING)
    _scan_process(pid, where, query)


def written_ranges(pid: int, where: PageRange) -> list[PageRange] | None:
    """The pages written since `track` marked them; None where it did not mark all of them."""
    query = _Query(mask=_WRITTEN, inverted=0, any_of=0, flags=_CHECK_WPASYNC)
    try:
        return _scan_process(pid, where, query)
    except PermissionError:
        return None


def saved_ranges_page_by_page(pid: int, area: Area) -> list[PageRange]:
    """What `saved_ranges` returns, on kernels without ``PAGEMAP_SCAN``; zero pages are saved too."""
    if area.kind not in (AreaKind.ANONYMOUS, AreaKind.PRIVATE_FILE):
        return []
    entries = array.array("Q")
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file:
        file.seek(area.start // PAGE_BYTES * 8)
        entries.frombytes(file.read(area.num_bytes // PAGE_BYTES * 8))
    ranges: list[PageRange] = []
    for index, entry in enumerate(entries):
        if not entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED):
            continue
        if area.kind is AreaKind.PRIVATE_FILE and entry & _ENTRY_FILE:
            continue
        start = area.start + index * PAGE_BYTES
        if ranges and ranges[-1].end == start:
            ranges[-1] = PageRange(ranges[-1].start, start + PAGE_BYTES)
        else:
            ranges.append(PageRange(start, start + PAGE_BYTES))
    return ranges


def file_ranges(pid: int, area: Area) -> list[PageRange]:
    """The pages that the file behind a shared mapping has, whoever wrote them; what is missing reads as zeros."""
    ranges = []
    with open(seen_from_here(pid, area.path), "rb", buffering=0) as file:
        position = area.offset
        end = area.offset + area.num_bytes
        while position < end:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole from here on
                    break
                raise
            position = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), end)
            if start < end:
                shift = area.start - area.offset
                ranges.append(PageRange(start + shift, position + shift))
    return join(ranges)


def _scan_process(pid: int, where: PageRange, query: _Query) -> list[PageRange]:
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return join(list(_scan(pagemap, where, query)))
    finally:
        os.close(pagemap)


def _scan(pagemap: int, where: PageRange, query: _Query) -> Iterator[PageRange]:
    room = bytearray(_REGIONS_PER_CALL * _REGION_FORM.size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = where.start
    while start < where.end:
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, any of, returned
        argument = bytearray(
            _SCAN_FORM.pack(
                *(_SCAN_FORM.size, query.flags, start, where.end, 0, address, _REGIONS_PER_CALL, 0),
                *(query.inverted, query.mask, query.any_of, _PRESENT),
            )
        )
        num_regions = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
        for index in range(num_regions):
            region_start, region_end, _ = _REGION_FORM.unpack_from(room, index * _REGION_FORM.size)
            yield PageRange(region_start, region_end)
        walked = _SCAN_FORM.unpack(argument)[4]
        if walked <= start:
            raise OSError(errno.EIO, f"scanning pages: the kernel stopped at {walked:#x} before {where.end:#x}")
        start = walked
