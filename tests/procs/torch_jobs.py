"""Jobs of torch.distributed under `remesh torch`, beside the same programs under torch alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from remesh.comm.free_ports import free_port
from remesh.rounds.job_folder import JobFolder, rank_name

PROGRAMS = Path(__file__).parent / "torch_programs"
REMESH = (sys.executable, "-m", "remesh", "torch")
PATIENCE_S = 300.0


def run_natively(script: str, size: int, *arguments: str) -> list[str]:
    """What the program prints when torch's own groups carry it."""
    port = free_port()
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / script, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return sorted(line for text in printed for line in text.splitlines())


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
        assert self.leader is not None
        # What an earlier stay printed says nothing of this one, which hears signals once it runs.
        deadline_s = time.monotonic() + PATIENCE_S
        while self.state() != "running":
            assert self.leader.poll() is None, self.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        self.leader.send_signal(signal.SIGTERM)
        status, said = self.end()
        assert (status, self.state()) == (0, "stopped"), said

    def finish(self) -> list[str]:
        status, said = self.end()
        assert (status, self.state()) == (0, "finished"), said
        return sorted(self.lines())

    def state(self) -> str:
        return JobFolder(self.folder).read_state().state

    def lines(self) -> list[str]:
        paths = [self.folder / "logs" / f"{rank_name(rank)}.out" for rank in range(self.size)]
        return [line for path in paths if path.exists() for line in path.read_text().splitlines()]

    def wait_for(self, num_lines: int) -> None:
        """Until it has printed so many lines."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.lines()) < num_lines:
            assert self.leader is not None
            assert self.leader.poll() is None, self.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def close(self) -> None:
        if self.leader is not None and self.leader.poll() is None:
            # Its keepers end when it is gone, however it ends.
            self.leader.kill()
            self.leader.communicate()


def stop_and_compare(job: TorchJob, size: int, script: str, steps: int, stops: int, *more: str) -> None:
    """Stopped at random moments and restarted, it prints what it prints when nobody touches it."""
    expected = run_natively(script, size, str(steps), *more)
    chance = random.Random(script)
    job.size = size
    job.run(script, str(steps), *more)
    for moment in sorted(chance.sample(range(1, steps // 2), stops)):
        job.wait_for(moment)
        time.sleep(chance.random() * 0.1)
        job.stop()
        job.restart()
    assert job.finish() == expected
