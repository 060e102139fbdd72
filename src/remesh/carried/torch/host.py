"""``python -m remesh.carried.torch.host INDEX JOB --hosts HOSTS ...``: starts the keepers of one host, waits for them.

It reports what the host lacks, if that would make all keepers fail. When one keeper fails, the others have some time
to hear of it, and are then ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from remesh.carried.hosts.host_list import Host, assign_slots, count_ranks, parse_hosts
from remesh.carried.rounds.job_folder import JobFolder
from remesh.foundation.errors import ConfigError, Error

_POLL_S: Final = 0.05
_KEEPERS_GRACE_S: Final = 10.0
"""After the failure of one keeper the others have this long to end by themselves."""


def main(arguments: Sequence[str]) -> int:
    """Start the keepers and wait; returns the exit status of the process."""
    parser = argparse.ArgumentParser(prog="remesh.carried.torch.host")
    parser.add_argument("job", type=Path)
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--checkpoint", type=int)
    index, for_keepers = int(arguments[0]), arguments[1:]
    options, _ = parser.parse_known_args(for_keepers)
    hosts = parse_hosts(options.hosts, count_ranks(options.hosts, 1))
    try:
        _check_folder(options.job, options.checkpoint, hosts[index])
    except Error as error:
        sys.stderr.write(f"remesh: {error}\n")
        return 1
    ranks = [slot.rank for slot in assign_slots(hosts) if slot.host_index == index]
    command = [sys.executable, "-m", "remesh.carried.torch.rank_keeper", *for_keepers]
    keepers = [subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.DEVNULL) for rank in ranks]
    _wait(keepers)
    for rank, keeper in zip(ranks, keepers, strict=True):
        if keeper.returncode < 0:
            sys.stderr.write(f"remesh: the keeper of rank {rank} was killed by signal {-keeper.returncode}\n")
    return int(any(keeper.returncode for keeper in keepers))


def _check_folder(job: Path, checkpoint: int | None, host: Host) -> None:
    """Raise `ConfigError` unless this host sees the job and its images, as the leader's does."""
    folder = JobFolder(job)
    places = [folder.path / "job.json"]
    if checkpoint is not None:
        places.append(folder.images / f"{checkpoint:06d}" / "manifest.json")
    for place in places:
        if not place.is_file():
            raise ConfigError(
                f"starting ranks on host {host.name}: there is no {place} on it; keep the job in a folder of a file "
                "system that all its hosts share, under one path"
            )


def _wait(keepers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all keepers have ended."""
    until_s = None
    while any(keeper.poll() is None for keeper in keepers):
        has_failed = any(keeper.returncode for keeper in keepers)
        if has_failed and until_s is None:
            until_s = time.monotonic() + _KEEPERS_GRACE_S
        if until_s is not None and time.monotonic() >= until_s:
            for keeper in keepers:
                keeper.kill()
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
