"""Real processes, written to an image and brought back; trees of them: `test_process_trees`."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mpi import engine as engine_benchmark
from remesh.carried.images import (
    CHANNEL_PATH,
    INNER_PID,
    Command,
    NotImageable,
    OpenFilePolicy,
    check_imageable,
    compact_image,
    dump_image,
    freeze,
    remember_image,
    start_upper,
)
from remesh.carried.images.doctor import examine_machine
from remesh.carried.images.form import carried, identity
from remesh.carried.images.form.format import CARRIED_FILE, HEADER_FILE, PAGES_FILE
from remesh.carried.images.form.identity import Identities
from remesh.carried.images.form.image_reader import read_image
from remesh.carried.images.form.kinds import ARENA_PATH
from remesh.carried.images.look import ahead
from remesh.carried.images.restore import upper as upper_module
from remesh.carried.images.write.dump import _without_zeros_at_end
from remesh.foundation.errors import ConfigError, FormatError, StorageError
from remesh.foundation.linux.procfs import children_of, read_descriptors, read_status, start_of
from tests.procs.stage import CHANNEL_BYTES, PATIENCE_S, WAIT_FOR_GO, Stage, damages, wait_for

pytestmark = pytest.mark.procs

_SLEEPER = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
class Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
results = {}
def sleep(name, left):
    results[name] = libc.nanosleep(ctypes.byref(Time(3, 0)), left)
def poll():
    results["poll"] = libc.poll(None, 0, 3000)
left = Time()
threads = [threading.Thread(target=sleep, args=("whole", None)), threading.Thread(target=poll),
           threading.Thread(target=sleep, args=("left", ctypes.byref(left)))]
start = time.monotonic()
for thread in threads: thread.start()
time.sleep(0.5)
open("ready", "w").close()
for thread in threads: thread.join()
print(sorted(results.items()))
"""


def test_sleeps_and_polls_of_c_end_when_their_time_is_over(stage: Stage) -> None:
    """They would fail with EINTR if they were left to the kernel, which has forgotten them."""
    assert stage.finish(stage.restore(stage.image_of(_SLEEPER))) == "[('left', 0), ('poll', 0), ('whole', 0)]\n"


def test_a_numpy_program_with_threads_ends_as_if_nothing_had_happened(stage: Stage) -> None:
    program = f"""
        import numpy as np
        state = np.random.default_rng(1).random((200, 200))
        big = np.arange(3_000_000)
        beats = [0]
        def beat():
            while True:
                beats[0] += 1
                time.sleep(0.001)
        threads = [threading.Thread(target=beat, daemon=True) for _ in range(2)]
        [thread.start() for thread in threads]
        for step in range(40):
            state = np.sin(state @ state)
            big += step
            if step == 20:
{textwrap.indent(WAIT_FOR_GO, " " * 16)}
        at = beats[0]
        while beats[0] < at + 3:
            time.sleep(0.001)
        print(state.sum().hex(), big.sum(), os.getpid(), [thread.native_id for thread in threads])
    """
    (stage.work / "go").touch()
    expected = stage.finish(stage.start(program))
    (stage.work / "go").unlink()
    (stage.work / "ready").unlink()
    assert stage.finish(stage.restore(stage.image_of(program))) == expected
    assert str(INNER_PID) in expected


def test_a_program_has_the_process_id_that_its_command_asks_for_and_keeps_it(stage: Stage) -> None:
    upper = stage.start(f"print(os.getpid(), flush=True)\n{WAIT_FOR_GO}\nprint(os.getpid())", pid=4711)
    dump_image(upper.pid, stage.folder / "image")
    (stage.work / "go").touch()
    assert stage.finish(upper).split() == ["4711", "4711"]
    assert stage.finish(stage.restore(stage.folder / "image")).strip("\0\n").split()[-1] == "4711"


def test_a_process_goes_on_after_its_image_and_the_image_can_be_used_twice(stage: Stage) -> None:
    upper = stage.start(f"x = 5\n{WAIT_FOR_GO}\nprint(x)")
    for number in range(3):
        dump_image(upper.pid, stage.folder / f"image{number}")
    (stage.work / "go").touch()
    assert stage.finish(upper) == "5\n"
    for number in (0, 2, 2):
        assert stage.finish(stage.restore(stage.folder / f"image{number}")) == "5\n"


def test_who_remembers_an_image_hashes_nothing_for_the_next_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a restored program has mapped what its image had."""
    image = stage.image_of(f"import ssl\nos.posix_spawn('/bin/sleep', ['sleep', '1000'], {{}})\n{WAIT_FOR_GO}")
    known, hashed = Identities(), list[str]()
    monkeypatch.setattr(ahead, "IDENTITIES", known)
    monkeypatch.setattr(identity, "hash_of", lambda path, num_bytes: hashed.append(path))
    remember_image(image)
    members = [image, *(each.parent for each in image.glob(f"*/{HEADER_FILE}"))]
    assert len(members) == 2
    for path in {path for member in members for path in read_image(member).areas.files}:
        known.of(path)
    assert not hashed


def test_a_compressed_image_comes_back(stage: Stage) -> None:
    upper = stage.start(f"x = bytes(range(256)) * 40000\n{WAIT_FOR_GO}\nprint(x == bytes(range(256)) * 40000)")
    plain = dump_image(upper.pid, stage.folder / "plain")
    small = dump_image(upper.pid, stage.folder / "small", compress=True)
    upper.kill()
    (stage.work / "go").touch()
    assert small.num_bytes < plain.num_bytes / 2
    assert stage.finish(stage.restore(stage.folder / "small")) == "True\n"


def test_an_image_leaves_out_the_part_of_the_channel_that_nobody_has_used() -> None:
    for used, num_bytes in ((b"", 0), (b"a", 4096), (b"a" + bytes(9000) + b"b", 12288)):
        assert _without_zeros_at_end(used.ljust(1 << 20, b"\0")) == used.ljust(num_bytes, b"\0")
    assert _without_zeros_at_end(bytes(5000) + b"c") == bytes(5000) + b"c"


def test_the_bytes_of_the_channel_come_back(stage: Stage) -> None:
    image = stage.image_of(f"""
        import mmap
        with open({CHANNEL_PATH!r}, "r+b") as file:
            channel = mmap.mmap(file.fileno(), 0)
        channel[:5] = b"hello"
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        channel[5:10] = b"again"
    """)
    stage.finish(stage.restore(image))
    assert Path(stage.site.channel_file).read_bytes() == b"helloagain".ljust(CHANNEL_BYTES, b"\0")


def test_signal_handlers_masks_and_ignored_signals_are_kept(stage: Stage) -> None:
    image = stage.image_of(f"""
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM])
        os.kill(os.getpid(), signal.SIGALRM)
        signal.pthread_kill(threading.get_ident(), signal.SIGVTALRM)
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        pending = {{signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM}}
        print(signal.sigpending() == pending, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """)
    assert stage.finish(stage.restore(image)) == "handled\nTrue True\n"


def test_a_restored_process_can_be_terminated(stage: Stage) -> None:
    image = stage.image_of(WAIT_FOR_GO + "\nprint('ready again', flush=True)\ntime.sleep(600)")
    upper = stage.restore(image)
    wait_for(lambda: "again" in Path(stage.site.stdout_file).read_text(), "it does not go on")
    os.kill(upper.pid, signal.SIGTERM)
    assert upper.wait(PATIENCE_S) == -signal.SIGTERM


def test_interval_timers_go_on_with_the_time_that_was_left(stage: Stage) -> None:
    image = stage.image_of(f"""
        import signal
        rung = []
        for number in (signal.SIGALRM, signal.SIGVTALRM): signal.signal(number, lambda number, _: rung.append(number))
        signal.setitimer(signal.ITIMER_REAL, 3, 0.25)
        signal.setitimer(signal.ITIMER_VIRTUAL, 500)
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        virtual, once = signal.getitimer(signal.ITIMER_VIRTUAL)
        print(bool(rung) or 0 < left < 4, interval, 400 < virtual < 501, once, signal.getitimer(signal.ITIMER_PROF))
        while len(rung) < 3: time.sleep(0.01)
        print({{number.name for number in map(signal.Signals, rung)}})
    """)
    told = "True 0.25 True 0.0 (0.0, 0.0)\n{'SIGALRM'}\n"
    assert stage.finish(stage.restore(image)) == told


_TREATMENT = """
import ctypes, resource, signal
libc = ctypes.CDLL(None)

def treatment():
    status = open("/proc/thread-self/status").read()
    return [
        os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), libc.syscall(252, 1, 0), libc.prctl(30),
        status.partition("NoNewPrivs:")[2].split()[0], open("/proc/self/oom_score_adj").read(),
        [resource.getrlimit(number) for number in range(16)],
    ]

def choose(nice, policy, priority, slack):
    os.sched_setscheduler(0, policy, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    libc.syscall(251, 1, 0, priority)
    libc.prctl(29, slack)

def other():
    choose(7, os.SCHED_IDLE, 3 << 13, 1000000)
    told.append(treatment()); chosen.set(); go.wait(); told.append(treatment()); print(told[-1] == told[-2])

choose(3, os.SCHED_BATCH, 2 << 13 | 6, 70000)
libc.prctl(38, 1, 0, 0, 0)
open("/proc/self/oom_score_adj", "w").write("300")
for number in range(16):
    if number not in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        soft, hard = resource.getrlimit(number)
        resource.setrlimit(number, (1 << 40, 1 << 41) if hard == resource.RLIM_INFINITY else (soft, hard))
before = treatment()
told, chosen, go = [], threading.Event(), threading.Event()
thread = threading.Thread(target=other)
thread.start()
chosen.wait()
"""


def test_how_the_kernel_treats_threads_and_processes_is_kept(stage: Stage) -> None:
    image = stage.image_of(f"{_TREATMENT}\n{WAIT_FOR_GO}\nprint(treatment() == before)\ngo.set(); thread.join()")
    upper = stage.restore(image)
    assert (upper.note, stage.finish(upper)) == ("", "True\nTrue\n")


def test_a_periodic_timer_that_expired_while_the_process_stood_goes_on(stage: Stage) -> None:
    upper = stage.start(f"""
        import signal
        rung = []
        signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        rung.clear()
        while len(rung) < 3: time.sleep(0.01)
        print(signal.getitimer(signal.ITIMER_REAL)[1])
    """)
    image = stage.folder / "image"
    with freeze(upper.pid) as frozen:
        wait_for(lambda: int(read_status(upper.pid)["ShdPnd"], 16) >> signal.SIGALRM - 1 & 1 == 1, "it does not expire")
        dump_image(frozen, image)
        upper.kill()
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(image)) == "0.2\n"


def test_clocks_do_not_run_backwards_and_do_not_jump(stage: Stage) -> None:
    program = f"""
        before = time.monotonic()
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        print(before, time.monotonic())
    """
    begin = time.monotonic()
    upper = stage.start(program)
    image = stage.folder / "image"
    dump_image(upper.pid, image)
    lived_s = time.monotonic() - begin
    upper.kill()
    time.sleep(2.0)  # the clock of the host goes on meanwhile
    (stage.work / "go").touch()
    begin = time.monotonic()
    before, after = map(float, stage.finish(stage.restore(image)).split())
    lived_s += time.monotonic() - begin
    assert before <= after
    if Path("/proc/self/timens_offsets").exists():
        assert after - before < lived_s


# --- open files ---


def test_files_stand_where_they_stood(stage: Stage) -> None:
    (stage.work / "input").write_text("0123456789")
    image = stage.image_of(f"""
        source = open("input"); source.read(4); os.lseek(source.fileno(), 4, 0)
        twin = os.dup(source.fileno())
        target = open("output", "w+b", buffering=0); target.write(b"abc")
        log = open("log", "ab", buffering=0); log.write(b"one")
        null = open("/dev/null", "w")
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        print(os.read(twin, 3), os.read(source.fileno(), 2), os.get_inheritable(twin), os.listdir(folder) != [])
        target.write(b"def"); log.write(b"two"); null.write("x")
    """)
    with open(stage.work / "log", "ab") as log:
        log.write(b"written after the image")
    assert stage.finish(stage.restore(image)) == "b'456' b'78' False True\n"
    assert (stage.work / "output").read_bytes() == b"abcdef"
    assert (stage.work / "log").read_bytes() == b"onetwo"


@pytest.mark.parametrize("policy", [OpenFilePolicy.KEEP, OpenFilePolicy.REFUSE])
def test_a_log_that_has_grown_is_kept_or_refused(stage: Stage, policy: OpenFilePolicy) -> None:
    image = stage.image_of(f"""
        log = open("log", "ab", buffering=0); log.write(b"one")
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        log.write(b"two")
    """)
    with open(stage.work / "log", "ab") as log:
        log.write(b"+")
    if policy is OpenFilePolicy.REFUSE:
        with pytest.raises(StorageError, match="log.*has grown"):
            stage.restore(image, policy)
        assert (stage.work / "log").read_bytes() == b"one+"
    else:
        stage.finish(stage.restore(image, policy))
        assert (stage.work / "log").read_bytes() == b"one+two"


def test_a_file_that_was_changed_in_place_is_left_to_the_program_that_writes_it_again(stage: Stage) -> None:
    image = stage.image_of(f"""
        table = open("table", "r+b" if os.path.exists("table") else "w+b", buffering=0); table.write(b"......")
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        os.pwrite(table.fileno(), b"new", 3)
    """)
    (stage.work / "table").write_bytes(b"..lost")
    with pytest.raises(StorageError, match="table.*was changed since.*choose to have it written again"):
        stage.restore(image)
    stage.finish(stage.restore(image, OpenFilePolicy.REWRITE))
    assert (stage.work / "table").read_bytes() == b"..lnew"
    (stage.work / "table").write_bytes(b"..")
    with pytest.raises(StorageError, match="table.*shorter"):
        stage.restore(image, OpenFilePolicy.REWRITE)


_MAPPED = {
    "a memory map of numpy": "import numpy; table = numpy.memmap('table', 'u1', 'w+', shape=8192)",
    "mapped, and not open": """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        descriptor = os.open("table", os.O_RDWR | os.O_CREAT)
        os.truncate("table", 8192)
        address = libc.mmap(None, ctypes.c_size_t(8192), 3, 1, descriptor, ctypes.c_long(0))
        os.close(descriptor)
        table = (ctypes.c_uint8 * 8192).from_address(address)
        """,
}


@pytest.mark.parametrize("how", _MAPPED)
def test_a_file_that_was_written_by_memory_since_the_image_is_refused_by_name(stage: Stage, how: str) -> None:
    """Its time tells nothing: the page was written before the image, too."""
    program = f"{textwrap.dedent(_MAPPED[how])}\ntable[0] = 1\n{WAIT_FOR_GO}\ntable[0] += 1\nprint(table[0])"
    image, table = stage.folder / "image", stage.work / "table"
    upper = stage.start(program)
    dump_image(upper.pid, image)
    (stage.work / "go").touch()
    assert stage.finish(upper) == "2\n"
    with pytest.raises(StorageError, match="table.*mapped for writing, was changed since.*have it written again"):
        stage.restore(image)
    table.write_bytes(b"\x01" + bytes(8191))
    assert stage.finish(stage.restore(image)) == "2\n"
    assert stage.finish(stage.restore(image, OpenFilePolicy.REWRITE)) == "3\n"
    table.write_bytes(b"\x01")
    with pytest.raises(StorageError, match="table.*shorter"):
        stage.restore(image, OpenFilePolicy.REWRITE)
    table.unlink()
    with pytest.raises(StorageError, match="table.*gone"):
        stage.restore(image)


def test_a_file_that_changed_or_is_gone_is_refused_by_name(stage: Stage) -> None:
    (stage.work / "input").write_text("0123456789")
    image = stage.image_of(f"source = open('input')\n{WAIT_FOR_GO}\nprint(source.read())")
    (stage.work / "input").write_text("012345678X")
    with pytest.raises(StorageError, match="input.*was changed since"):
        stage.restore(image)
    (stage.work / "input").write_text("0123")
    with pytest.raises(StorageError, match="input.*shorter"):
        stage.restore(image)
    (stage.work / "input").unlink()
    with pytest.raises(StorageError, match="input.*gone"):
        stage.restore(image)
    (stage.work / "input").write_text("0123456789")
    assert stage.finish(stage.restore(image)) == "0123456789\n"


def test_a_file_about_a_process_is_refused_by_name(stage: Stage) -> None:
    upper = stage.start(f"own = open('/proc/self/statm')\n{WAIT_FOR_GO}")
    with pytest.raises(NotImageable, match="/proc/1000/statm: a file about one process"):
        dump_image(upper.pid, stage.folder / "image")


def test_a_process_that_reads_about_itself_is_imaged_in_between(stage: Stage) -> None:
    upper = stage.start("""
        open("ready", "w").close()
        while not os.path.exists("go"):
            with open("/proc/self/statm") as own:
                pages = own.read()
            time.sleep(0.01)
        print(len(pages.split()))
    """)
    for number in range(3):
        dump_image(upper.pid, stage.folder / f"image{number}")
    upper.kill()
    (stage.work / "go").touch()
    for number in range(3):
        assert stage.finish(stage.restore(stage.folder / f"image{number}")) == "7\n"


def test_pipes_and_event_counters_inside_the_process_keep_what_is_in_them(stage: Stage) -> None:
    image = stage.image_of(f"""
        out, into = os.pipe(); os.write(into, b"x" * 20000)
        counter = os.eventfd(7, os.EFD_NONBLOCK)
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        os.write(into, b"y")
        print(os.read(out, 30000) == b"x" * 20000 + b"y", os.eventfd_read(counter))
    """)
    assert stage.finish(stage.restore(image)) == "True 7\n"


# --- files without a name ---

_TMPFILE_IN_C = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    FILE *scratch = tmpfile();
    int found = 0;
    for (int i = 0; i < 50000; i++) fprintf(scratch, "%d\\n", i);
    fflush(scratch);
    rewind(scratch);
    for (int i = 0; i < 25000; i++) if (fscanf(scratch, "%d", &found) != 1 || found != i) return 3;
    close(open("ready", O_CREAT | O_WRONLY, 0600));
    while (access("go", F_OK)) usleep(5000);
    for (int i = 25000; i < 50000; i++) if (fscanf(scratch, "%d", &found) != 1 || found != i) return 4;
    fseek(scratch, 0, SEEK_END);
    fprintf(scratch, "more\\n");
    return fflush(scratch) ? 5 : 0;
}
"""


def test_a_temporary_file_of_c_is_carried_and_the_program_goes_on_undisturbed(stage: Stage) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (stage.folder / "program.c").write_text(_TMPFILE_IN_C)
    subprocess.run(["cc", "-o", stage.folder / "program", stage.folder / "program.c"], check=True)
    upper = stage.start(f"os.execv({str(stage.folder / 'program')!r}, ['program'])")
    dump_image(upper.pid, stage.folder / "image")
    (stage.work / "go").touch()
    stage.finish(upper)
    stage.finish(stage.restore(stage.folder / "image"))


_NAMELESS = f"""
path = os.environ.get("PLACE", ".") + "/gone"
first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
twin, reader = os.dup(first), os.open(path, os.O_RDONLY)
log = os.open(path, os.O_WRONLY | os.O_APPEND)
os.unlink(path)
never = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600)
os.write(first, b"begin"); os.pwrite(first, b"end", 1 << 30); os.read(reader, 2)
os.write(never, b"other")
{WAIT_FOR_GO}
os.write(twin, b"/"); os.write(log, b"!")
print(os.pread(first, 9, 0)[:6], os.read(reader, 4), os.pread(reader, 9, 1 << 30), os.pread(never, 9, 0))
print(os.fstat(first).st_nlink, os.fstat(first).st_size - (1 << 30), os.fstat(first).st_blocks < 1000,
      os.get_inheritable(first), os.get_inheritable(twin), os.lseek(never, 0, 1), sorted(os.listdir(".")))
"""
_NAMELESS_TOLD = (
    "b'begin/' b'gin/' b'end!' b'other'\n0 4 True False False 5 ['go', 'ready']\n"  # os.dup gives no inheritable one
)


def test_files_without_a_name_are_made_again_with_holes_positions_and_twins(stage: Stage) -> None:
    image = stage.image_of(_NAMELESS)
    assert (image / CARRIED_FILE).stat().st_size < 1 << 20
    compact_image(image, stage.folder / "compact")
    for folder in (image, stage.folder / "compact", image):
        assert stage.finish(stage.restore(folder)) == _NAMELESS_TOLD
    assert stage.finish(stage.restore(image, OpenFilePolicy.REFUSE)) == _NAMELESS_TOLD


def test_a_file_without_a_name_whose_folder_is_gone_is_made_in_tmpdir(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stage.folder / "place"
    place.mkdir()
    monkeypatch.setenv("PLACE", str(place))
    image = stage.image_of(_NAMELESS)
    place.rmdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with pytest.raises(StorageError, match="had no name; .*set TMPDIR"):
        stage.restore(image)
    monkeypatch.setenv("TMPDIR", str(stage.folder))
    before = sorted(stage.folder.iterdir())
    assert stage.finish(stage.restore(image)) == _NAMELESS_TOLD
    assert [path.name for path in stage.folder.iterdir() if path not in before and path.name.startswith(".")] == []


def test_damage_to_the_bytes_of_a_file_without_a_name_is_found(stage: Stage) -> None:
    image = stage.image_of(_NAMELESS)
    whole = (image / CARRIED_FILE).read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:2] + b"?" + whole[3:], None):
        if damaged is None:
            (image / CARRIED_FILE).unlink()
        else:
            (image / CARRIED_FILE).write_bytes(damaged)
        with pytest.raises(FormatError, match=CARRIED_FILE):
            stage.restore(image)


def test_a_file_without_a_name_that_is_too_large_or_open_elsewhere_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper = stage.start(f"f = open('gone', 'w+'); f.write('x' * 9000); f.flush(); os.unlink('gone')\n{WAIT_FOR_GO}")
    monkeypatch.setattr(carried, "MAX_BYTES", 8192)
    with pytest.raises(NotImageable, match="gone.*images carry at most 8192"):
        dump_image(upper.pid, stage.folder / "image")
    monkeypatch.undo()
    number = next(file.number for file in read_descriptors(upper.pid) if file.link.endswith("gone (deleted)"))
    with open(f"/proc/{upper.pid}/fd/{number}") as shared:
        other = subprocess.Popen(["sleep", "600"], stdin=shared)
    try:
        with pytest.raises(NotImageable, match=f"gone.*process {other.pid} has, too"):
            dump_image(upper.pid, stage.folder / "image")
    finally:
        other.kill()
        other.wait()
    dump_image(upper.pid, stage.folder / "image")


# --- processors ---

_PINNED = f"""
os.sched_setaffinity(0, {{1}})
told, placed = [], []
def look(wanted):
    if wanted: os.sched_setaffinity(0, wanted)
    placed.append(wanted)
    while not os.path.exists("go"): time.sleep(0.005)
    told.append(sorted(os.sched_getaffinity(0)))
threads = [threading.Thread(target=look, args=(wanted,)) for wanted in ({{0}}, {{0, 1}}, None)]
for thread in threads: thread.start()
while len(placed) < 3: time.sleep(0.005)
{WAIT_FOR_GO}
for thread in threads: thread.join()
print(sorted(os.sched_getaffinity(0)), sorted(told))
"""


def test_pinned_threads_come_back_to_their_places_on_the_seat_or_run_on_all_of_it(stage: Stage) -> None:
    seat = os.sched_getaffinity(0)
    if not {0, 1} <= seat:
        pytest.skip("needs the processors 0 and 1")
    try:
        os.sched_setaffinity(0, {0, 1})
        image = stage.image_of(_PINNED)
        upper = stage.restore(image)
        assert (stage.finish(upper), upper.note) == ("[1] [[0], [0, 1], [1]]\n", "")
        os.sched_setaffinity(0, {1})
        upper = stage.restore(image)
        assert stage.finish(upper) == "[1] [[1], [1], [1]]\n"
        assert "pinned to some of 2 processors and now run on all of the 1" in upper.note
    finally:
        os.sched_setaffinity(0, seat)


# --- increments ---


def test_an_increment_holds_what_changed_and_comes_back_whole(stage: Stage) -> None:
    upper = stage.start("""
        import mmap, zlib
        data = bytearray(os.urandom(1 << 20) * 16)
        room = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)  # of which nearly nothing is there
        room.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(room), 2 << 20): room[at] = 1
        step = 0
        while not os.path.exists("stop"):
            if os.path.exists(f"change{step}"):
                data[step << 20 : (step << 20) + 100_000] = os.urandom(100_000)
                step += 1
                more = bytearray(os.urandom(300_000))
                with open("state", "w") as file:
                    file.write(f"{step} {zlib.crc32(data)} {zlib.crc32(more)}")
                os.rename("state", f"state{step}")
                open("ready", "w").close()
            time.sleep(0.005)
            if step == 0: open("ready", "w").close()
        print(step, zlib.crc32(data), zlib.crc32(more))
    """)
    first = dump_image(upper.pid, stage.folder / "image0", track=True)
    if first.not_tracked:
        pytest.skip(f"needs Linux 6.7: {first.not_tracked}")
    for step in range(1, 4):
        (stage.work / f"change{step - 1}").touch()
        wait_for(lambda step=step: (stage.work / f"state{step}").exists(), "no change")
        report = dump_image(
            upper.pid, stage.folder / f"image{step}", previous=stage.folder / f"image{step - 1}", track=True
        )
        assert report.num_bytes < first.num_bytes / 2
        assert report.num_pages_inherited > 3000
        # A mark on a page that is not there would make it look like one in swap.
        assert report.num_pages + report.num_pages_inherited < first.num_pages + 1000
    # The marks are relative to the last image: an increment upon an older one would lack what changed between.
    assert dump_image(upper.pid, stage.folder / "full", previous=stage.folder / "image1").num_pages_inherited == 0
    upper.kill()
    (stage.work / "stop").touch()
    (stage.work / "change1").unlink()
    (stage.work / "change2").unlink()
    compact_image(stage.folder / "image3", stage.folder / "compact")
    shutil.rmtree(stage.folder / "image2")  # needed by image3, and by none of these
    for step, image in ((3, "compact"), (1, "image1"), (3, "full")):
        assert stage.finish(stage.restore(stage.folder / image)).strip() == (stage.work / f"state{step}").read_text()


def test_an_increment_holds_of_mapped_files_what_changed_or_was_dropped(stage: Stage) -> None:
    upper = stage.start(f"""
        import mmap, zlib
        with open("mapped", "w+b") as file:
            file.write(os.urandom(64 << 12))
            file.flush()
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for page in range(32): data[page << 12] ^= 1
        open("ready", "w").close()
        while not os.path.exists("change"): time.sleep(0.005)
        data[3 << 12] ^= 2
        data[40 << 12] ^= 2
        data.madvise(mmap.MADV_DONTNEED, 8 << 12, 2 << 12)  # from now on they are the file's
        told = zlib.crc32(data[9 << 12 :])  # one of them is read again, the other is not
        open("changed", "w").close()
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        with open("mapped", "rb") as file: whole = bytearray(file.read())
        for page in {{*range(32)}} - {{8, 9}}: whole[page << 12] ^= 1
        for page in (3, 40): whole[page << 12] ^= 2
        print(data[:] == whole, zlib.crc32(data[9 << 12 :]) == told)
    """)
    if dump_image(upper.pid, stage.folder / "image0", track=True).not_tracked:
        pytest.skip("needs Linux 6.7")
    (stage.work / "change").touch()
    wait_for(lambda: (stage.work / "changed").exists(), "no change")
    dump_image(upper.pid, stage.folder / "image1", previous=stage.folder / "image0", track=True)
    upper.kill()
    image = read_image(stage.folder / "image1")
    (start,) = (area.start for area in image.areas.areas if area.path.endswith("/mapped"))
    own = {page for run in image.runs if run.source == 0 for page in range(run.start, run.end, 4096)}
    assert {(page - start) >> 12 for page in own if start <= page < start + (64 << 12)} == {3, 8, 40}
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(stage.folder / "image1")) == "True True\n"


def test_an_increment_of_many_single_pages_has_each_once(stage: Stage) -> None:
    upper = stage.start(f"""
        import mmap, zlib
        data = mmap.mmap(-1, 1400 << 12, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data.madvise(mmap.MADV_NOHUGEPAGE)
        data[:] = os.urandom(len(data))
        open("ready", "w").close()
        while not os.path.exists("change"): time.sleep(0.005)
        for page in range(0, 1400, 2): data[page << 12] ^= 1
        told = zlib.crc32(data)
        open("changed", "w").close()
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        print(zlib.crc32(data) == told)
    """)
    dump_image(upper.pid, stage.folder / "image0", track=True)
    (stage.work / "change").touch()
    wait_for(lambda: (stage.work / "changed").exists(), "no change")
    dump_image(upper.pid, stage.folder / "image1", previous=stage.folder / "image0", track=True)
    upper.kill()
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(stage.folder / "image1")) == "True\n"


def test_an_increment_holds_what_another_process_wrote_to_shared_memory(stage: Stage) -> None:
    stage.arena_bytes = 1 << 20
    upper = stage.start(f"""
        import mmap
        with open({ARENA_PATH!r}, "r+b") as file:
            arena = mmap.mmap(file.fileno(), 0)
        arena[:2] = b"ab"
        arena[500_000] = ord("c")
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        print(bytes(arena[:3]), arena[500_000:500_001], arena[900_000:900_001], any(arena[501_000:800_000]))
    """)
    dump_image(upper.pid, stage.folder / "image0", track=True)
    # As a lower half does whose MPI receives into an array: no mark of the program's own pages tells of it.
    with open(stage.site.arena_file, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        arena[1:3], arena[900_000] = b"BC", ord("d")
    dump_image(upper.pid, stage.folder / "image1", previous=stage.folder / "image0", track=True)
    upper.kill()
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(stage.folder / "image1")) == "b'aBC' b'c' b'd' False\n"


def test_an_increment_without_its_ancestor_is_refused(stage: Stage) -> None:
    upper = stage.start(WAIT_FOR_GO)
    if dump_image(upper.pid, stage.folder / "image0", track=True).not_tracked:
        pytest.skip("needs Linux 6.7")
    dump_image(upper.pid, stage.folder / "image1", previous=stage.folder / "image0", track=True)
    upper.kill()
    (stage.folder / "image0" / HEADER_FILE).unlink()
    with pytest.raises(FormatError, match="image0"):
        stage.restore(stage.folder / "image1")


# --- refusals and failures ---

_UNABLE = {
    "a socket": ("import socket; s = socket.socket()", "socket:.*a connection of the program's own"),
    "a child with a socket": (
        "import socket\nif os.fork() == 0:\n"
        "    s = socket.socket(socket.AF_INET); open('made', 'w').close(); time.sleep(600)\n"
        "while not os.path.exists('made'): time.sleep(0.005)",
        "process .* \\(python.*\\), descriptor .*socket",
    ),
    "a child in another namespace": (
        "import subprocess; p = subprocess.Popen(['unshare', '--uts', 'sleep', '600'])\n"
        "while open(f'/proc/{p.pid}/comm').read() != 'sleep\\n': time.sleep(0.005)",
        "process .*sleep.* another uts namespace",
    ),
    "a child that is another user": (
        "pid = os.fork()\nif pid == 0: os.setuid(65534); time.sleep(600)\n"
        "while 'Uid:\\t65534' not in open(f'/proc/{pid}/status').read(): time.sleep(0.005)",
        "runs as another user",
    ),
    "a child that is stopped": (
        "import signal\npid = os.fork()\nif pid == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)",
        "stopped by a signal",
    ),
    "a pipe of packets": ("a = os.pipe2(os.O_DIRECT)", "a pipe of packets"),
    "a POSIX timer": (
        "import ctypes; t = ctypes.c_void_p(); ctypes.CDLL(None).timer_create(1, None, ctypes.byref(t))",
        "timer_create",
    ),
    "a file with another name": ("f = open('old', 'w'); os.link('old', 'new'); os.unlink('old')", "old.*another name"),
    "a mapped file that was deleted": (
        "import mmap; f = open('gone', 'w+b'); f.truncate(8); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)\n"
        "os.unlink('gone')",
        "gone.*was deleted",
    ),
    "a timer descriptor": (
        "import ctypes; t = ctypes.CDLL(None).timerfd_create(1, 0)",
        "a timer descriptor; images do not hold it",
    ),
}


@pytest.mark.parametrize("name", _UNABLE)
def test_what_cannot_be_imaged_is_refused_by_name_and_goes_on(stage: Stage, name: str) -> None:
    setup, message = _UNABLE[name]
    upper = stage.start(f"{setup}\n{WAIT_FOR_GO}\nos._exit(0)")
    assert check_imageable(upper.pid)
    with pytest.raises(NotImageable, match=message):
        dump_image(upper.pid, stage.folder / "image")
    assert not (stage.folder / "image").exists()
    (stage.work / "go").touch()
    stage.finish(upper)


def test_damage_to_any_file_of_an_image_is_found_before_the_process_runs(stage: Stage) -> None:
    image = stage.image_of("import numpy\n" + WAIT_FOR_GO)
    chance = random.Random(5)
    for path in sorted(image.iterdir()):
        for _how in damages(path, chance):
            with pytest.raises(FormatError, match=path.name):
                stage.restore(image)
    stage.finish(stage.restore(image))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_leaves_no_image_and_the_process_running(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    upper = stage.start(f"""
        open("ready", "w").close()
        while not os.path.exists("change"): time.sleep(0.005)
        data = os.urandom(1 << 20)
        open("changed", "w").close()
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
    """)
    dump_image(upper.pid, stage.folder / "before", track=True)
    # A program that slept all the time between two images has no page to be written.
    (stage.work / "change").touch()
    wait_for(lambda: (stage.work / "changed").exists(), "no change")
    real_call = getattr(os, call)

    def fail(descriptor: int, *rest: Any) -> int:
        if PAGES_FILE in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return real_call(descriptor, *rest)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="No space left"):
        dump_image(upper.pid, stage.folder / "image", previous=stage.folder / "before", track=True)
    monkeypatch.undo()
    assert not (stage.folder / "image").exists()
    after = dump_image(upper.pid, stage.folder / "after", previous=stage.folder / "before", track=True)
    if call == "fsync":  # the marks are of an image that is not there: upon the one before pages would be missing
        assert after.num_pages_inherited == 0
    (stage.work / "go").touch()
    stage.finish(upper)
    assert stage.finish(stage.restore(stage.folder / "after")) == ""


def test_an_image_is_for_its_owner_only(stage: Stage) -> None:
    image = stage.image_of(WAIT_FOR_GO)
    assert image.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in image.iterdir()} == {0o600}
    (stage.work / "go").unlink()
    with pytest.raises(StorageError, match="File exists"):
        dump_image(stage.start(WAIT_FOR_GO).pid, image)


def test_the_program_finds_a_clean_place(stage: Stage) -> None:
    (stage.work / "go").touch()
    upper = stage.start(f"""
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:3], sys.stdin.read() == "", os.getpid())
        sys.stderr.write("told")
        sys.exit(3)
    """)
    assert upper.wait(PATIENCE_S) == 3
    assert Path(stage.site.stdout_file).read_text() == f"[0, 1, 2] True {INNER_PID}\n"
    assert stage.errors() == "told"


def test_a_program_reads_its_input_file_from_where_it_stood_and_an_image_carries_it(stage: Stage) -> None:
    (stage.folder / "input").write_text("first\nsecond\nthird\nfourth\n")
    program = f"import os, time\na = os.read(0, 7)\n{WAIT_FOR_GO}\nprint(a, os.read(0, 99))"
    command = Command((sys.executable, "-c", program), {}, str(stage.work))
    command = replace(command, input_file=str(stage.folder / "input"), input_position=6)
    with closing(start_upper(command, stage.new_site())) as upper:
        wait_for((stage.work / "ready").exists, "the program is not ready")
        dump_image(upper.pid, stage.folder / "image")
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(stage.folder / "image")) == "b'second\\n' b'third\\nfourth\\n'\n"
    with pytest.raises(ConfigError, match="no-such-input"):
        start_upper(replace(command, input_file=str(stage.folder / "no-such-input")), stage.new_site())


def test_a_program_that_does_not_exist_is_an_error_at_once_and_leaves_nothing(stage: Stage) -> None:
    children = set(children_of(os.getpid()))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="no-such-program"):
        start_upper(Command(("./no-such-program",), {}, str(stage.work)), stage.new_site())
    assert set(children_of(os.getpid())) <= children
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_program_that_ends_at_once_is_not_missed(stage: Stage) -> None:
    for _ in range(3):
        upper = start_upper(Command(("/bin/true",), {}, "/"), stage.new_site())
        assert upper.wait(PATIENCE_S) == 0
        upper.close()


def _said_by_another(stage: Stage, text: str) -> list[int]:
    """Numbers that a fresh process prints; it has the site, and a command that sleeps."""
    site = stage.new_site()
    begin = f"""
import os, sys, threading, time
from remesh.carried.images import Command, Site, Starter, start_upper
site = Site({site.channel_file!r}, {site.stdout_file!r}, {site.stderr_file!r})
command = Command((sys.executable, "-c", "import time; time.sleep(600)"), {{}}, "/")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(upper_module.__file__).parents[3])}
    lines = [sys.executable, "-c", begin + textwrap.dedent(text)]
    done = subprocess.run(lines, capture_output=True, text=True, env=environment, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize("starter", ["None", "Starter.fork()"])
def test_a_program_ends_with_the_process_that_started_it(stage: Stage, starter: str) -> None:
    (pid,) = _said_by_another(
        stage, f"print(start_upper(command, site, starter={starter}).pid, flush=True)\nos._exit(0)"
    )
    wait_for(lambda: start_of(pid) is None, "the program outlived its starter")


def test_a_starter_ends_with_its_process_and_is_no_copy_of_one_with_threads(stage: Stage) -> None:
    pid, num_refused = _said_by_another(
        stage,
        """
        print(Starter.fork().pid, flush=True)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        try:
            Starter.fork()
        except RuntimeError:
            print(1, flush=True)
        os._exit(0)
        """,
    )
    assert num_refused == 1
    wait_for(lambda: start_of(pid) is None, "the starter outlived its process")


def test_the_benchmark_of_the_engine_runs(stage: Stage) -> None:
    rows = engine_benchmark.rows(num_mib=4, repeat=1)
    assert any("increment" in row.case for row in rows)
    assert all(row.value > 0 for row in rows)


def test_a_program_leads_its_group_and_no_session(stage: Stage) -> None:
    text = f"{WAIT_FOR_GO}\nprint(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())"
    upper = stage.start(text)
    dump_image(upper.pid, stage.folder / "image")
    (stage.work / "go").touch()
    expected = "True False\n"
    assert stage.finish(upper) == expected
    assert stage.finish(stage.restore(stage.folder / "image")) == expected


def test_the_examination_of_a_machine_that_is_able_ends_with_a_restored_process(stage: Stage) -> None:
    findings = {finding.what: finding for finding in examine_machine()}
    assert findings["image and restore of a process"].good, findings


_IS_SUBREAPER = """
import ctypes
from remesh.carried.images.doctor import examine_machine
from remesh.foundation.linux.calls import PR_GET_CHILD_SUBREAPER, prctl
findings, found = examine_machine(), ctypes.c_int()
prctl(PR_GET_CHILD_SUBREAPER, ctypes.addressof(found))
print(findings[-2].good, found.value)
"""


@pytest.mark.slow
def test_who_has_examined_a_machine_does_not_become_the_parent_of_orphans() -> None:
    """It would not reap them: a launcher that waits for the end of a group of processes waits for zombies, too."""
    done = subprocess.run(
        [sys.executable, "-c", _IS_SUBREAPER], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "True 0\n", done.stdout


def test_an_image_needs_no_root(stage: Stage) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, which is not on the path")
    source = Path(upper_module.__file__).parents[3]
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    program = "from remesh.carried.images.doctor import examine_machine\nfor f in examine_machine(): print(f)"
    python = sys.executable if _is_open_to_all(Path(sys.base_prefix)) else "/usr/bin/python3"
    if not _can_run([*nobody, python, "-c", "import ctypes, remesh"], source):
        pytest.skip("needs a Python and a checkout that any user may read")
    environment = {"PYTHONPATH": str(source), "PATH": os.environ["PATH"]}
    done = subprocess.run([*nobody, python, "-c", program], capture_output=True, text=True, env=environment, check=True)
    findings = {line.split("'")[1]: line for line in done.stdout.splitlines()}
    assert "user 65534, in a user namespace" in findings["namespaces"]
    if "good=True" in findings["namespaces"]:
        assert "good=True" in findings["image and restore of a process"], done.stdout


def _is_open_to_all(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


def _can_run(command: list[str], source: Path) -> bool:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source)}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
