"""``python -m remesh.carried.torch.rank_keeper JOB --rank R ...``: the process beside one rank's program, which images
it.

Neither torch nor NumPy is imported here. The keeper hears the coordinator and its program, one event at a time:

    coordinator   ask ──> program: ask ──> status         image ──> program: shed ──> image written
                  end ──> program: open, or a new notice after a cut ──> here: its groups have been grown again
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remesh.carried.hosts.host_list import RankSlot, assign_slots, parse_hosts
from remesh.carried.hosts.imaging import IMAGE, dump_into
from remesh.carried.hosts.interfaces import choose_interface
from remesh.carried.hosts.outputs import Output, open_outputs
from remesh.carried.hosts.rank_folder import make_rank_folder
from remesh.carried.hosts.shared_folder import SharedFolder, name_run
from remesh.carried.images import (
    Frozen,
    NotImageable,
    OpenFilePolicy,
    Site,
    Starter,
    Upper,
    WrittenFile,
    check_imageable,
    check_written,
    cut_written,
    freeze,
    remember_image,
    restore_upper,
    share_hashes,
    start_hashing_ahead,
    start_upper,
    tell_sampled,
)
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, rank_name
from remesh.carried.rounds.leader_line import Control
from remesh.carried.rounds.status import Activity, Status
from remesh.carried.torch.devices import DEVICE_PREFIX, DeviceMemory, can_withdraw
from remesh.carried.torch.environment import program_command
from remesh.carried.torch.notice import GROWTH_PREFIX, INTERFACE_VARIABLE, Notice, write_notice
from remesh.carried.torch.program_lines import Callers
from remesh.foundation.errors import Error, PeerError
from remesh.foundation.files import flush
from remesh.wire.messages import Line, Message

_POLL_S: Final = 0.05
"""The time between looks at the program's output and health."""
_SETTLE_TIMEOUT_S: Final = 2.0
"""The time within which threads and descriptors that a program has let go of must be gone."""
_SETTLE_POLL_S: Final = 0.02
_LAST_LINE_GRACE_S: Final = 5.0
"""How long an ended program's line is read to its end: a child that has inherited it may hold it open."""
_PASSING: Final = ("socket:", "[eventpoll]", "[eventfd]", "pipe:")
"""Descriptors that groups and our own lines have while the program runs; checked only once those are shed, as devices
are that the driver takes from it."""


class RunOver(PeerError):
    """The job is over and this rank has to go at once, through no fault of its own."""


@dataclass(frozen=True, slots=True)
class Surround:
    """Where a rank's program finds the other ranks, and its files."""

    slot: RankSlot
    store: tuple[str, int]
    interface: str
    channel: Path
    starter: Starter
    """Starts the init beneath the program: a copy of this process from before it had threads."""


class Keeper:
    """One rank's stay; `run` returns when the job ends on this rank."""

    def __init__(self, folder: JobFolder, line: Line, surround: Surround, outputs: Sequence[Output]) -> None:
        self._folder, self._rank = folder, surround.slot.rank
        self._surround = surround
        self._outputs = outputs
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._control = Control(line, self._on_control)
        self._callers = Callers(folder.read_token(), self._on_program)
        self._program: Line | None = None
        self._upper: Upper | None = None
        self._frozen: Frozen | None = None
        self._device_memory = DeviceMemory()
        self._number = 0
        """The number of the last notice."""
        self._gone_s: float | None = None
        """When the program was first seen to have ended."""
        self._ended: int | None = None
        """Its exit status, once it has ended and all that it sent has been received."""
        self._final: Status | None = None
        """The last status of the program, before it ended."""
        self._activity = ""
        """What the program was doing when it was last asked."""
        self._refusals: list[str] = []
        """The reasons against an image, found in the first wave of a round."""
        self._request: Message | None = None
        """The request for an image, while the program sheds its groups."""
        self._pending: Message | None = None
        """A question without an answer yet: the program may be away, or end before it answers."""
        self._is_away = False
        """Whether the program sheds its groups or has shed them: a notice brings it back."""
        self._is_expected = False
        """Whether other ranks wait for the program to grow its groups with theirs."""
        self._resumption: Message | None = None
        """The end of a round that came while the program was shedding."""
        self._is_ready = False
        self._began_s = time.monotonic()

    # --- to life ---

    def start(self) -> None:
        """Start the program from its beginning."""
        self._give_notice("", ())
        spec = self._folder.read_spec()
        self._listen()
        command = program_command(spec, self._surround.slot, self._folder.read_token())
        self._upper = start_upper(command, self._site(), starter=self._surround.starter, timeout_s=300)
        start_hashing_ahead(self._upper.pid)

    def restore(self, checkpoint: Checkpoint, policy: OpenFilePolicy) -> None:
        """Restore the program from a checkpoint."""
        report = checkpoint.manifest["ranks"][rank_name(self._rank)]
        for output, length in zip(self._outputs, report["outputs"], strict=True):
            # The program writes again what it wrote after the checkpoint.
            output.cut(length)
        self._number = int(report["notice"])
        self._surround.channel.touch(mode=0o600)
        self._listen()
        sampled = self._cut_files(report, policy)
        if not report["has_image"]:
            self._surround.starter.close()
            self._ended = 0
            self._final = Status.from_json(report["final"])
            self._be_ready("")
            self._control.send({"type": "ended", "code": 0})
            return
        self._is_expected = True
        image = checkpoint.rank_folder(self._rank) / IMAGE
        self._upper = restore_upper(image, self._site(), open_files=None, starter=self._surround.starter)
        self._upper.note = "; ".join(filter(None, [self._upper.note, sampled]))
        self._device_memory.restore(self._upper.pid, report.get("devices", []))
        remember_image(image)
        start_hashing_ahead(self._upper.pid)
        ended = tuple(
            rank
            for rank in range(self._folder.read_spec().num_ranks)
            if not checkpoint.manifest["ranks"][rank_name(rank)]["has_image"]
        )
        self._give_notice("restart/", ended)

    def _cut_files(self, report: Message, policy: OpenFilePolicy) -> str:
        """Check the files that the program writes to, then cut them; each once all ranks have come as far.

        No file is cut before all are good, and no program writes before all are cut. Returns a note for the user.
        """
        files = [WrittenFile(**each) for each in report.get("written_files", ())]
        sampled = check_written(files, policy, f"restoring rank {self._rank}")
        self._meet("files are checked")
        cut_written(files, policy)
        self._meet("files are cut")
        return tell_sampled(sampled)

    def _meet(self, step: str) -> None:
        """Wait until all ranks have come as far."""
        self._control.send({"type": "meet", "step": step})
        while (message := self._events.get()) != {"type": "met", "step": step}:
            if message["type"] in ("abort", "lost"):
                raise RunOver(message.get("cause", "the coordinator of the job is gone"))

    def _site(self) -> Site:
        out, err = (str(output.path) for output in self._outputs)
        return Site(str(self._surround.channel), out, err)

    def _give_notice(self, growth: str, ended: Sequence[int]) -> None:
        self._number += 1
        notice = Notice(
            self._number,
            self._callers.address,
            self._surround.store,
            self._folder.read_token().secret.hex(),
            GROWTH_PREFIX + growth,
            self._surround.interface,
            tuple(ended),
        )
        write_notice(self._surround.channel, notice)

    def _listen(self) -> None:
        self._callers.start()
        self._control.start()

    def _on_program(self, message: Message, line: Line) -> None:
        self._events.put({"type": "program", "message": message, "line": line})

    def _on_control(self) -> None:
        if (message := self._control.take()) is not None:
            self._events.put(message)

    # --- its life ---

    def run(self) -> None:
        """Serve until the coordinator ends it; raises `RunOver` when the job has failed or its coordinator is gone."""
        next_look_s = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                if not self._obey(self._events.get(timeout=_POLL_S)):
                    return
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + _POLL_S
                self._look()

    def _look(self) -> None:
        for output in self._outputs:
            output.copy()
        if self._upper is None or self._ended is not None or (code := self._upper.poll()) is None:
            return
        if self._may_hear_more():
            return
        self._ended = code
        for output in self._outputs:
            output.copy()
        if self._final is None:
            self._final = Status(self._rank, Activity.FINISHED, closed=True)
        if not self._is_ready:
            self._be_ready("")
        self._control.send({"type": "ended", "code": code})
        if self._is_expected:
            self._fail_the_others()
        if self._pending is not None:
            self._answer_for_the_ended(self._pending)
        if self._request is not None:
            self._write_image()

    def _may_hear_more(self) -> bool:
        """Whether the last words of the program, which has ended, may still be on their way."""
        self._gone_s = self._gone_s or time.monotonic()
        if time.monotonic() > self._gone_s + _LAST_LINE_GRACE_S:
            return False
        return not self._callers.is_silent() or not self._events.empty()

    def _obey(self, message: Message) -> bool:
        """Do what the coordinator asks; False when the keeper is to end."""
        match message["type"]:
            case "program":
                self._hear_program(message["message"], message["line"])
            case "ask":
                self._ask(message)
            case "image":
                self._begin_image(message)
            case "end" if message["ending"] == "stopped":
                return False
            case "end":
                self._resume(message)
            case "leave":
                return False
            case "abort" | "lost":
                raise RunOver(message.get("cause", "the coordinator of the job is gone"))
        return True

    def _hear_program(self, message: Message, line: Line) -> None:
        match message["type"]:
            case "here":
                self._program, self._is_expected = line, False
                if message["problem"]:
                    self._control.send({"type": "failed", "cause": message["problem"]})
                elif not self._is_ready:
                    self._be_ready("" if self._upper is None else self._upper.note)
                if self._pending is not None:
                    self._ask(self._pending)
            case "status":
                self._pending = None
                self._activity = message["status"]["activity"]
                status = {**message["status"], "refusals": self._refusals}
                self._control.send({"type": "status", "wave": message["wave"], "status": status})
            case "shed":
                self._program = None
                if self._resumption is not None:
                    self._call_back(self._resumption)
                elif message["problem"]:
                    self._report_imaged(message["problem"], {}, refused=True)
                elif self._request is not None:
                    self._write_image()
            case "final":
                self._final = Status.from_json(message["status"])

    def _be_ready(self, note: str) -> None:
        self._is_ready = True
        self._control.send({"type": "ready", "seconds": {"upper": time.monotonic() - self._began_s}, "note": note})

    # --- a round ---

    def _ask(self, message: Message) -> None:
        self._pending = message
        if int(message["wave"]) == 1:
            # While the program runs: nothing is held for what is refused.
            self._refusals = self._look_for_refusals()
        if self._ended is not None:
            self._answer_for_the_ended(message)
        elif self._program is not None:
            self._send_to_program({key: message[key] for key in ("type", "wave", "step", "targets")})

    def _send_to_program(self, message: Message) -> None:
        assert self._program is not None
        with contextlib.suppress(OSError):  # it is about to end; the next look finds it
            self._program.send(message)

    def _answer_for_the_ended(self, message: Message) -> None:
        assert self._final is not None
        self._pending = None
        self._control.send({"type": "status", "wave": message["wave"], "status": self._final.to_json()})

    def _look_for_refusals(self) -> list[str]:
        """The reasons against an image that do not depend on the program's groups."""
        if self._upper is None or self._ended is not None:
            return []
        with contextlib.suppress(Error, OSError):  # it may end at any moment
            refusals = [str(each) for each in check_imageable(self._upper.pid)]
            passing = (*_PASSING, DEVICE_PREFIX) if can_withdraw() else _PASSING
            return [each for each in refusals if not any(word in each for word in passing)]
        return []

    def _begin_image(self, request: Message) -> None:
        self._request = request
        if self._ended is not None:
            self._write_image()
        else:
            self._is_away = True
            self._send_to_program({"type": "shed"})

    def _write_image(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        folder = Path(request["folder"]) / rank_name(self._rank)
        report: dict[str, Any] = {"num_bytes": 0, "seconds": {}, "caught": {}, "notice": self._number}
        if self._activity:
            report["caught"] = {f"ranks {self._activity}": 1}
        try:
            folder.mkdir(mode=0o700)
            if self._ended is None:
                assert self._upper is not None
                report["devices"] = self._device_memory.withdraw(self._upper.pid)
                self._wait_until_imageable(self._upper.pid)
                self._frozen = freeze(self._upper.pid)
            for output in self._outputs:
                output.copy()
            report["outputs"] = [output.copied for output in self._outputs]
            report["has_image"] = self._frozen is not None
            if self._frozen is not None:
                report.update(dump_into(self._frozen, folder, request))
            else:
                assert self._final is not None
                report["final"] = self._final.to_json()
            flush(folder)
        except (Error, OSError) as error:
            self._go_on()
            shutil.rmtree(folder, ignore_errors=True)
            self._report_imaged(str(error), report, refused=isinstance(error, NotImageable))
            return
        # It stands until the round is over: others that still run may share its files, and note what they hold then.
        self._report_imaged("", report)

    def _wait_until_imageable(self, pid: int) -> None:
        until_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while (refusals := check_imageable(pid)) and time.monotonic() < until_s:
            time.sleep(_SETTLE_POLL_S)
        if refusals:
            raise NotImageable(f"imaging the program of rank {self._rank}", refusals)

    def _report_imaged(self, problem: str, report: dict[str, Any], *, refused: bool = False) -> None:
        self._request = None
        self._control.send({"type": "imaged", "problem": problem, "refused": refused, "report": report})

    def _go_on(self) -> None:
        """Let the program run as before its image."""
        self._thaw()
        self._device_memory.give_back()

    def _thaw(self) -> None:
        if self._frozen is not None:
            self._frozen.thaw()
            self._frozen = None

    def _resume(self, message: Message) -> None:
        if self._request is not None:
            # The leader waits for the answer of every rank that it has asked to write.
            self._report_imaged("the checkpoint was given up before this rank began to write", {})
        self._pending = None
        self._go_on()
        self._is_expected = self._is_away and self._rank not in message["ended"]
        if self._ended is not None:
            if self._is_expected:
                self._fail_the_others()
        elif not self._is_away:
            self._send_to_program({"type": "open"})
        elif self._program is None:
            self._call_back(message)
        else:
            self._resumption = message

    def _fail_the_others(self) -> None:
        """End the job: the others would wait without an end for a program that is gone."""
        self._control.send(
            {
                "type": "failed",
                "cause": f"the program of rank {self._rank} ended with exit status {self._ended} in the middle of a "
                "checkpoint or restart, before it had its process groups again, and without a word to Python; restart "
                "the job from its last checkpoint",
            }
        )

    def _call_back(self, message: Message) -> None:
        """Have the program grow its groups again, together with all others."""
        self._is_away, self._resumption = False, None
        self._give_notice(f"round-{message['round']}/", message["ended"])

    # --- the end ---

    def leave(self) -> None:
        """End the program if it still runs."""
        if self._upper is not None:
            self._upper.kill()
        self._thaw()
        for output in self._outputs:
            output.copy()
        self._callers.close()
        self._control.send({"type": "left"})


def main(arguments: list[str]) -> int:
    """Be a rank's keeper until the job ends; returns the exit status of the process."""
    parser = argparse.ArgumentParser(prog="remesh.carried.torch.rank_keeper")
    parser.add_argument("job", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--interface", default="")
    parser.add_argument("--checkpoint", type=int)
    parser.add_argument("--open-files", type=OpenFilePolicy, default=OpenFilePolicy.TRUNCATE)
    options = parser.parse_args(arguments)
    folder, rank = JobFolder(options.job), options.rank
    starter = Starter.make()  # before there are threads
    try:
        line = Line.connect([_address(options.coordinator)], folder.read_token(), f"starting rank {rank}")
    except Error as error:
        sys.stderr.write(f"remesh: {error}\n")
        return 1
    spec = folder.read_spec()
    hosts = parse_hosts(options.hosts, spec.num_ranks)
    slot = assign_slots(hosts)[rank]
    line.send({"type": "hello", "rank": rank, "size": spec.num_ranks, "pid": os.getpid(), "host": slot.host})
    rooms = contextlib.ExitStack()
    try:
        room = make_rank_folder()
        rooms.callback(shutil.rmtree, room, ignore_errors=True)
        shared_folder = SharedFolder.enter(name_run(folder.read_token(), options.coordinator), rank)
        rooms.callback(shared_folder.leave)
        share_hashes(shared_folder.hashes)
        asked = options.interface or spec.environment.get(INTERFACE_VARIABLE, "")
        interface = choose_interface(asked, hosts, slot)
        surround = Surround(slot, _address(options.store), interface, room / "channel", starter)
        keeper = Keeper(folder, line, surround, open_outputs(folder.logs, rank))
        if options.checkpoint is None:
            keeper.start()
        else:
            keeper.restore(folder.checkpoint(options.checkpoint), options.open_files)
        keeper.run()
        keeper.leave()
    except RunOver:
        return 1
    except BaseException as error:
        line.send({"type": "failed", "cause": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(OSError), (folder.logs / "events.log").open("a") as log:
            log.write(f"rank {rank}: {traceback.format_exc()}")
        sys.stderr.write(f"remesh: {error}\n" if isinstance(error, Error) else traceback.format_exc())
        return 1
    finally:
        rooms.close()
    line.close()
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The program ends with this process; threads that listen need not be waited for.
    os._exit(status)
