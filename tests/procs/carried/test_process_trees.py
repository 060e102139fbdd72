"""Processes with their descendants, stopped at any moment and brought back: they tell what they tell undisturbed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from remesh.carried.images import NotImageable, describe_image, dump_image, freeze
from remesh.carried.images.form.format import HEADER_FILE, TREE_FILE
from remesh.carried.images.look.process_tree import tree_of
from remesh.foundation.errors import FormatError
from tests.procs.stage import WAIT_FOR_GO, Stage, damages, wait_for

pytestmark = pytest.mark.procs


def _told(stage: Stage, program: str, *, after_s: float = 0.0) -> str:
    """What a program tells that is stopped, killed and brought back some time after it was ready."""
    upper = stage.start(program)
    time.sleep(after_s)
    with freeze(upper.pid) as frozen:
        dump_image(frozen, stage.folder / "image")
        upper.kill()
    (stage.work / "go").touch()
    return stage.finish(stage.restore(stage.folder / "image"))


def test_parent_and_child_share_pipes_with_bytes_in_flight_and_memory_and_ids(stage: Stage) -> None:
    program = f"""
import mmap
shared = mmap.mmap(-1, 8192)
out, into = os.pipe(); back_out, back_in = os.pipe()
os.write(into, b"x" * 5000)
pid = os.fork()
if pid == 0:
    os.close(into); os.close(back_out)
    data = b""
    while part := os.read(out, 100): data += part; shared[0] += 1; time.sleep(0.001)
    os.write(back_in, f"{{len(data)}} {{os.getppid()}} {{os.getpid()}} {{data.count(b'y')}}".encode())
    os._exit(3)
os.close(out); os.close(back_in)
{WAIT_FOR_GO}
os.write(into, b"y" * 1000); os.close(into)
print(os.read(back_out, 100), shared[0], os.waitpid(pid, 0))
"""
    assert _told(stage, program) == "b'6000 1000 1001 1000' 60 (1001, 768)\n"


def test_ends_that_nobody_has_waited_for_yet_are_kept(stage: Stage) -> None:
    program = f"""
import signal
def end(how):
    pid = os.fork()
    if pid == 0: how(); os._exit(0)
    return pid
signals = []
signal.signal(signal.SIGCHLD, lambda number, _: signals.append(number))
pids = [end(lambda: os._exit(7)), end(lambda: os.kill(os.getpid(), 9)), end(lambda: os.abort())]
while len(signals) == 0 or any(open(f"/proc/{{pid}}/stat").read().split()[2] != "Z" for pid in pids): time.sleep(0.01)
time.sleep(0.05); signals.clear()
{WAIT_FOR_GO}
print([os.waitpid(pid, 0)[1] & 0xFF7F for pid in pids], signals, pids)
"""
    assert _told(stage, program) == "[1792, 9, 6] [] [1001, 1002, 1003]\n"


def test_orphans_daemons_sessions_and_groups_are_as_they_were(stage: Stage) -> None:
    program = f"""
import signal
def tell(name):
    with open(name + ".new", "w") as file:
        print(os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0), file=file)
    os.rename(name + ".new", name)
def wait(name):
    while not os.path.exists(name): time.sleep(0.005)
def member(name):
    tell(name + ".before"); wait("go"); tell(name + ".after"); wait("end"); os._exit(0)
if os.fork() == 0:  # a daemon: the leader of its session ends
    os.setsid()
    if os.fork() == 0: member("daemon")
    wait("daemon.before"); os._exit(0)
os.wait()
if os.fork() == 0:  # as a shell does: a group whose leader ends first
    os.setsid()
    one = os.fork()
    if one == 0: os.setpgid(0, 0); wait("job.before"); os._exit(0)
    os.setpgid(one, one)
    if os.fork() == 0: os.setpgid(0, one); member("job")
    os.waitpid(one, 0)
    member("shell")
names = ["daemon", "job", "shell"]
for name in names: wait(name + ".before")
time.sleep(0.1)
for name in names:
    if name == "job": wait("shell.before")
{WAIT_FOR_GO}
for name in names: wait(name + ".after")
print([open(name + ".before").read() == open(name + ".after").read() for name in names][1:])
before, after = (open("daemon." + when).read().split() for when in ("before", "after"))
print(before[0] == after[0], after[1], before[2:] == after[2:])
open("end", "w").close()
"""
    assert _told(stage, program) == "[True, True]\nTrue 1 True\n"


def test_descriptors_share_an_offset_across_processes(stage: Stage) -> None:
    (stage.work / "input").write_text("0123456789")
    program = f"""
source = os.open("input", os.O_RDONLY); twin = os.dup(source); apart = os.open("input", os.O_RDONLY)
temporary = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600); os.write(temporary, b"abc")
counter = os.eventfd(0, os.EFD_SEMAPHORE); os.eventfd_write(counter, 2)
out, into = os.pipe()
pid = os.fork()
if pid == 0:
    while not os.path.exists("go"): time.sleep(0.005)
    os.read(source, 3); os.write(temporary, b"def"); os.eventfd_write(counter, 1)
    os._exit(0)
{WAIT_FOR_GO}
os.waitpid(pid, 0)
print(os.read(twin, 2), os.read(apart, 2), os.pread(temporary, 9, 0), [os.eventfd_read(counter) for _ in range(3)])
"""
    assert _told(stage, program) == "b'34' b'01' b'abcdef' [1, 1, 1]\n"


def test_memory_files_and_names_in_shared_memory_are_carried(stage: Stage) -> None:
    program = f"""
import mmap, multiprocessing as mp
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=100_000); block.buf[99_999] = 5
lock = mp.get_context("spawn").Semaphore(2); lock.acquire()
memory = os.memfd_create("a"); os.truncate(memory, 1 << 30); os.pwrite(memory, b"far", 1 << 29)
view = mmap.mmap(memory, 8192, offset=1 << 29)
gone = shared_memory.SharedMemory(create=True, size=4096); gone.buf[0] = 9; gone.unlink()
if os.fork() == 0:
    while not os.path.exists("go"): time.sleep(0.005)
    again = shared_memory.SharedMemory(block.name)
    again.buf[0] = again.buf[99_999] + 1; gone.buf[0] += 1; view[3:4] = b"!"; lock.release()
    os._exit(0)
{WAIT_FOR_GO}
os.wait()
print(block.buf[0], gone.buf[0], os.pread(memory, 4, 1 << 29), os.fstat(memory).st_blocks < 1000,
      [lock.acquire(block=False) for _ in range(3)])
block.close(); block.unlink(); gone.close()
"""
    before = set(os.listdir("/dev/shm"))
    assert _told(stage, program) == "6 10 b'far!' True [True, True, False]\n"
    # Whoever else makes a semaphore at this moment takes its name away at once.
    wait_for(lambda: not [name for name in set(os.listdir("/dev/shm")) - before if "mp-" in name], "names are left")


def test_an_image_tells_the_names_of_its_shared_memory(stage: Stage) -> None:
    name = f"remesh-test-{os.getpid()}"
    program = f"""
from multiprocessing import shared_memory
block = shared_memory.SharedMemory("{name}", create=True, size=4096)
gone = shared_memory.SharedMemory(create=True, size=4096); gone.unlink()
{WAIT_FOR_GO}
block.close(); block.unlink(); gone.close()
"""
    upper = stage.start(program)
    with freeze(upper.pid) as frozen:
        report = dump_image(frozen, stage.folder / "image")
    (stage.work / "go").touch()
    stage.finish(upper)
    assert report.shared_names == (f"/dev/shm/{name}",)


def test_handlers_pending_signals_and_the_signal_of_a_parents_end_are_kept_in_children(stage: Stage) -> None:
    program = """
import ctypes, signal
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR2)
    parent = os.fork()
    open("ready", "w").close()
    while not os.path.exists("go"): time.sleep(0.005)
    if parent == 0: os._exit(5)
    print(signal.SIGUSR2 in signal.sigpending(), os.waitpid(parent, 0)[1] >> 8, flush=True)
    os.kill(os.getppid(), signal.SIGUSR1)
    signal.sigwait([signal.SIGUSR1]); open("told", "w").close()
    os._exit(0)
signal.signal(signal.SIGUSR1, lambda *_: None)
while not os.path.exists("ready"): time.sleep(0.005)
while not os.path.exists("go"): time.sleep(0.005)
os.kill(pid, signal.SIGUSR1)
print(os.waitpid(pid, 0)[1], os.path.exists("told"))
"""
    assert _told(stage, program) == "True 5\n0 True\n"


_BASH = """
import subprocess
text = "for i in $(seq 300); do echo $i; sleep 0.01; done | sort -r | (while read x; do echo $x; done) | cksum"
shell = subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE)
open("ready", "w").close()
print(shell.communicate(), shell.returncode)
"""


@pytest.mark.slow
def test_a_pipeline_of_a_shell(stage: Stage) -> None:
    expected = subprocess.run("seq 300 | sort -r | cksum", shell=True, capture_output=True, check=True).stdout
    assert _told(stage, _BASH, after_s=0.4) == f"({expected!r}, None) 0\n"


_SYSTEM_IN_C = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    int status = 0, total = 0, pids[3];
    for (int i = 0; i < 3; i++)
        if (!(pids[i] = fork())) { usleep(1000 * 700 * (i + 1)); _exit(10 + i); }
    close(open("ready", O_CREAT | O_WRONLY, 0600));
    total = WEXITSTATUS(system("sleep 1; exit 4"));
    for (int i = 0; i < 3; i++) { waitpid(pids[i], &status, 0); total = 100 * total + WEXITSTATUS(status); }
    printf("%d\\n", total);
    return fflush(stdout);
}
"""


def test_a_c_program_that_forks_and_calls_system(stage: Stage) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (stage.folder / "program.c").write_text(_SYSTEM_IN_C)
    subprocess.run(["cc", "-o", stage.folder / "program", stage.folder / "program.c"], check=True)
    assert _told(stage, f"os.execv({str(stage.folder / 'program')!r}, ['program'])", after_s=0.3) == "4101112\n"


_POOLS = {
    "Pool": "pool = mp.get_context('{how}').Pool(2); results = pool.map_async(square, range(100), chunksize=1).get",
    "ProcessPoolExecutor": (
        "pool = futures.ProcessPoolExecutor(2, mp_context=mp.get_context('{how}'))\n"
        "    jobs = [pool.submit(square, each) for each in range(100)]\n"
        "    results = lambda: [job.result() for job in jobs]"
    ),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("Pool", "fork"),
        *(pytest.param("Pool", how, marks=pytest.mark.slow) for how in ("spawn", "forkserver")),
        *(pytest.param("ProcessPoolExecutor", how, marks=pytest.mark.slow) for how in ("fork", "spawn", "forkserver")),
    ],
)
def test_pools_of_python_go_on(stage: Stage, kind: str, how: str) -> None:
    script = textwrap.dedent("""
        import os, time, multiprocessing as mp
        from concurrent import futures
        def square(x):
            time.sleep(0.02)
            return x * x
        if __name__ == "__main__":
            {make}
            if {how!r} != "fork": time.sleep(1)
            open("ready", "w").close()
            while not os.path.exists("go"): time.sleep(0.005)
            print(sum(results()))
    """).format(make=_POOLS[kind].format(how=how), how=how)
    (stage.work / "script.py").write_text(script)
    assert _told(stage, "os.execv(sys.executable, [sys.executable, 'script.py'])", after_s=0.2) == "328350\n"


_SOCKETS = f"""
import socket
one, other = socket.socketpair()
gone, end = socket.socketpair(); end.sendall(b"last words"); end.close()
half, rest = socket.socketpair(); half.sendall(b"half"); half.shutdown(socket.SHUT_WR)
packets, into = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); into.send(b"a"); into.send(b"bc")
listener = socket.socket(socket.AF_UNIX); listener.bind(os.getcwd() + "/listener"); listener.listen(3)
hidden = socket.socket(socket.AF_UNIX); hidden.bind(b"\\0remesh" + str(time.time_ns()).encode()); hidden.listen(3)
early = socket.socket(socket.AF_UNIX); early.connect("listener")  # nobody has accepted it yet
memory = os.memfd_create("m"); os.write(memory, b"memory")
socket.send_fds(one, [b"f"], [memory]); one.sendall(b"after"); os.close(memory)
if os.fork() == 0:
    while not os.path.exists("go"): time.sleep(0.005)
    for at in (listener, listener, hidden):
        accepted, _ = at.accept(); accepted.sendall(b"hello" + accepted.recv(9))
    os._exit(0)
{WAIT_FOR_GO}
late = socket.socket(socket.AF_UNIX); late.connect("listener")
third = socket.socket(socket.AF_UNIX); third.connect(hidden.getsockname())
for each, name in ((early, b"1"), (late, b"2"), (third, b"3")): each.sendall(name)
print([each.recv(99) for each in (early, late, third)], packets.recv(9), packets.recv(9))
print(gone.recv(99), gone.recv(99), rest.recv(9), rest.recv(9), rest.send(b"back"), half.recv(9))
data, numbers, _, _ = socket.recv_fds(other, 99, 5)
print(data, os.pread(numbers[0], 99, 0), other.recv(99), os.wait()[1], os.listdir(".").count("listener"))
"""
_SOCKETS_TOLD = """[b'hello1', b'hello2', b'hello3'] b'a' b'bc'
b'last words' b'' b'half' b'' 4 b'back'
b'f' b'memory' b'after' 0 1
"""


def test_sockets_between_the_processes_keep_messages_descriptors_and_who_waits_for_them(stage: Stage) -> None:
    assert _told(stage, _SOCKETS) == _SOCKETS_TOLD


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("s = socket.socket(socket.AF_INET)", "a connection of the program's own"),
        ("s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('named')", "for datagrams"),
        ("s = socket.socket(socket.AF_UNIX); s.connect({path!r})", "in a process outside"),
    ],
)
def test_a_socket_that_cannot_be_carried_is_refused_by_name(stage: Stage, setup: str, message: str) -> None:
    with socket.socket(socket.AF_UNIX) as outside:
        path = str(stage.folder / "outside")
        outside.bind(path)
        outside.listen()
        upper = stage.start(f"import socket\n{setup.format(path=path)}\n{WAIT_FOR_GO}")
        if "path" in setup:
            outside.accept()[0].detach()
        with pytest.raises(NotImageable, match=message):
            dump_image(upper.pid, stage.folder / "image")
    (stage.work / "go").touch()
    stage.finish(upper)


def test_an_event_loop_goes_on_with_its_children(stage: Stage) -> None:
    program = """
import asyncio
async def main():
    child = await asyncio.create_subprocess_exec("sh", "-c", "read x; echo got $x; sleep 0.3; exit 3",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    ticks = []
    async def tick():
        while len(ticks) < 100: ticks.append(1); await asyncio.sleep(0.005)
    task = asyncio.create_task(tick())
    open("ready", "w").close()
    while not os.path.exists("go"): await asyncio.sleep(0.005)
    out, _ = await child.communicate(b"word\\n")
    await task
    print(out, child.returncode, len(ticks))
asyncio.set_child_watcher(asyncio.ThreadedChildWatcher())
asyncio.run(main())
"""
    assert _told(stage, program) == "b'got word\\n' 3 100\n"


def test_an_epoll_instance_that_watches_what_nobody_can_name_is_refused(stage: Stage) -> None:
    setup = "import select; e = select.epoll(); r, w = os.pipe(); twin = os.dup(r); e.register(r); os.close(r)"
    upper = stage.start(f"{setup}\n{WAIT_FOR_GO}")
    with pytest.raises(NotImageable, match="still watches what was descriptor"):
        dump_image(upper.pid, stage.folder / "image")
    assert not (stage.folder / "image").exists()
    (stage.work / "go").touch()
    stage.finish(upper)


_TRAINING = """
import os, sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, at):
        time.sleep(0.01)
        return torch.full((100,), float(at)).sin(), torch.tensor(float(at))
if __name__ == "__main__":
    torch.manual_seed(0); torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(100, 10), torch.nn.Dropout(0.1), torch.nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Samples(), batch_size=4, num_workers=2, shuffle=True, persistent_workers=True,
                        multiprocessing_context=sys.argv[1])
    for epoch in range(6):
        for step, (x, y) in enumerate(loader):
            loss = (model(x)[:, 0] - y).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(epoch, step, loss.item().hex(), flush=True)
            if (epoch, step) == (0, 5): open("ready", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_training_script_goes_on_with_the_workers_of_its_loader(stage: Stage, how: str) -> None:
    (stage.work / "train.py").write_text(_TRAINING)
    program = f"os.execv(sys.executable, [sys.executable, 'train.py', {how!r}])"
    expected = stage.finish(stage.start(program)).splitlines()
    (stage.work / "ready").unlink()
    upper = stage.start(program)
    with freeze(upper.pid) as frozen:
        assert len(frozen.processes) >= 3
        told = Path(stage.site.stdout_file).read_text().splitlines()
        try:
            dump_image(frozen, stage.folder / "image")
        except NotImageable as error:
            assert all(each.is_passing for each in error.refusals)
            frozen.thaw()
            dump_image(upper.pid, stage.folder / "image")
            told = []
        upper.kill()
    after = stage.finish(stage.restore(stage.folder / "image")).splitlines()
    assert after == expected[-len(after) :]
    assert not told or told + after == expected


# --- images of trees ---

_COUNTER = f"""
import mmap
shared = mmap.mmap(-1, 4096)
data = bytearray(os.urandom(1 << 20) * 8)
pid = os.fork()
if pid == 0:
    while not os.path.exists("change"): time.sleep(0.005)
    data[5] = 7; shared[0] += 1; open("changed", "w").close()
    while not os.path.exists("go"): time.sleep(0.005)
    os._exit(data[5] + shared[0])
{WAIT_FOR_GO}
print(os.waitpid(pid, 0)[1] >> 8)
"""


def test_an_increment_of_a_tree_holds_what_changed_in_each_process(stage: Stage) -> None:
    upper = stage.start(_COUNTER)
    first = dump_image(upper.pid, stage.folder / "image0", track=True)
    if first.not_tracked:
        pytest.skip(f"needs Linux 6.7: {first.not_tracked}")
    (stage.work / "change").touch()
    wait_for((stage.work / "changed").exists, "no change")
    second = dump_image(upper.pid, stage.folder / "image1", previous=stage.folder / "image0", track=True)
    assert second.num_pages_inherited > 2 * 2048 > 10 * second.num_pages
    assert second.ancestors == (str(stage.folder / "image0"),)
    upper.kill()
    (stage.work / "go").touch()
    assert stage.finish(stage.restore(stage.folder / "image1")) == "8\n"
    shutil.rmtree(stage.folder / "image0")
    with pytest.raises(FormatError, match="image0"):
        stage.restore(stage.folder / "image1")


@pytest.mark.slow
def test_damage_to_any_file_of_a_tree_is_found_before_a_process_runs(stage: Stage) -> None:
    image = stage.image_of(_COUNTER.replace("<< 20", "<< 12").replace("pid = os", "shared[1] = 1\npid = os"))
    assert set(describe_image(image)["members"]) == {"1001"}
    chance = random.Random(5)
    for path in sorted(path for path in image.rglob("*") if path.is_file()):
        for _how in damages(path, chance):
            with pytest.raises(FormatError, match=path.name):
                stage.restore(image)
    shutil.copytree(image / "1001", stage.folder / "alone")
    with pytest.raises(FormatError, match="of a child process"):
        stage.restore(stage.folder / "alone")
    shutil.rmtree(image / "1001")
    with pytest.raises(FormatError, match=f"1001.*{HEADER_FILE}|{TREE_FILE}"):
        stage.restore(image)


def test_whoever_has_stopped_a_tree_finds_all_of_it_standing(stage: Stage) -> None:
    upper = stage.start(f"""
        for _ in range(3):
            if os.fork() == 0:
                while True:  # makes children all the time
                    if os.fork() == 0: os._exit(0)
                    os.wait()
        {textwrap.indent(WAIT_FOR_GO, " " * 8).strip()}
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    """)
    for _ in range(20):
        with freeze(upper.pid) as frozen:
            states = {pid: Path(f"/proc/{pid}/status").read_text() for pid in tree_of(upper.pid)}
            assert all("\nState:\tt" in text or "\nState:\tZ" in text for text in states.values())
            assert len(frozen.processes) >= 4
            assert {process.pid for process in frozen.processes} <= set(states)
    (stage.work / "go").touch()
    assert stage.finish(upper) == ""


# --- programs at random ---


def _random_program(seed: int) -> str:
    """A program of several processes whose output does not depend on when it is stopped, or on how fast each runs."""
    chance = random.Random(seed)
    lines = [
        "import hashlib, mmap, signal, struct, subprocess",
        "counters = mmap.mmap(-1, 4096)",
        "def add(at, number):",
        "    place = slice(8 * at, 8 * at + 8)",
        "    counters[place] = struct.pack('q', struct.unpack('q', counters[place])[0] + number)",
        "def work(steps, at):",
        "    digest = hashlib.sha256()",
        "    for step in range(steps): digest.update(bytes([step % 251])); add(at, step); time.sleep(0.004)",
        "    return digest.hexdigest()[:8]",
        "told = []",
    ]
    ends = ["open('ready', 'w').close()"]
    for number in range(chance.randrange(2, 6)):
        steps, status = chance.randrange(20, 150), chance.randrange(1, 100)
        kind = chance.choice(["worker", "chain", "popen", "zombie", "grandchild", "daemon"])
        if kind == "popen":
            words = chance.choice([["sleep", f"{chance.random():.2f}"], ["sh", "-c", f"sleep 0.4; exit {status}"]])
            lines.append(f"p{number} = subprocess.Popen({words!r}, start_new_session={chance.random() < 0.5})")
            ends.append(f"told.append(p{number}.wait())")
            continue
        if kind == "chain":
            text = f"for i in $(seq {steps}); do echo $i; sleep 0.005; done | sed s/1/one/ | sort | cksum"
            lines.append(f"p{number} = subprocess.Popen(['sh', '-c', {text!r}], stdout=subprocess.PIPE)")
            ends.append(f"told.append(p{number}.communicate()[0])")
            continue
        lines += [f"r{number}, w{number} = os.pipe()", f"p{number} = os.fork()", f"if p{number} == 0:"]
        body = [f"os.write(w{number}, work({steps}, {number}).encode())", f"os._exit({status})"]
        if kind == "zombie":
            body = [f"os._exit({status})"]
        if kind == "grandchild":
            body = ["if os.fork() == 0:", *(f"    {line}" for line in body), "os._exit(os.wait()[1] >> 8)"]
        if kind == "daemon":
            body = ["os.setsid()", "if os.fork() == 0:", *(f"    {line}" for line in body), "os._exit(0)"]
        lines += [*(f"    {line}" for line in body), f"os.close(w{number})"]
        ends.append(f"told.append((os.waitpid(p{number}, 0)[1], os.read(r{number}, 99)))")
    # It may be stopped a first time however late that comes.
    ends.append("while not os.path.exists('stopped'): time.sleep(0.005)")
    return "\n".join([*lines, *ends, "print(told, struct.unpack('9q', counters[:72]))"])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_a_random_tree_tells_the_same_however_often_it_is_stopped(stage: Stage, seed: int) -> None:
    program, chance = _random_program(seed), random.Random(seed)
    (stage.work / "stopped").touch()
    expected = stage.finish(stage.start(program))
    for name in ("ready", "stopped"):
        (stage.work / name).unlink()
    upper = stage.start(program)
    num_stops, told = 0, ""
    for number in range(3):
        time.sleep(chance.random() * 0.4)
        try:
            frozen = freeze(upper.pid)
        except ProcessLookupError:
            break
        with frozen:
            dump_image(frozen, stage.folder / f"image{number}")
            upper.kill()
            told += Path(stage.site.stdout_file).read_text()  # it may have stood still behind its last word
        (stage.work / "stopped").touch()
        upper = stage.restore(stage.folder / f"image{number}")
        num_stops += 1
    told += stage.finish(upper)
    assert told == expected, (num_stops, stage.errors())
    assert num_stops
