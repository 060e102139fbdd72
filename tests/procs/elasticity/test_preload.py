"""Workers that are forked of a preloaded process: like those that are started plainly, and never needed."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from remesh.elasticity.launch.forkable import is_read_while_loading
from remesh.elasticity.node.preload import Preload, PreloadPlan
from remesh.foundation.linux.procfs import children_of, start_of
from tests.procs.agents import TIMEOUT_S, Agents
from tests.procs.started_scripts import LIMIT_S, TELLING, Case, Ended, make_case, run_forked, run_plain

pytestmark = pytest.mark.procs


def _check_alike(seed: int, folder: Path, **options: tuple[str, ...]) -> None:
    case = make_case(seed, folder, **options)
    plain, forked = run_plain(case), run_forked(case)
    assert forked == plain, f"seed {seed}: {case.arguments}"


@pytest.mark.parametrize("seed", range(8))
def test_a_forked_script_sees_and_says_what_a_plain_one_does(seed: int, tmp_path: Path) -> None:
    """The first seeds tell, together, all that there is to tell."""
    _check_alike(seed, tmp_path, telling=tuple(sorted(TELLING)[seed::8]))


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_many_forked_scripts_see_and_say_what_plain_ones_do(block: int, tmp_path: Path) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        _check_alike(seed, tmp_path / str(seed))


_TORCH = """\
import torch, torch.utils.data
from torch import nn

def double(x):
    return 2 * x

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, at):
        return torch.tensor([at * 1.0])

if __name__ == "__main__":
    print(torch.get_num_threads(), torch.cuda.is_initialized(), torch.get_default_dtype(), torch.is_grad_enabled())
    for start in ("fork", "spawn")[:torch.get_num_threads()]:
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=start)
        print([batch.tolist() for batch in loader])
    torch.manual_seed(5)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(64, 4)).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item(), torch.randn(300, 300).matmul(torch.ones(300, 300)).sum().item())
    print(torch.compile(double, backend="eager")(torch.ones(3)))
    torch.distributed.init_process_group("gloo")
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    print(value, torch.distributed.get_rank())
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_torch_works_in_a_forked_script_as_in_a_plain_one(threads: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TORCH)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": threads}
    case = Case(tmp_path, ("script.py",), {**os.environ, **rank}, "", ("torch", "torch._dynamo"))
    plain, forked = run_plain(case), run_forked(case)
    assert plain.code == 0, plain.errors
    assert forked == plain


@pytest.mark.slow
@pytest.mark.parametrize("modules", [("torch",), ("torch", "torch._dynamo")])
def test_a_script_sees_the_same_of_its_process_when_torch_was_loaded(modules: tuple[str, ...], tmp_path: Path) -> None:
    """What it names is loaded by both."""
    names = ("ids", "age", "registered", "loggers", "warnings", "threads", "interpreter", "start method", "temporary")
    _check_alike(1, tmp_path, modules=modules, telling=names)


_KEPT = """\
import gc, os

class Last:
    def __del__(self, count=gc.get_freeze_count, write=os.write):
        write(1, b"kept at the end: %d" % count())

last = Last()
"""


@pytest.mark.parametrize("modules", [(), pytest.param(("torch",), marks=pytest.mark.slow)])
def test_what_was_loaded_before_is_let_go_of_at_the_end(modules: tuple[str, ...], tmp_path: Path) -> None:
    """Libraries complain of what is kept then, nanobind's with a page on the terminal."""
    case = _case(tmp_path, _KEPT, *modules)
    plain, forked = run_plain(case), run_forked(case)
    assert plain.output == "kept at the end: 0"
    assert forked == plain


_DRAWS = """\
import multiprocessing, random, secrets, tempfile, uuid
import numpy, torch
print(random.random())
print(numpy.random.random())
print(torch.rand(1).item())
print(torch.initial_seed())
print(bytes(multiprocessing.current_process().authkey))
print(tempfile.mktemp())
print(uuid.uuid4())
print(secrets.token_hex())
"""


def _fork(case: Case, *, times: int = 1) -> list[Ended]:
    """What workers of one preloaded process say."""
    told: list[str] = []
    ended = []
    with Preload(PreloadPlan(case.command, case.modules), case.environment, told.append) as preload:
        for _ in range(times):
            with (case.folder / "out").open("w") as out:
                process = preload.fork(case.command, case.environment, [out, None])
                assert process is not None, told
                code = process.wait(LIMIT_S)
            ended.append(Ended(code, (case.folder / "out").read_text(), ""))
    return ended


def _case(folder: Path, text: str, *modules: str, **environment: str) -> Case:
    (folder / "script.py").write_text(text)
    return Case(folder, (str(folder / "script.py"),), {**os.environ, **environment}, "", modules)


def test_two_workers_draw_other_random_numbers(tmp_path: Path) -> None:
    case = _case(tmp_path, _DRAWS, "torch", "numpy.random", "multiprocessing", OMP_NUM_THREADS="1")
    one, other = (ended.output.splitlines() for ended in _fork(case, times=2))
    assert len(one) == len(other) == _DRAWS.count("print")
    assert not set(one) & set(other)


def test_a_sitecustomize_of_the_user_runs_in_each_worker(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import os\nprint('customized', os.environ['RANK'])\n")
    text = "import sys\nprint(sys.modules['sitecustomize'].__file__)"
    case = _case(tmp_path, text, PYTHONPATH=str(tmp_path / "site"), RANK="3")
    (ended,) = _fork(case)
    assert ended.output.splitlines() == ["customized 3", str(tmp_path / "site/sitecustomize.py")]


def test_letters_that_the_workers_locale_has_not_reach_it_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "ünïcode"
    folder.mkdir()
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": "/nöwhere"}
    text = "import os, sys\nprint(ascii(sys.argv), ascii(dict(os.environ)), ascii(vars(sys)['path']))"
    case = _case(folder, text, **locale, MINE="ü")
    case = replace(case, arguments=(*case.arguments, "ü"))
    assert run_forked(case) == run_plain(case)


_LISTENS = """\
import os, sys
names = set()
environment = type(os.environ)
look_up = environment.__getitem__
environment.__getitem__ = lambda self, name: names.add(name) or look_up(self, name)
for module in sys.argv[1:]:
    __import__(module)
print(*(name for name in names if isinstance(name, str)))
"""
_LISTENS_IN_C = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
static char *listen(const char *function, const char *name) {
    char line[300];
    int file = open(FILE, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (strlen(name) < sizeof line) {
        memcpy(line, name, strlen(name));
        line[strlen(name)] = '\\n';
        if (write(file, line, strlen(name) + 1)) {}
    }
    close(file);
    return ((char *(*)(const char *))dlsym(RTLD_NEXT, function))(name);
}
char *getenv(const char *name) { return listen("getenv", name); }
char *secure_getenv(const char *name) { return listen("secure_getenv", name); }
"""
_PYTHONS_OWN = {"_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME", "__PYVENV_LAUNCHER__"}
"""Of where Python itself was built or started."""


@pytest.mark.slow
def test_every_variable_that_is_read_while_modules_load_is_known(tmp_path: Path) -> None:
    """A script that names one of them is started plainly; a new torch may read new ones."""
    modules = ["torch", "torch._dynamo", "remesh.elasticity.training.worker"]
    environment = dict(os.environ)
    if (compiler := shutil.which("cc")) is not None:
        (tmp_path / "listens.c").write_text(_LISTENS_IN_C)
        flags = ["-shared", "-fPIC", f'-DFILE="{tmp_path / "names"}"', "listens.c", "-o", "listens.so", "-ldl"]
        subprocess.run([compiler, *flags], cwd=tmp_path, check=True)
        environment["LD_PRELOAD"] = str(tmp_path / "listens.so")
    command = [sys.executable, "-c", _LISTENS, *modules]
    names = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    if compiler is not None:
        names += (tmp_path / "names").read_text().split()
    assert len(set(names)) > 100
    assert {name for name in names if not is_read_while_loading(name)} <= _PYTHONS_OWN


# --- what is no fork ---


def _told_instead_of_forking(case: Case, change: Callable[[ExitStack], object] = lambda stack: None) -> str:
    """What is said when a worker must be started plainly; ``change`` acts once all is loaded."""
    told: list[str] = []
    with (
        Preload(PreloadPlan(case.command, case.modules), case.environment, told.append) as preload,
        ExitStack() as undo,
    ):
        while preload.is_loading:
            time.sleep(0.01)
        change(undo)
        assert preload.fork(case.command, case.environment, [None, None]) is None
    assert not preload.is_loading
    (text,) = told
    return text


def test_a_module_that_leaves_something_behind_is_a_reason_to_start_plainly(tmp_path: Path) -> None:
    for name, text, reason in [
        (
            "left_thread",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            "1 threads",
        ),
        ("left_file", "file = open('/etc/hostname')", "/etc/hostname open"),
        ("left_child", "import subprocess\nchild = subprocess.Popen(['sleep', '0'])", "a process running"),
        ("left_tracer", "import sys\nsys.setprofile(lambda *_: None)", "a profiler"),
        ("raises", "raise ImportError('not today')", "ImportError: not today"),
        ("ends", "import os\nos._exit(9)", "exit code 9"),
        ("exits", "raise SystemExit(3)", "SystemExit: 3"),
    ]:
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / f"modules/{name}.py").write_text(text)
        case = _case(tmp_path, "print('never')", name, PYTHONPATH=str(tmp_path / "modules"))
        assert reason in _told_instead_of_forking(case), name


def test_a_module_beside_the_script_that_would_be_found_first_is_a_reason_to_start_plainly(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("HERE = True")
    case = _case(tmp_path, "import colorsys\nprint(colorsys.HERE)", "colorsys")
    assert "'colorsys', which was loaded, would be another module beside the script" in _told_instead_of_forking(case)
    # One that is loaded from there anyway is no other.
    _fork(_case(tmp_path, "import colorsys\nassert colorsys.HERE", "colorsys", PYTHONPATH=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_workers_of_an_agent_with_a_closed_stream_are_started_plainly(number: int, tmp_path: Path) -> None:
    """As that of a launcher which a daemon starts; the agent's own files may have its number then."""
    script, events = tmp_path / "script.py", tmp_path / "events"
    script.write_text("import sys, remesh\nopen(sys.argv[1], 'w').write(repr([sys.stdin, sys.stdout, sys.stderr]))")
    told = []
    for flags in ([], ["--no-preload"]):
        line = ["-m", "remesh.run", "--events-dir", str(events), *flags, str(script), str(tmp_path / "told")]
        command = f"{shlex.join([sys.executable, *line])} {number}>&-"
        subprocess.run(["sh", "-c", command], check=True, stdin=subprocess.DEVNULL, timeout=120)
        told.append((tmp_path / "told").read_text())
    assert told[0] == told[1]
    assert told[0][1:-1].split(", ")[number] == "None"
    assert '"forked": true' not in "".join(path.read_text() for path in events.iterdir())


def _lower_a_limit(undo: ExitStack) -> None:
    was = resource.getrlimit(resource.RLIMIT_CORE)
    undo.callback(resource.setrlimit, resource.RLIMIT_CORE, was)
    resource.setrlimit(resource.RLIMIT_CORE, (0, was[1]) if was[0] else (1, was[1]))


def _change_the_mask(undo: ExitStack) -> None:
    undo.callback(os.umask, os.umask(0o027))


def _go_elsewhere(undo: ExitStack) -> None:
    undo.callback(os.chdir, os.getcwd())
    os.chdir("/")


@pytest.mark.parametrize(
    ("change", "name"),
    [(_lower_a_limit, "limits"), (_change_the_mask, "Umask"), (_go_elsewhere, "folder")],
)
def test_what_the_agent_changed_meanwhile_is_a_reason_to_start_plainly(
    change: Callable[[ExitStack], object], name: str, tmp_path: Path
) -> None:
    case = _case(tmp_path, "print('never')")
    assert f"{name} of the agent is another" in _told_instead_of_forking(case, change)


def test_a_worker_ignores_the_signals_that_its_agent_ignores_when_it_is_started(tmp_path: Path) -> None:
    """The background job of a shell ignores SIGINT, until it handles it; under nohup it goes on to ignore SIGHUP."""
    case = _case(tmp_path, "import signal\nprint([signal.getsignal(one) for one in sorted(signal.valid_signals())])")
    with ExitStack() as undo:

        def handle(number: int, handler: object) -> None:
            undo.callback(signal.signal, number, signal.signal(number, handler))  # type: ignore[arg-type]

        def change() -> None:
            handle(signal.SIGINT, lambda *_: None)
            handle(signal.SIGUSR1, signal.SIG_DFL)
            handle(signal.SIGUSR2, signal.SIG_IGN)

        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            handle(number, signal.SIG_IGN)
        forked = run_forked(case, change)
        assert forked == run_plain(case)
    assert forked.output.startswith("[<Handlers.SIG_IGN: 1>, <built-in function default_int_handler>, "), forked.output


def test_another_variable_than_those_of_the_rank_is_a_reason_to_start_plainly(tmp_path: Path) -> None:
    case = _case(tmp_path, "print('never')", MINE="1")
    told: list[str] = []
    with Preload(PreloadPlan(case.command, ()), case.environment, told.append) as preload:
        assert preload.fork(case.command, {**case.environment, "MINE": "2"}, [None, None]) is None
        assert preload.fork([*case.command, "more"], case.environment, [None, None]) is None
        process = preload.fork(case.command, {**case.environment, "RANK": "5"}, [None, None])
    assert process is not None
    assert process.wait(LIMIT_S) == 0
    assert told == ["a worker is started without the preloaded process: MINE is another than when it was started"]


def test_a_python_that_does_not_stop_before_the_script_runs_nothing(tmp_path: Path) -> None:
    """As one that a wrapper starts without its variables."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    case = _case(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    told: list[str] = []
    with Preload(PreloadPlan((str(wrapper), "-u", *case.arguments), ()), case.environment, told.append) as preload:
        assert preload.fork([str(wrapper), "-u", *case.arguments], case.environment, [None, None]) is None
    assert "exit code 1" in told[0]
    assert not (tmp_path / "ran").exists()


# --- under an agent ---

_SCRIPT = """\
import ctypes, json, os, signal, sys, time
from pathlib import Path
import remesh
folder = Path(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: to end with the agent
told = {"pid": os.getpid(), "parent": os.getppid(), **os.environ}
(folder / f".{os.getpid()}").write_text(json.dumps(told))
(folder / f".{os.getpid()}").rename(folder / f"{time.time_ns()}-{os.getpid()}.json")
while not (folder / "end").exists():
    time.sleep(0.02)
"""


def _start(agents: Agents) -> tuple[int, set[int]]:
    """An agent with two workers that run: its process, and that of the children that are no workers."""
    script = agents.folder / "script.py"
    script.write_text(_SCRIPT)
    agents.start("--nproc-per-node", "2", "--max-restarts", "3", script=str(script))
    agent = agents.agents[0].pid
    workers = {worker["pid"] for worker in agents.wait_for_workers(2)}
    return agent, set(children_of(agent)) - workers


def _end(agents: Agents) -> str:
    (agents.told / "end").touch()
    code, output = agents.end()
    assert code == 0, output
    return output


def test_workers_are_children_of_the_agent_and_the_death_of_who_forks_them_costs_a_line(tmp_path: Path) -> None:
    with Agents(tmp_path) as agents:
        agent, others = _start(agents)
        (preloaded,) = others
        assert {worker["parent"] for worker in agents.workers()} == {agent}
        # A worker that is killed is noticed as ever, and nothing of it stays.
        os.kill(agents.workers()[0]["pid"], signal.SIGKILL)
        workers = agents.wait_for_workers(4)[2:]
        assert set(children_of(agent)) == {preloaded, *(worker["pid"] for worker in workers)}
        os.kill(preloaded, signal.SIGKILL)
        os.kill(workers[0]["pid"], signal.SIGKILL)
        workers = agents.wait_for_workers(6)[4:]
        assert set(children_of(agent)) == {worker["pid"] for worker in workers}, agents.output(0)
        output = _end(agents)
        assert "killed by signal 9; all workers" in output
        assert output.count("the preloaded process is not used, workers load their modules by themselves") == 1


@pytest.mark.slow
def test_the_preloaded_process_ends_with_its_agent(tmp_path: Path) -> None:
    with Agents(tmp_path) as agents:
        agent, (preloaded,) = _start(agents)
        os.kill(agent, signal.SIGKILL)
        agents.agents[0].wait(TIMEOUT_S)
        # So do workers that asked the kernel for it, for the agent is their parent.
        for pid in (preloaded, *(worker["pid"] for worker in agents.workers())):
            while start_of(pid) is not None:
                time.sleep(0.02)


@pytest.mark.slow
def test_an_agent_that_is_killed_while_modules_load_leaves_nothing(tmp_path: Path) -> None:
    with Agents(tmp_path) as agents:
        script = tmp_path / "script.py"
        script.write_text(_SCRIPT)
        agents.start("--nproc-per-node", "2", script=str(script))
        agent = agents.agents[0]
        while not (children := children_of(agent.pid)):
            time.sleep(0.02)
        agent.kill()
        _, output = agents.end()
        assert not output
        while start_of(children[0]) is not None:
            time.sleep(0.02)
        assert not agents.workers()
