"""Output of a rank's program: files of the job, copied to the launcher's streams."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from remesh.carried.rounds.job_folder import rank_name
from remesh.foundation.errors import StorageError

_COPY_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Output:
    """A file that the program writes, copied to a stream of the launcher."""

    path: Path
    stream: IO[bytes]
    copied: int = 0
    """Number of bytes that were copied."""

    def cut(self, num_bytes: int) -> None:
        """Cut the file to so many bytes at most; they were shown by an earlier run of the job."""
        os.truncate(self.path, min(num_bytes, self.path.stat().st_size))
        self.copied = self.path.stat().st_size

    def copy(self) -> None:
        """Copy the new bytes; `StorageError` if the job's folder is not there any more."""
        try:
            if self.path.stat().st_size <= self.copied:
                return
        except OSError as error:
            raise StorageError(
                f"showing what the program wrote to {self.path}: {error.strerror}; leave the folder of a job where it "
                "is as long as the job runs"
            ) from error
        with self.path.open("rb") as file:
            file.seek(self.copied)
            while data := file.read(_COPY_BYTES):
                self.stream.write(data)
                self.copied += len(data)
        self.stream.flush()


def open_outputs(logs: Path, rank: int) -> list[Output]:
    """Open the output files of a rank, created if missing. Their present content was shown before the last restart.

    Called before the program runs: what it writes first is to be shown, too.
    """
    outputs = []
    for kind, stream in (("out", sys.stdout.buffer), ("err", sys.stderr.buffer)):
        path = logs / f"{rank_name(rank)}.{kind}"
        path.touch(mode=0o600)
        outputs.append(Output(path, stream, copied=path.stat().st_size))
    return outputs
