"""Small scripts, chosen at random, that tell what a process looks like; started by `subprocess`, or forked.

What they tell depends on how Python starts a script, and must not depend on which of the two did.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remesh.elasticity.node.preload import ForkedProcess, Preload, PreloadPlan

LIMIT_S: Final = 120.0
HEAD: Final = """\
import asyncio, atexit, codecs, contextlib, faulthandler, gc, inspect, locale, logging, multiprocessing, os, pickle
import resource, signal, subprocess, sys, tempfile, threading, time, traceback, warnings
{imports}

class Thing:
    def __init__(self, value):
        self.value = value

def square(number):
    return number * number, __name__

def deep(depth):
    return deep(depth - 1) if depth else 1 / depth

"""

TELLING: Final = {
    "arguments": "print(sys.argv, sys.orig_argv, sys.executable, sys.flags, sys.warnoptions, sys._xoptions)",
    "path": "print(vars(sys)['pa' 'th'], sorted(k for k in sys.path_importer_cache if 'preload_site' in k))",
    "main": "print([(k, repr(v)) for k, v in globals().items() if k.startswith('__') and k != '__builtins__'])",
    "module": "print(sys.modules['__main__'].__dict__ is globals(), 'sitecustomize' in sys.modules)",
    "environment": "print(list(os.environ.items()))",
    "signals": "print([(int(n), signal.getsignal(n)) for n in signal.valid_signals()])",
    "masks": "print([line for line in open('/proc/self/status') if line[:4] in "
    "('SigB', 'SigI', 'SigC', 'Umas', 'CapE')])",
    "folder": "print(os.getcwd()); mask = os.umask(0); os.umask(mask); print(mask)",
    "files": "print([(n, oct(os.stat(f'/dev/fd/{n}').st_mode)) for n in range(200) if os.path.exists(f'/dev/fd/{n}')])",
    "inheritance": "print([os.get_inheritable(n) for n in (0, 1, 2)])",
    "streams": "print([(repr(s), s.errors, s.newlines, s.line_buffering, s.write_through, repr(s.buffer)) for s in "
    "(sys.stdin, sys.stdout, sys.stderr)]); print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__)",
    "seekable": "print([(s.seekable(), s.isatty(), s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)])",
    "input": "print(repr(sys.stdin.readline()), repr(sys.stdin.read()))",
    "bytes": "sys.stdout.buffer.write(b'raw\\n'); os.write(1, b'rawer\\n'); print('cooked', end='')",
    "family": "print(os.getsid(0) == os.getpid() == os.getpgid(0), os.getppid() == int(sys.argv[1]))",
    # The kernel takes a moment for those that were joined.
    "threads": "end_s = time.monotonic() + 10\n"
    "while len(os.listdir('/proc/self/task')) > threading.active_count() and time.monotonic() < end_s: "
    "time.sleep(0.01)\n"
    "print(threading.enumerate()[0].name, threading.active_count(), len(os.listdir('/proc/self/task')), "
    "threading.get_native_id() == os.getpid() == threading.main_thread().native_id)",
    "death": "import ctypes; number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(number)); print(number)",
    "ids": "print(threading.main_thread().native_id == os.getpid())",
    "age": "born = int(open('/proc/self/stat').read().rsplit(')')[1].split()[19]) / os.sysconf('SC_CLK_TCK')\n"
    "began = logging._startTime / (1e9 if logging._startTime > 1e12 else 1) - (time.time() - time.monotonic())\n"
    "print(began > born - 0.1)",
    "registered": "print(sys.excepthook, sys.unraisablehook, threading.excepthook, sys.breakpointhook); "
    "print(atexit._ncallbacks(), sys.meta_path, sys.getdlopenflags(), sys.get_int_max_str_digits())",
    "loggers": "print([(name, each.level, each.propagate, each.handlers) for name, each in "
    "sorted(logging.root.manager.loggerDict.items()) if isinstance(each, logging.Logger)], logging.root.handlers)",
    "start method": "print(multiprocessing.get_start_method(True)); multiprocessing.set_start_method('spawn')",
    "descriptors": "import fcntl; print([(fcntl.fcntl(n, fcntl.F_GETFL), fcntl.fcntl(n, fcntl.F_GETFD)) "
    "for n in (0, 1, 2)])",
    "children": "print(len(open(f'/proc/self/task/{os.getpid()}/children').read().split()))",
    "warnings": "print(warnings.filters); warnings.warn('beware'); warnings.warn('old', DeprecationWarning)",
    "locale": "print(locale.getlocale(), locale.getpreferredencoding(), sys.getfilesystemencoding(), time.tzname)",
    "source": "print(len(inspect.getsource(sys.modules['__main__'])), inspect.getsource(square))",
    "stack": "print(len(inspect.stack()), sys._getframe().f_back); traceback.print_stack()",
    "caught": "try: deep(3)\nexcept ZeroDivisionError: traceback.print_exc()",
    "dump": "faulthandler.dump_traceback(sys.stderr); print(faulthandler.is_enabled())",
    "pickle": "print(pickle.loads(pickle.dumps(Thing(5))).value, pickle.dumps(Thing), Thing.__module__)",
    "collector": "print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks))",
    "interpreter": "print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.excepthook is sys.__excepthook__, "
    "sys.displayhook is sys.__displayhook__, len(sys.meta_path), len(sys.path_hooks)); print(sys.gettrace(), "
    "sys.getprofile())",
    "limits": "print([resource.getrlimit(n) for n in range(16)], os.nice(0), os.sched_getaffinity(0))",
    "command": "print(open('/proc/self/cmdline').read().split('\\0'), open('/proc/self/comm').read())",
    "logging": "logging.warning('a word'); print(logging.root.handlers, logging.root.level)",
    "asyncio": "print(asyncio.run(asyncio.sleep(0, 'slept')))",
    "codecs": "print(codecs.lookup('latin-1').name, 'é'.encode('idna'))",
    "temporary": "print(tempfile.gettempdir())",
    "program": "print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, vars(sys)[\"pa\" \"th\"])'], "
    "capture_output=True, text=True))",
    "shell": "subprocess.run('env | sort; ulimit -a; echo $PPID >/dev/null', shell=True)",
    "fork": "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(square, range(3)))",
    "spawn": "if __name__ == '__main__':\n"
    " child = multiprocessing.get_context('spawn').Process(target=square, args=(3,), name='child')\n"
    " child.start(); child.join(); print(child.exitcode)",
    "forkserver": "if __name__ == '__main__':\n"
    " child = multiprocessing.get_context('forkserver').Process(target=square, args=(3,), name='child')\n"
    " child.start(); child.join(); print(child.exitcode)",
    "thread": "thread = threading.Thread(target=deep, args=(1,), name='T'); thread.start(); thread.join()",
    "handler": "signal.signal(signal.SIGUSR1, lambda *_: print('usr1')); os.kill(os.getpid(), signal.SIGUSR1)",
    "alarm": "print(signal.getitimer(signal.ITIMER_REAL), signal.set_wakeup_fd(-1))",
    "at exit": "atexit.register(print, 'at exit'); atexit.register(lambda: deep(0))",
    "names": "print(sorted(name for name in dir() if not name.startswith('_')))",
    "local module": "import beside; print(beside.__file__, beside.VALUE)",
}
"""Name -> statements that tell, the same of every process that runs them."""

ENDING: Final = (
    *("pass", "sys.exit()", "sys.exit(7)", "sys.exit('no more')", "sys.exit(300)", "raise SystemExit(-1)"),
    *("deep(2)", "raise KeyboardInterrupt", "os._exit(5)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"),
    *("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"),
    *("signal.raise_signal(signal.SIGPIPE); print('survived')", "sys.stdout.close()", "exit(3)"),
    *("exec(compile('1 +', 'nowhere', 'exec'))", "sys.excepthook = lambda *_: print('hooked'); deep(1)"),
    *("raise ExceptionGroup('two', [ValueError(1), ValueError(2)])", "raise ValueError('a') from KeyError('b')"),
    "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A script in a folder, and how it is started."""

    folder: Path
    arguments: tuple[str, ...]
    """After ``python -u``."""
    environment: Mapping[str, str]
    stdin: str
    modules: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-u", *self.arguments)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, and what it said, without numbers that differ from start to start."""

    code: int
    output: str
    errors: str


def make_case(seed: int, folder: Path, modules: Sequence[str] = ("numpy",), telling: Sequence[str] = ()) -> Case:
    """The case of a seed; it tells what is named, and something more."""
    chance = random.Random(seed)
    told = [*telling, *chance.sample(sorted(TELLING), chance.randint(3, 8))]
    # Only a file that guards its own start may be imported again by a child.
    body = "\n".join([*(TELLING[name] for name in told), chance.choice(ENDING)])
    imports = "".join(f"import {name}\n" for name in modules)
    text = f"{HEAD.format(imports=imports)}if __name__ == '__main__':\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    place = folder / chance.choice(["here", "with space", "ünïcode"])
    (place / "package").mkdir(parents=True)
    for path in ("script.py", "package/__main__.py", "package/__init__.py", "package/part.py"):
        (place / path).write_text("" if path.endswith("__init__.py") else text)
    for path in ("beside.py", "package/beside.py"):
        (place / path).write_text(f"VALUE = {seed}")
    (place / "link.py").symlink_to("package/part.py")
    names = [("script.py",), (str(place / "script.py"),), ("./package/part.py",), ("link.py",), ("-m", "package.part")]
    script = chance.choice([*names, ("-m", "package"), ("-m", "script")])
    more = chance.sample(["-c", "--flag=1", "", "two words", "ü", "$HOME", "-"], chance.randint(0, 3))
    return Case(
        folder=place,
        arguments=(*script, str(os.getpid()), *more),
        environment=_environment(chance),
        stdin=chance.choice(["", "one line\n", "two\nlines"]),
        modules=tuple(modules),
    )


def _environment(chance: random.Random) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Sets are shown in the order of their hashes.
    environment |= {"PYTHONHASHSEED": "1", "RANK": str(chance.randrange(8)), "LOCAL_RANK": "0"}
    for name, values in {
        "LC_ALL": ("C", "C.UTF-8", "POSIX"),
        "PYTHONWARNINGS": ("default", "ignore::DeprecationWarning"),
        "PYTHONPATH": ("/nowhere", "/nowhere:/elsewhere", "", "relative"),
        "PYTHONFAULTHANDLER": ("1",),
        "PYTHONIOENCODING": ("latin-1:replace", "utf-8"),
        "PYTHONUTF8": ("1", "0"),
        "PYTHONSAFEPATH": ("1",),
        "PYTHONDEVMODE": ("1",),
        "TZ": ("UTC", "Asia/Tokyo"),
        "MINE": ("ü", "", "a\nb"),
    }.items():
        environment.pop(name, None)
        if chance.random() < 0.3:
            environment[name] = chance.choice(values)
    # Under several of them not even the package is found.
    if "PYTHONSAFEPATH" in environment:
        environment["PYTHONPATH"] = "."
    return environment


def run_plain(case: Case) -> Ended:
    """Start it as torch's process contexts do."""
    with _streams(case) as (stdin, stdout, stderr):
        process = subprocess.Popen(
            case.command,
            cwd=case.folder,
            env=case.environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        return _end(case, process)


def run_forked(case: Case, change: Callable[[], object] = lambda: None) -> Ended:
    """Fork it of a process that has loaded its modules; ``change`` acts before. AssertionError if that is refused."""
    told: list[str] = []
    with _streams(case) as (stdin, stdout, stderr), _inherited(case.folder, stdin):
        with Preload(PreloadPlan(case.command, case.modules), case.environment, told.append) as preload:
            while preload.is_loading:
                time.sleep(0.01)
            change()
            process = preload.fork(case.command, case.environment, [stdout, stderr])
        assert process is not None, told
        return _end(case, process)


@contextmanager
def _inherited(folder: Path, stdin: int) -> Iterator[None]:
    """Within it, this process is in this folder and reads this file, as an agent whose workers do."""
    was, kept = Path.cwd(), os.dup(0)
    os.chdir(folder)
    os.dup2(stdin, 0)
    try:
        yield
    finally:
        os.chdir(was)
        os.dup2(kept, 0)
        os.close(kept)


@contextmanager
def _streams(case: Case) -> Iterator[tuple[int, object, object]]:
    source = case.folder / "stdin"
    source.write_text(case.stdin)
    with source.open() as stdin, open(case.folder / "out", "w") as out, open(case.folder / "err", "w") as err:
        yield stdin.fileno(), out, err


def _end(case: Case, process: subprocess.Popen[bytes] | ForkedProcess) -> Ended:
    code = process.wait(LIMIT_S)
    output, errors = ((case.folder / name).read_text(errors="backslashreplace") for name in ("out", "err"))
    return Ended(code, _without_numbers(output, process.pid), _without_numbers(errors, process.pid))


def _without_numbers(text: str, pid: int) -> str:
    text = re.sub(rf"\b{pid}\b", "PID", text)
    return re.sub(r"0x[0-9a-f]+|\bForkPoolWorker-\d+|pid=\d+", "NUMBER", text)
