"""What the kernel's texts about a process mean; with what registers a thread goes on; where there is room."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from remesh.carried.images.restore.restore_member import find_gap, resumed
from remesh.foundation.errors import PeerError
from remesh.foundation.linux.proc_text import AreaKind, parse_fdinfo, parse_maps, parse_stat, parse_status

_MAPS = """\
00400000-00401000 r-xp 00001000 08:01 77 /usr/bin/a program
7f00-8f00 rw-p 00000000 00:00 0
01000000-01021000 rw-p 00000000 00:00 0                                  [heap]
02000000-02001000 rw-s 00000000 00:01 5 /dev/zero (deleted)
03000000-03001000 r--p 00000000 08:01 6 /usr/lib/old.so (deleted)
04000000-04001000 rw-s 00000000 00:21 7 /tmp/.remesh/channel
05000000-05001000 rw-s 00000000 00:06 8 /dev/nvidia0
06000000-06001000 rw-s 00000000 00:01 9 /SYSV00000000 (deleted)
07000000-07001000 rw-s 00000000 00:0f 9 anon_inode:[io_uring]
08000000-08001000 r--p 00000000 00:00 0 [anon: glibc: malloc]
7fff00000000-7fff00021000 rw-p 00000000 00:00 0 [stack]
7fff00030000-7fff00032000 r-xp 00000000 00:00 0 [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
"""


def test_areas_are_sorted_into_kinds() -> None:
    areas = parse_maps(_MAPS)
    assert [area.kind.name for area in areas] == [
        *("PRIVATE_FILE", "ANONYMOUS", "ANONYMOUS", "CARRIED", "LOST_FILE", "SHARED_FILE", "FOREIGN", "FOREIGN"),
        *("FOREIGN", "ANONYMOUS", "ANONYMOUS", "SPECIAL", "SPECIAL"),
    ]
    assert (areas[0].path, areas[0].offset, areas[0].inode, areas[0].num_bytes) == (
        "/usr/bin/a program",
        4096,
        77,
        4096,
    )
    assert areas[1].path == ""
    assert {area.kind for area in areas} == set(AreaKind)


def test_a_line_of_another_form_is_not_passed_over() -> None:
    with pytest.raises(PeerError, match="no known form"):
        parse_maps("what is this\n")


def test_descriptors_carry_what_their_kind_adds() -> None:
    text = "pos:\t12\nflags:\t0102001\nmnt_id:\t9\nino:\t4\neventfd-count: 7\neventfd-id: 3\n"
    descriptor = parse_fdinfo(5, "anon_inode:[eventfd]", text)
    assert (descriptor.position, descriptor.flags) == (12, 0o102001)
    assert dict(descriptor.info) == {"eventfd-count": "7", "eventfd-id": "3"}


def test_a_program_may_have_any_name() -> None:
    assert parse_stat("12 (a (b) c) S 1 2")[:4] == ["12", "a (b) c", "S", "1"]
    assert parse_status("Name:\ta: b\nNSpid:\t5\t1000\n") == {"Name": "a: b", "NSpid": "5\t1000"}


@pytest.mark.parametrize(
    ("rax", "rip", "after_rax", "after_rip"),
    [
        (-512, 100, 7, 98),  # ERESTARTSYS: the call is made again
        (-513, 100, 7, 98),
        (-514, 100, 7, 98),
        (-516, 100, 7, 98),  # the kernel's own state is gone
        (-4, 100, -4, 100),
        (55, 100, 55, 100),  # the call had returned
    ],
)
def test_an_interrupted_call_is_made_again(rax: int, rip: int, after_rax: int, after_rip: int) -> None:
    word = 1 << 64
    result = resumed({"rax": rax % word, "rip": rip, "orig_rax": 7})
    assert result == {"rax": after_rax % word, "rip": after_rip, "orig_rax": word - 1}


@pytest.mark.parametrize(("number", "wanted", "left"), [(35, "rdi", "rsi"), (230, "rdx", "r10")])
@pytest.mark.parametrize("place", [0, 4096])
def test_a_sleep_goes_on_with_what_is_left_of_it(number: int, wanted: str, left: str, place: int) -> None:
    word = 1 << 64
    registers = {"rax": word - 516, "rip": 100, "orig_rax": number, wanted: 8192, left: place}
    assert resumed(registers)[wanted] == (place or 8192)


def test_a_thread_that_was_computing_goes_on_at_the_same_instruction() -> None:
    word = 1 << 64
    registers = {"rax": word - 512, "rip": 100, "orig_rax": word - 1}
    assert resumed(registers) == registers


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=12), st.integers(1, 6))
def test_a_gap_is_free_and_the_lowest(occupied: list[tuple[int, int]], num_pages: int) -> None:
    page, lowest = 4096, 0x10000
    ranges = [(lowest + start * page, lowest + (start + length) * page) for start, length in occupied]
    found = find_gap(ranges, num_pages * page)

    def is_free(at: int) -> bool:
        return all(at + num_pages * page <= start or end <= at for start, end in ranges)

    assert is_free(found)
    assert not any(is_free(at) for at in range(lowest, found, page))
