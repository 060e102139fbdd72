"""Jobs of torch.distributed under `remesh torch`, beside the same programs under torch alone.

``python -m tests.procs.carried.torch_jobs SCRIPT --ranks 2 --steps 100 --stops 20 [--seed N] [ARGUMENTS]`` runs a
program of ``torch_programs`` alone, then stops it at random moments of its life and restarts it on other ports and
interfaces. With ``--every SECONDS`` it goes on instead, with a checkpoint each so many seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from remesh.carried.images import examine_machine
from remesh.carried.rounds.job_folder import JobFolder, rank_name
from remesh.wire.free_ports import free_port
from tests.procs.forked_programs import ALONE, end, start

PROGRAMS = Path(__file__).parent / "torch_programs"
REMESH = (sys.executable, "-m", "remesh", "torch")
PATIENCE_S = 600.0
NEEDS_IMAGES = pytest.mark.skipif(
    any(each.needed and not each.good for each in examine_machine()),
    reason="process images need what is missing here",
)
_SIOCGIFADDR = 0x8915


def run_natively(script: str, size: int, *arguments: str) -> list[str]:
    """What the program prints when torch's own groups carry it."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # By these Lightning and Accelerate know that torchrun has started them.
    common |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(size)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs, errors = [folder / f"{rank}.out" for rank in range(size)], folder / "errors"
        ranks = [
            start([str(PROGRAMS / script), *arguments], folder, {**ALONE, **common, **_place(rank)}, output, errors)
            for rank, output in enumerate(outputs)
        ]
        assert end(ranks) == [0] * size, errors.read_text()
        return sorted(line for output in outputs for line in output.read_text().splitlines())


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


class TorchJob:
    """A job under `remesh torch`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.leader: subprocess.Popen[str] | None = None

    def run(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        how = ("--nproc-per-node", str(self.size), "--job", str(self.folder), "--interface", "lo", *options)
        self._start("run", *how, str(PROGRAMS / script), *arguments)

    def restart(self, *options: str) -> None:
        self._start("restart", str(self.folder), *options)

    def _start(self, *words: str) -> None:
        self.leader = subprocess.Popen(
            [*REMESH, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder.parent
        )

    def end(self) -> tuple[int, str]:
        """Status of its leader, and what that said."""
        assert self.leader is not None
        said = self.leader.communicate(timeout=PATIENCE_S)[1]
        return self.leader.returncode, said

    def stop(self) -> None:
        """A checkpoint that stops, asked for by a signal: a command would start for longer than some programs run."""
        self.ask_to_stop()
        status, said = self.end()
        assert (status, self.state()) == (0, "stopped"), said

    def ask_to_stop(self, *, once: str = "running") -> None:
        """Send the signal once the job is in this state: printed lines may be an earlier stay's, or one rank's."""
        self._wait_until(lambda: self.state() == once)
        assert self.leader is not None
        self.leader.send_signal(signal.SIGTERM)

    def checkpoint(self) -> str:
        """What a command that asks for a checkpoint says, which goes on or is given up."""
        command = [*REMESH, "checkpoint", str(self.folder)]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        return asked.stdout + asked.stderr

    def finish(self) -> list[str]:
        status, said = self.end()
        assert (status, self.state()) == (0, "finished"), said
        return sorted(self.lines())

    def state(self) -> str:
        """ "" while its folder is being made."""
        return JobFolder(self.folder).read_state().state if (self.folder / "state.json").exists() else ""

    def lines(self) -> list[str]:
        paths = [self.folder / "logs" / f"{rank_name(rank)}.out" for rank in range(self.size)]
        return [line for path in paths if path.exists() for line in path.read_text().splitlines()]

    def wait_for(self, num_lines: int) -> None:
        """Until it has printed so many lines."""
        self._wait_until(lambda: len(self.lines()) >= num_lines)

    def wait_for_line(self, line: str) -> None:
        """Until it has printed this one."""
        self._wait_until(lambda: line in self.lines())

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.leader is not None
            assert self.leader.poll() is None, self.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def close(self) -> None:
        if self.leader is not None:
            with self.leader:  # closes its pipe, also when it ended by itself
                # Its keepers end when it is gone, however it ends.
                self.leader.kill()


def stop_and_compare(
    job: TorchJob, size: int, script: str, steps: int, stops: int, *more: str, chance: random.Random | None = None
) -> None:
    """Stopped at random moments and restarted, it prints what it prints when nobody touches it.

    A moment is a number of lines that have been printed, 0 while it starts, and up to a tenth of a second more. What
    is left after the last one is for a busy machine, on which a program may be through before it hears of a stop.
    """
    expected = run_natively(script, size, str(steps), *more)
    chance = chance or random.Random(script)
    interfaces = itertools.cycle(_interfaces())
    job.size = size
    job.run(script, str(steps), *more)
    for number, moment in enumerate(sorted(chance.sample(range(steps * 3 // 4), stops)), 1):
        job.wait_for(moment)
        time.sleep(chance.random() * 0.1)
        job.stop()
        job.restart("--interface", next(interfaces))
        print(f"stop {number} of {stops} after {moment} lines: restarted", file=sys.stderr, flush=True)
    found = job.finish()
    assert found == expected, sorted({*found} ^ {*expected})


def go_on_and_compare(job: TorchJob, size: int, script: str, steps: int, every_s: float, *more: str) -> int:
    """With one checkpoint after the other it prints what it prints when nobody touches it; returns how many it took."""
    expected = run_natively(script, size, str(steps), *more)
    job.size = size
    job.run(script, str(steps), *more, options=("--every", str(every_s), "--keep", "2"))
    found = job.finish()
    assert found == expected, sorted({*found} ^ {*expected})
    return max((each.number for each in JobFolder(job.folder).checkpoints()), default=0)


def _interfaces() -> list[str]:
    """Those that have an address of IPv4."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            found.append(name)
    return found


def main(arguments: Sequence[str]) -> None:
    """Stop one program again and again, or take one checkpoint of it after the other."""
    parser = argparse.ArgumentParser(prog="tests.procs.carried.torch_jobs")
    parser.add_argument("script")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float)
    options, more = parser.parse_known_args(arguments)
    program = (options.ranks, options.script, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        job = TorchJob(Path(folder) / "job", options.ranks)
        try:
            if options.every is not None:
                done = f"{go_on_and_compare(job, *program, options.every, *more)} checkpoints"
            else:
                stop_and_compare(job, *program, options.stops, *more, chance=random.Random(options.seed))
                done = f"{options.stops} of {options.stops} stops"
        finally:
            job.close()
    print(f"{options.script}: {done}, all bits equal")


if __name__ == "__main__":
    main(sys.argv[1:])
