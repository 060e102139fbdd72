"""Job folder on disk: the request, the coordinator's address, logs, and checkpoints.

    job.json                what was asked: program, ranks, environment; never changes
    token                   32 bytes that prove a right to talk to the coordinator
    state.json              how the job stands, and where its coordinator listens
    logs/                   rank-0000.out, rank-0000.err, events.log
    images/000001/          a checkpoint: rank-0000/ ... and manifest.json
    images/000002.part/     one that is being written, was given up, or is being removed

The folder stands on a file system that all hosts share, and only its owner can enter it: images and the environment
hold secrets. A checkpoint exists once its folder has its final name: the manifest is written last, everything is
flushed, then the folder is renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar, get_type_hints

from remesh.foundation.errors import ConfigError, FormatError, StorageError
from remesh.foundation.files import flush, replace_whole, write_new
from remesh.foundation.options import check_option
from remesh.foundation.retention import KeepLast, Saved, decide_kept
from remesh.wire.token import Token

T = TypeVar("T")
_VERSION: Final = 1
_NUMBER: Final = re.compile(r"\d{6}")
_PART: Final = ".part"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The request of the user; the same for every start of the job."""

    argv: tuple[str, ...]
    """The program and its arguments, not empty."""
    num_ranks: int
    """At least 1."""
    folder: str
    """Working directory of the program, absolute."""
    environment: Mapping[str, str]
    """The program's environment, as its user has it."""
    input_file: str = ""
    """The file that rank 0 reads as its standard input, absolute; "" for nothing. The others read nothing."""
    input_position: int = 0
    """Number of bytes of it that were read before."""
    kind: str = "mpi"
    """The kind of programs: the verb that the job belongs to."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("describing a job: no program was named; add one, as in `run -n 4 app.py`")
        if self.num_ranks < 1:
            raise ConfigError(f"describing a job: {self.num_ranks} ranks, expected at least 1; give -n")


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job."""

    state: str
    """``starting``, ``running``, ``finished``, ``stopped`` (by a checkpoint) or ``failed``."""
    cause: str = ""
    """The reason for the last change, for people."""
    addresses: tuple[tuple[str, int], ...] = ()
    """The addresses where the coordinator listens, while it runs."""
    pid: int = 0
    """The process id of the coordinator, on ``host``."""
    host: str = ""
    launch: Mapping[str, Any] | None = None
    """The last launch of the job, in the words of its launcher."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint."""

    number: int
    path: Path
    manifest: Mapping[str, Any]
    """The manifest; empty if it is damaged."""
    problem: str = ""
    """The reason why it cannot be used; empty if it can."""

    def rank_folder(self, rank: int) -> Path:
        """The folder of a rank's part."""
        return self.path / rank_name(rank)


class JobFolder:
    """The folder of one job; every method reads or writes at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, spec: JobSpec) -> Self:
        """Make the folder; `StorageError` if there is one."""
        try:
            path.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise StorageError(f"making job folder {path}: {error.strerror}; name another one with --job") from error
        made = cls(path)
        try:
            made._fill(spec)
        except (OSError, StorageError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise StorageError(
                f"making job folder {path}: {error}; it was removed; name another one with --job"
            ) from error
        return made

    def _fill(self, spec: JobSpec) -> None:
        # Token, environment and images are secrets, and jobs stand where their user works, often in a repository.
        (self.path / ".gitignore").write_text("*\n")
        self.logs.mkdir()
        self.images.mkdir()
        write_new(self.path / "token", os.urandom(32))
        write_whole(self.path / "job.json", _to_json({"version": _VERSION, **asdict(spec)}))
        self.write_state(JobState("starting"))

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """Hold the lock of the one process that leads the job; `ConfigError` if another does.

        The kernel lets go of the lock however its holder ends. Where a file system has no locks nothing is checked.
        """
        with (self.path / "job.json").open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self.led_by_another() from error
            except OSError:
                pass
            yield

    def led_by_another(self) -> ConfigError:
        """The error for a process that would be the second to lead the job."""
        state = self.read_state()
        who = f"process {state.pid} on {state.host} leads it" if state.pid else "another process is about to lead it"
        return ConfigError(
            f"leading job {self.name}: {who}, expected no leader; stop it first, as with `checkpoint --stop`"
        )

    @classmethod
    def find(cls, text: str, root: Path) -> Self:
        """Find the job of this path, or of this name under ``root``."""
        for path in (Path(text), root / text):
            if (path / "job.json").is_file():
                return cls(path.absolute())
        raise ConfigError(
            f"looking for job {text!r}: neither {text} nor {root / text} holds a job.json; the verb `ls` lists the jobs"
        )

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return self.path.name

    @property
    def logs(self) -> Path:
        """The folder of logs."""
        return self.path / "logs"

    @property
    def images(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "images"

    def refuse_other_kind(self, kind: str) -> None:
        """Raise `ConfigError` if another verb made the job."""
        if (found := self.read_spec().kind) != kind:
            raise ConfigError(
                f"continuing job {self.name}: it was made by `remesh {found} run`, expected {kind}; continue it "
                f"by `remesh {found} restart`"
            )

    def read_spec(self) -> JobSpec:
        """Read the request of the user."""
        path = self.path / "job.json"
        value = _read_json(path)
        if value.pop("version", None) != _VERSION:
            raise FormatError(
                "version", f"reading {path}: another version of Remesh made it; restart it with that version"
            )
        with _as_damaged(path):
            return _checked(JobSpec(**{**value, "argv": _tuple_of(value["argv"])}))

    def read_token(self) -> Token:
        """Read the secret of the job; `StorageError` for any user but its owner."""
        try:
            return Token("", (self.path / "token").read_bytes())
        except OSError as error:
            raise StorageError(
                f"reading the token of job {self.name}: {error.strerror}; only the owner of the job can read it"
            ) from error

    def read_state(self) -> JobState:
        """Read the state of the job, as its coordinator last wrote it."""
        path = self.path / "state.json"
        value = _read_json(path)
        with _as_damaged(path):
            addresses = tuple(map(_tuple_of, _tuple_of(value["addresses"])))
            return _checked(JobState(**{**value, "addresses": addresses}))

    def find_state(self) -> JobState:
        """Find the state of the job, also if its coordinator was killed, which leads it no more."""
        state = self.read_state()
        # One that was just made is not led yet, and has no coordinator.
        if state.state not in ("starting", "running") or not state.pid or self._is_led() or self.read_state() != state:
            return state
        cause = f"its coordinator, process {state.pid} on {state.host}, is gone"
        return replace(state, state="failed", cause=cause, addresses=(), pid=0)

    def _is_led(self) -> bool:
        """Whether a process leads the job; also where that cannot be found out."""
        with (self.path / "job.json").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def write_state(self, state: JobState) -> None:
        """Replace the state."""
        write_whole(self.path / "state.json", _to_json(asdict(state)))

    def change_state(self, state: str, cause: str) -> None:
        """Note how the job stands now; it is no longer reachable unless it runs."""
        now = replace(self.read_state(), state=state, cause=cause)
        self.write_state(now if state == "running" else replace(now, addresses=(), pid=0))

    def log_event(self, text: str) -> None:
        """Add a line with the time to ``logs/events.log``; a disk that has no room for it must not end the job."""
        path = self.logs / "events.log"
        try:
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            _warn("writing %s: %s; the line was: %s", path, error.strerror, text)

    # --- checkpoints ---

    def checkpoints(self) -> list[Checkpoint]:
        """The committed checkpoints, oldest first; a damaged one is listed too, and does not hide the others."""
        found = [_look_at(number, self.images / f"{number:06d}") for number in self._numbers()]
        # One that the leader has removed since is not damaged, but gone.
        return [each for each in found if not each.problem or each.path.is_dir()]

    def checkpoint(self, number: int | None) -> Checkpoint:
        """Find the checkpoint of this number, or the last one; `FormatError` if it is damaged."""
        found = [each for each in self.checkpoints() if number in (None, each.number)]
        if not found:
            which = "a checkpoint" if number is None else f"checkpoint {number}"
            raise ConfigError(f"looking for {which} of job {self.name}: {self._what_there_is()}")
        if found[-1].problem:
            raise FormatError(
                "bad-manifest",
                f"{found[-1].problem}; name another one with --checkpoint: {self._whole_ones() or 'there is none'}",
            )
        return found[-1]

    def _what_there_is(self) -> str:
        if numbers := self._whole_ones():
            return f"expected one of {numbers}; leave --checkpoint out for the last"
        return "it has none; start its program again with `run`, and --every for checkpoints"

    def _whole_ones(self) -> str:
        return ", ".join(str(each.number) for each in self.checkpoints() if not each.problem)

    def begin_checkpoint(self) -> tuple[int, Path]:
        """Begin the next checkpoint; returns its number and folder. The remains of an earlier attempt are put aside."""
        number = 1 + max(self._numbers(), default=0)
        part = self.images / f"{number:06d}{_PART}"
        if part.exists():
            names = (part.with_name(f"{number:06d}-{count}{_PART}") for count in itertools.count(1))
            part.rename(next(name for name in names if not name.exists()))
        part.mkdir(mode=0o700)
        return number, part

    def has_remains(self) -> bool:
        """Whether there is what a removal or an attempt has left; called while no checkpoint is being taken."""
        return any(self.images.glob(f"*{_PART}"))

    def find_lack_of_room(self) -> str:
        """Explain why one more checkpoint like the last whole one has no room; empty if it has, or if there is none."""
        whole = [each for each in self.checkpoints() if not each.problem and not each.manifest.get("builds_upon")]
        reports = whole[-1].manifest.get("ranks", {}).values() if whole else ()
        needed = sum(int(report.get("num_bytes", 0)) for report in reports)
        free = shutil.disk_usage(self.images).free
        if needed <= free:
            return ""
        return (
            f"{free >> 20} MiB are free in {self.images}, and checkpoint {whole[-1].number} has {needed >> 20}; free "
            "as much there, or keep one less: --keep K needs room for K + 1"
        )

    def commit_checkpoint(self, part: Path, manifest: Mapping[str, Any]) -> Path:
        """Write the manifest, flush, and give the folder its name: from then on it is a checkpoint.

        What fails after that is no error, but a warning.
        """
        body = _to_json(manifest)
        digest = hashlib.sha256(body).hexdigest()
        # No reader looks into the folder before it has its name: each step needs the disk once.
        write_new(part / "manifest.json", _to_json({"manifest": manifest, "sha256": digest}))
        flush(part)
        final = part.with_name(part.name.removesuffix(_PART))
        part.rename(final)
        try:
            flush(self.images)
        except OSError as error:
            _warn(
                "%s is a checkpoint, but its disk has not confirmed its name (%s): a crash of this machine may take it "
                "back",
                *(final, error.strerror),
            )
        return final

    def keep_last(self, count: int, is_enough: Callable[[], bool] = lambda: False) -> list[int]:
        """Remove abandoned checkpoints, and all but the last ``count`` and those that they build upon.

        Damaged ones do not count, and stay until so many later ones are whole. Called while none is being taken. Before
        each file ``is_enough`` is asked: once it is true, the rest is left to a later call. Returns the numbers of the
        checkpoints that are gone.
        """
        self._remove_parts(is_enough)
        found = self.checkpoints()
        whole = {each.number: each for each in found if not each.problem}
        kept = decide_kept([Saved(number) for number in whole], [KeepLast(count)])
        # The list is complete: what a checkpoint needs does not follow from what those need in turn.
        needed = set(kept).union(*(whole[number].manifest.get("builds_upon", ()) for number in kept))
        first = min(kept) if len(kept) == count else 0
        removed = [each.number for each in found if each.number < first and each.number not in needed]
        gone = []
        for number in removed:
            if is_enough():
                break
            # Renamed first: a folder that is half removed must not look like a checkpoint.
            doomed = self.images / f"{number:06d}"
            doomed.rename(doomed.with_name(f"{number:06d}{_PART}"))
            gone.append(number)
            self._remove_parts(is_enough)
        return gone

    def _numbers(self) -> list[int]:
        """The numbers of the existing checkpoints, in order; none where their folder has been removed."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(entry.name) for entry in self.images.iterdir() if _NUMBER.fullmatch(entry.name))
        return []

    def _remove_parts(self, is_enough: Callable[[], bool]) -> None:
        for part in self.images.glob(f"*{_PART}"):
            # Files first: one may have as many bytes as a rank has memory, and takes its time.
            for path in part.rglob("*"):
                if is_enough():
                    return
                with contextlib.suppress(OSError):
                    path.unlink()
            shutil.rmtree(part, ignore_errors=True)


def rank_name(rank: int) -> str:
    """The name of what belongs to a rank.

    >>> rank_name(7)
    'rank-0007'
    """
    return f"rank-{rank:04d}"


def _look_at(number: int, place: Path) -> Checkpoint:
    try:
        return Checkpoint(number, place, read_manifest(place))
    except (StorageError, FormatError) as error:
        return Checkpoint(number, place, {}, str(error))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, checked against its own digest."""
    value = _read_json(folder / "manifest.json")
    manifest = value.get("manifest")
    if not isinstance(manifest, dict) or hashlib.sha256(_to_json(manifest)).hexdigest() != value.get("sha256"):
        raise FormatError(
            "bad-manifest", f"reading {folder / 'manifest.json'}: its digest does not match; it is damaged"
        )
    return manifest


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file durably; `StorageError` where it cannot be done."""
    try:
        replace_whole(path, data)
    except OSError as error:
        raise StorageError(f"writing {path}: {error.strerror}; check its free space and permissions") from error


def _tuple_of(listed: Any) -> tuple[Any, ...]:
    """JSON has lists alone; a text or an object would do as one."""
    if not isinstance(listed, list):
        raise TypeError(f"expected a list, found a {type(listed).__name__}")
    return tuple(listed)


def _checked(told: T) -> T:
    """The same; `OptionError` for a field of another type: the file may be damaged, and still be JSON."""
    for name, expected in get_type_hints(type(told)).items():
        check_option(f"reading {name}", name, getattr(told, name), expected)
    return told


@contextlib.contextmanager
def _as_damaged(path: Path) -> Iterator[None]:
    """Turn the error of a missing, unknown or wrong value into a `FormatError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("bad-job", f"reading {path}: {error!r}; it is damaged, or another version's") from error


def _warn(text: str, *values: object) -> None:
    import logging  # noqa: PLC0415 - ranks of MPI programs load this module, and do without

    logging.getLogger(__name__).warning(text, *values)


def _to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"reading {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError("not-json", f"reading {path}: {error}; it is damaged") from error
    if not isinstance(value, dict):
        raise FormatError("not-json", f"reading {path}: expected an object; it is damaged")
    return value
