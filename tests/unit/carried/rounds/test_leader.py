"""The coordinator among ranks that are only sockets: who it lets in, how it leads a round, what it says of a loss."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.rounds import checkpointing, leader
from remesh.carried.rounds.checkpointing import Settings
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobSpec, rank_name
from remesh.carried.rounds.leader import Coordinator
from remesh.carried.rounds.round_machine import Obstacle
from remesh.carried.rounds.status import Activity, Status
from remesh.wire.messages import NONCE_BYTES, Conversation, Role
from remesh.wire.token import Token
from tests.support.log_lines import log_lines


class Peer:
    """A rank or client: it answers what it is told, when the test says so."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=100)

    def prove(self, token: Token) -> None:
        nonce = self.socket.recv(NONCE_BYTES, socket.MSG_WAITALL)
        self.conversation = Conversation(token, nonce, Role.CLIENT)
        self.socket.sendall(self.conversation.prove())

    def send(self, **message: Any) -> None:
        self.socket.sendall(self.conversation.pack(message))

    def take(self) -> list[dict[str, Any]]:
        self.socket.setblocking(False)
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        finally:
            self.socket.settimeout(100)
        return self.conversation.feed(data)


class Stage:
    """A coordinator of two ranks and everybody who talks to it."""

    def __init__(self, path: Path, settings: Settings, begun_from: Checkpoint | None = None) -> None:
        self.folder = JobFolder.create(path, JobSpec(("app.py",), 2, "/", {}))
        self._log = log_lines("remesh.carried")
        self.said = self._log.__enter__()
        self.coordinator = Coordinator(self.folder, 2, settings, begun_from=begun_from)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.coordinator.listen(listener)
        self.peers: list[Peer] = []
        self.is_closed = False
        self.refusals: list[str] = []
        """Why rank 1 cannot be imaged, in the rounds to come; "" for one in which it can."""

    def connect(self, token: Token | None = None) -> Peer:
        peer = Peer(self.address)
        self.peers.append(peer)
        self.step()
        peer.prove(token or self.folder.read_token())
        self.step()
        return peer

    def ranks(self) -> list[Peer]:
        """Both ranks, up and running."""
        found = []
        for rank in range(2):
            peer = self.connect()
            peer.send(type="hello", rank=rank, size=2, pid=1, host=f"h{rank}", made_by={"library": f"some {rank}"})
            peer.send(type="ready", seconds={})
            found.append(peer)
        self.step()
        return found

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.coordinator.close()
            self._log.__exit__(None, None, None)

    def step(self, times: int = 4) -> None:
        for _ in range(times):
            self.coordinator.step(0.01)

    def until(self, is_true: Callable[[], Any], ranks: list[Peer], problem: str = "") -> None:
        """Let the ranks answer until something holds."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if is_true():
                return
            self.step(1)
            for rank, peer in enumerate(ranks):
                for message in peer.take():
                    self.answer(rank, peer, message, problem)
        pytest.fail(f"it never held; {self.said}")

    def answer(self, rank: int, peer: Peer, message: dict[str, Any], problem: str) -> None:
        if message["type"] == "ask":
            status = Status(rank, Activity.COMPUTING, closed=message["step"] == "close")
            answer = status.to_json()
            if message["wave"] == 1 and rank == 1 and self.refusals and (why := self.refusals.pop(0)):
                answer["refusals"] = [why]
            peer.send(type="status", wave=message["wave"], status=answer)
        elif message["type"] == "image":
            (Path(message["folder"]) / rank_name(rank)).mkdir()
            report = {"num_bytes": 10, "caught": {"ranks computing": 1}}
            peer.send(type="imaged", problem=problem, refused=problem.startswith("refused"), report=report)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "job", Settings(keep=1))
    yield made
    made.close()
    for peer in made.peers:
        peer.socket.close()


def test_who_does_not_know_the_token_is_turned_away(stage: Stage) -> None:
    stranger = stage.connect(Token("", b"something else"))
    assert stranger.socket.recv(1) == b""
    assert "turned away" in (stage.folder.logs / "events.log").read_text()


def test_a_checkpoint_is_asked_for_taken_committed_and_answered(stage: Stage) -> None:
    ranks, client = stage.ranks(), stage.connect()
    client.send(type="checkpoint", stop=False)
    answers: list[dict[str, Any]] = []
    stage.until(lambda: answers.extend(client.take()) or answers, ranks)
    assert answers[0]["ending"] == "resumed" and answers[0]["num_bytes"] == 20
    assert answers[0]["caught"] == {"ranks computing": 2}
    assert answers[0]["folder"] == str(stage.folder.checkpoint(None).path)
    manifest = stage.folder.checkpoint(None).manifest
    assert manifest["num_ranks"] == 2 and manifest["library"] == ["some 0", "some 1"]
    assert stage.coordinator.outcome is None


def test_old_checkpoints_that_cannot_be_removed_harm_no_new_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(count: int, is_enough: Callable[[], bool]) -> list[int]:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(stage.folder, "keep_last", fail)
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=False)
    stage.until(lambda: stage.said, ranks)
    assert "could not be removed" in stage.said[0] and "Read-only" in stage.said[0]
    assert stage.coordinator.last_checkpoint is not None and stage.coordinator.last_checkpoint["ending"] == "resumed"


def test_removing_old_checkpoints_holds_up_nobody_but_the_next_round(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, remove = threading.Event(), stage.folder.keep_last
    removed: list[list[int]] = []

    def remove_slowly(count: int, is_enough: Callable[[], bool]) -> list[int]:
        assert may_end.wait(100)
        removed.append(remove(count, is_enough))
        return removed[-1]

    monkeypatch.setattr(stage.folder, "keep_last", remove_slowly)
    ranks, client = stage.ranks(), stage.connect()
    told: list[dict[str, Any]] = []
    client.send(type="checkpoint", stop=False)
    stage.until(lambda: told.extend(client.take()) or told, ranks)
    assert told.pop()["number"] == 1
    client.send(type="checkpoint", stop=False)
    client.send(type="look")
    stage.until(lambda: told.extend(client.take()) or told, ranks)
    stage.step(20)
    assert told.pop()["type"] == "state" and stage.coordinator.describe()["round"] is None  # it waits
    may_end.set()
    stage.until(lambda: told.extend(client.take()) or told, ranks)
    assert told.pop()["number"] == 2
    stage.until(lambda: removed == [[], [1]], ranks)
    assert [each.number for each in stage.folder.checkpoints()] == [2]


@pytest.fixture
def slow_removal(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Removals begin as they do, and go on only once this is set, or once they are broken off."""
    may_go_on, remove = threading.Event(), stage.folder.keep_last

    def remove_slowly(count: int, is_enough: Callable[[], bool]) -> list[int]:
        while not (is_enough() or may_go_on.wait(0.001)):
            pass
        return remove(count, is_enough)

    monkeypatch.setattr(stage.folder, "keep_last", remove_slowly)
    yield may_go_on
    may_go_on.set()


def test_a_stop_does_not_wait_for_the_removal_of_old_checkpoints(stage: Stage, slow_removal: threading.Event) -> None:
    ranks = stage.ranks()
    for number in (1, 2):
        slow_removal.set()
        stage.coordinator.request_checkpoint(stop=False)
        stage.until(lambda number=number: (stage.coordinator.last_checkpoint or {}).get("number") == number, ranks)
        slow_removal.clear()
    stage.coordinator.save_and_stop()
    stage.until(lambda: stage.coordinator.outcome, ranks)
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "stopped"
    stage.close()
    assert not slow_removal.is_set() and stage.folder.checkpoint(None).number == 3
    assert "broken off" in (stage.folder.logs / "events.log").read_text()


def test_a_stop_waits_for_a_removal_that_makes_its_room(
    stage: Stage, slow_removal: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.folder, "find_lack_of_room", lambda: "" if slow_removal.is_set() else "1 MiB is free")
    slow_removal.set()
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=False)
    stage.until(lambda: stage.coordinator.last_checkpoint, ranks)
    slow_removal.clear()
    stage.coordinator.save_and_stop()
    stage.step(20)
    assert stage.coordinator.describe()["round"] is None and stage.said == []
    slow_removal.set()
    stage.until(lambda: stage.coordinator.outcome, ranks)
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "stopped"


def test_what_an_earlier_stay_has_not_removed_makes_room_for_a_checkpoint(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = stage.folder.images / "000007.part" / rank_name(0)
    left.mkdir(parents=True)
    monkeypatch.setattr(stage.folder, "find_lack_of_room", lambda: "1 MiB is free" if left.exists() else "")
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=False)
    stage.until(lambda: stage.coordinator.last_checkpoint or stage.said, ranks)
    assert stage.said == [] and stage.coordinator.last_checkpoint is not None


def test_a_lack_of_room_that_a_removal_does_not_end_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.folder, "find_lack_of_room", lambda: "1 MiB is free")
    ranks = stage.ranks()
    for times in (1, 2):
        stage.coordinator.request_checkpoint(stop=False)
        stage.until(lambda times=times: len(stage.said) == times, ranks)
    assert stage.said == ["no checkpoint was taken: 1 MiB is free"] * 2
    assert list(stage.folder.images.iterdir()) == []


def test_a_checkpoint_that_stops_ends_the_stay(stage: Stage) -> None:
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=True)
    stage.until(lambda: stage.coordinator.outcome, ranks)
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "stopped"
    assert stage.folder.read_state().state == "stopped"


def test_an_image_that_cannot_be_written_leaves_nothing_and_the_job_goes_on(stage: Stage) -> None:
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=True)
    stage.until(lambda: stage.said, ranks, problem="the disk is full")
    assert "the disk is full" in stage.said[0]
    stage.until(lambda: not list(stage.folder.images.iterdir()), ranks)
    assert stage.coordinator.outcome is None


def test_what_ranks_still_write_for_a_round_that_was_given_up_is_removed_before_the_next_one(stage: Stage) -> None:
    ranks = stage.ranks()
    stage.coordinator.request_checkpoint(stop=False)
    asked: list[dict[str, Any]] = []

    def hold_back(rank: int, peer: Peer, message: dict[str, Any], problem: str) -> None:
        if message["type"] == "image" and rank == 0 and not asked:
            asked.append(message)
        else:
            Stage.answer(stage, rank, peer, message, problem)

    stage.answer = hold_back  # type: ignore[method-assign]
    stage.until(lambda: asked and stage.said, ranks, problem="the disk is full")
    stage.coordinator.request_checkpoint(stop=False)
    stage.step(20)
    folder = Path(asked[0]["folder"]) / rank_name(0)
    folder.mkdir(parents=True)
    (folder / "pages").write_bytes(b"written late")
    ranks[0].send(type="imaged", problem="", refused=False, report={"num_bytes": 10, "caught": {}})
    stage.until(lambda: stage.coordinator.last_checkpoint, ranks)
    assert [path.name for path in stage.folder.images.iterdir()] == ["000001"]
    assert not list(stage.folder.checkpoint(None).path.rglob("pages"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow one another without a pause: two in all."""
    monkeypatch.setattr(checkpointing, "_RETRY_AFTER_S", {Obstacle.REFUSED: (0.0,)})


def test_a_line_that_cannot_be_written_ends_no_job_and_hides_no_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ranks = stage.ranks()
    (stage.folder.logs / "events.log").unlink(missing_ok=True)
    (stage.folder.logs / "events.log").mkdir()
    monkeypatch.setattr(stage.folder.__class__, "change_state", write)
    stage.coordinator.request_checkpoint(stop=False)
    stage.until(lambda: stage.coordinator.last_checkpoint, ranks)
    assert stage.coordinator.outcome is None
    for peer in ranks:
        peer.send(type="ended", code=0)
    stage.until(lambda: stage.coordinator.outcome, ranks)
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "finished"
    said = "\n".join(stage.said)
    assert "events.log: Is a directory; the line was: checkpoint 1: begun" in said
    assert "how the job ended could not be noted: [Errno 28]" in said


def test_a_refusal_that_passes_is_tried_again_and_the_answer_says_how_often(stage: Stage, at_once: None) -> None:
    ranks, client = stage.ranks(), stage.connect()
    stage.refusals = ["child process 7 (sh): wait until it has ended", ""]
    client.send(type="checkpoint", stop=False)
    answers: list[dict[str, Any]] = []
    stage.until(lambda: answers.extend(client.take()) or answers, ranks)
    assert answers[0]["ending"] == "resumed" and answers[0]["attempts"] == 2
    assert stage.said == []
    assert "given up: rank 1 cannot be imaged: child process 7" in (stage.folder.logs / "events.log").read_text()


def test_a_refusal_that_stays_is_answered_after_the_last_attempt(stage: Stage, at_once: None) -> None:
    ranks, client = stage.ranks(), stage.connect()
    stage.refusals = ["a socket"] * 9
    client.send(type="checkpoint", stop=True)
    answers: list[dict[str, Any]] = []
    stage.until(lambda: answers.extend(client.take()) or answers, ranks)
    assert answers[0]["reason"] == "rank 1 cannot be imaged: a socket (the last of 2 attempts)"
    assert answers[0]["attempts"] == 2 and len(stage.refusals) == 7
    stage.until(lambda: not list(stage.folder.images.iterdir()), ranks)
    assert stage.coordinator.outcome is None


def test_what_an_image_meets_is_tried_again_if_it_is_the_programs_and_not_if_it_is_the_disks(
    stage: Stage, at_once: None
) -> None:
    ranks = stage.ranks()
    for problem, times in (("refused: a child", 2), ("the disk is full", 1)):
        stage.said.clear()
        stage.coordinator.request_checkpoint(stop=False)
        stage.until(lambda: stage.said, ranks, problem)
        assert ("attempts" in stage.said[0]) == (times == 2)
        assert (stage.folder.logs / "events.log").read_text().count(problem) == times


def test_who_asks_for_a_stop_while_a_round_fails_gets_it(stage: Stage, at_once: None) -> None:
    ranks = stage.ranks()
    stage.refusals = ["a child"]
    stage.coordinator.request_checkpoint(stop=False)
    stage.step(1)
    stage.coordinator.request_checkpoint(stop=True)
    stage.until(lambda: stage.coordinator.outcome, ranks)
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "stopped"


def test_a_rank_whose_line_breaks_fails_the_job_by_name(stage: Stage) -> None:
    ranks = stage.ranks()
    ranks[1].socket.close()
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.state == "failed" and "rank 1 on host h1" in outcome.cause
    assert [message["type"] for message in ranks[0].take()] == ["abort"]


def test_a_program_that_is_killed_fails_the_job_with_its_signal(stage: Stage) -> None:
    ranks = stage.ranks()
    ranks[0].send(type="ended", code=-9)
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and "killed by signal 9" in outcome.cause and outcome.exit_code == 137


def test_the_job_has_finished_when_every_program_has(stage: Stage) -> None:
    ranks = stage.ranks()
    for peer in ranks:
        assert stage.coordinator.outcome is None
        peer.send(type="ended", code=0)
        stage.step()
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "finished"
    assert [message["type"] for message in ranks[0].take()] == ["leave"]


def test_ranks_that_outstay_one_that_ended_without_a_word_are_given_up_and_it_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = stage.ranks()
    ranks[1].send(type="ended", code=0, omitted="MPI_Finalize")
    stage.step()
    assert stage.coordinator.outcome is None, "the others may be about to end as well"
    monkeypatch.setattr(leader, "_OTHERS_TIMEOUT_S", 0.0)
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.state == "failed" and outcome.exit_code == 1
    assert "rank 1 on host h1 ended with exit status 0 without MPI_Finalize" in outcome.cause
    assert [message["type"] for message in ranks[0].take()] == ["abort"]


def test_a_job_all_of_whose_ranks_end_without_a_word_has_finished(stage: Stage) -> None:
    for peer in stage.ranks():
        peer.send(type="ended", code=0, omitted="MPI_Finalize")
    stage.step()
    assert stage.coordinator.outcome is not None and stage.coordinator.outcome.state == "finished"


def test_single_processes_instead_of_ranks_are_noticed(stage: Stage) -> None:
    peer = stage.connect()
    peer.send(type="hello", rank=0, size=1, pid=1, host="h")
    stage.step()
    assert stage.coordinator.outcome is not None and "single processes" in stage.coordinator.outcome.cause


def test_nonsense_from_a_peer_drops_only_that_peer(stage: Stage) -> None:
    stage.ranks()
    client = stage.connect()
    client.socket.sendall(b"\xff" * 64)
    stage.step()
    assert client.socket.recv(1) == b""
    assert stage.coordinator.outcome is None


def test_a_polite_end_before_the_job_runs_ends_it(stage: Stage) -> None:
    stage.coordinator.save_and_stop()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.exit_code == 143 and outcome.is_wanted


def test_a_polite_end_while_a_restart_comes_up_stops_the_job_by_its_checkpoint(tmp_path: Path) -> None:
    """A batch system that pre-empts it then shall put it into its queue again."""
    stage = Stage(tmp_path / "job", Settings(), begun_from=Checkpoint(7, tmp_path, {}))
    peer = stage.connect()
    peer.send(type="hello", rank=0, size=2, pid=1, host="h0", made_by={})
    stage.step()
    stage.coordinator.save_and_stop()
    late = stage.connect()
    late.send(type="hello", rank=1, size=2, pid=2, host="h1", made_by={})
    stage.step()
    outcome, told = stage.coordinator.outcome, peer.take() + late.take()
    stage.close()
    for each in (peer, late):
        each.socket.close()
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("stopped", 0)
    assert "checkpoint 7" in outcome.cause and stage.folder.read_state().state == "stopped"
    assert [message["type"] for message in told] == ["abort", "abort"]


def test_only_who_asked_for_the_end_wanted_it_however_it_came(stage: Stage) -> None:
    """A rank that is lost while the last checkpoint is taken does not make the job one that goes on by itself."""
    ranks = stage.ranks()
    stage.connect().send(type="checkpoint", stop=True)
    stage.step()
    ranks[1].socket.close()
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.state == "failed" and outcome.is_wanted


def test_a_job_that_lost_a_rank_by_itself_was_not_wanted_to_end(stage: Stage) -> None:
    ranks = stage.ranks()
    stage.connect().send(type="checkpoint")
    stage.step()
    ranks[1].socket.close()
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.state == "failed" and not outcome.is_wanted


def test_an_interrupt_ends_the_job_as_its_user_wants(stage: Stage) -> None:
    stage.ranks()
    stage.coordinator.interrupt()
    outcome = stage.coordinator.outcome
    assert outcome is not None and (outcome.exit_code, outcome.is_wanted) == (130, True)


def test_a_job_that_has_failed_is_not_finished_by_ends_that_were_on_their_way(stage: Stage) -> None:
    """All programs end well, but one of them has never started MPI."""
    first, second = stage.ranks()
    second.send(type="failed", cause="the program never started MPI")
    first.send(type="ended", code=0)
    second.send(type="ended", code=0)
    stage.step()
    outcome = stage.coordinator.outcome
    assert outcome is not None and outcome.state == "failed" and "never started MPI" in outcome.cause
    assert stage.folder.read_state().state == "failed"
    assert [message["type"] for message in first.take()] == ["abort"]


def test_a_job_that_has_failed_is_not_running_when_its_last_rank_comes_up(stage: Stage) -> None:
    first, second = stage.connect(), stage.connect()
    for rank, peer in enumerate((first, second)):
        peer.send(type="hello", rank=rank, size=2, pid=1, host="h", made_by={})
    first.send(type="ready", seconds={})
    first.send(type="failed", cause="its channel is damaged")
    stage.step()
    second.send(type="ready", seconds={})
    stage.step()
    state = stage.folder.read_state()
    assert (state.state, state.addresses) == ("failed", ()) and "its channel is damaged" in state.cause
