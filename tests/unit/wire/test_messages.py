"""Messages between the parts of a job: bounded, data only, and only from who knows the token, each in its place."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import Error, FormatError, PeerError
from remesh.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_OPENING_BYTES,
    Conversation,
    Line,
    Role,
    make_nonce,
)
from remesh.wire.token import MAC_BYTES, Token

TOKEN = Token("job", b"0123456789abcdef")
OTHER = Token("job", b"fedcba9876543210")
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,  # drawing them takes longer than all else
)


def ends(server: Token = TOKEN, client: Token = TOKEN) -> tuple[Conversation, Conversation]:
    nonce = make_nonce()
    return Conversation(server, nonce, Role.SERVER), Conversation(client, nonce, Role.CLIENT)


def frame(body: bytes, proof: bytes = bytes(MAC_BYTES)) -> bytes:
    return struct.pack("!I", len(body)) + proof + body


@given(st.lists(st.dictionaries(st.text(), _VALUES)), st.lists(st.integers(1, 50)))
def test_any_cutting_of_the_stream_gives_the_same_messages(bodies: list[dict[str, object]], cuts: list[int]) -> None:
    messages = [{**body, "type": "x"} for body in bodies]
    server, client = ends()
    stream = client.prove() + b"".join(map(client.pack, messages))
    found = []
    for cut in cuts:
        found += server.feed(stream[:cut])
        stream = stream[cut:]
    assert found + server.feed(stream) == messages


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    server, client = ends()
    with pytest.raises(FormatError, match=f"at most {MAX_FRAME_BYTES}"):
        client.feed(struct.pack("!I", MAX_FRAME_BYTES + 1) + bytes(MAC_BYTES))
    with pytest.raises(FormatError, match=f"at most {MAX_OPENING_BYTES}"):
        server.feed(struct.pack("!I", MAX_OPENING_BYTES + 1) + bytes(MAC_BYTES))
    with pytest.raises(PeerError, match="type 'x'"):
        client.pack({"type": "x", "text": "." * MAX_FRAME_BYTES})


def test_a_stranger_takes_no_memory() -> None:
    """It announces as much as it may, and sends for ever: more than the announced is never kept."""
    server, _ = ends()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="does not have the job.s token"):
            for _ in range(1000):
                server.feed(frame(bytes(MAX_OPENING_BYTES)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b"\x80\x04.", b"[]", b"{}", b'{"type":1}', b"{", b"\xff"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    server, client = ends()
    with pytest.raises(FormatError, match="reading a message"):
        server.feed(client._pack(body))


def test_nothing_is_read_of_who_does_not_know_the_token() -> None:
    server, client = ends(client=OTHER)
    for stream in (client.prove(), client.pack({"type": "x"}), frame(b'{"type":"x"}'), b"GET / HTTP/1.1\r\n" * 10):
        with pytest.raises(FormatError, match=r"does not have the job.s token|at most"):
            ends()[0].feed(stream)
    assert not server.is_proven


def test_a_server_without_the_token_is_not_heard_either() -> None:
    server, client = ends(server=OTHER)
    with pytest.raises(FormatError, match="does not have the job.s token"):
        client.feed(server.pack({"type": "exit"}))


@given(st.data())
def test_a_frame_fits_in_its_place_only(data: st.DataObject) -> None:
    """Said again, left out, moved, changed in any bit, sent back or into another connection: it is refused."""
    server, client = ends()
    frames = [client.prove(), *(client.pack({"type": "x", "number": number}) for number in range(3))]
    at = data.draw(st.integers(0, 3))
    match data.draw(st.sampled_from(["again", "left out", "changed", "turned back", "elsewhere"])):
        case "again":
            stream = [*frames[: at + 1], frames[at]]
        case "left out":
            stream = [*frames[:at], *frames[at + 1 :]] if at < 3 else [frames[1]]
        case "changed":
            bit = data.draw(st.integers(32, 8 * len(frames[at]) - 1))  # another length is a frame that never ends
            changed = bytearray(frames[at])
            changed[bit // 8] ^= 1 << bit % 8
            stream = [*frames[:at], bytes(changed)]
        case "turned back":
            server, stream = client, frames
        case _:
            server, stream = ends()[0], frames
    with pytest.raises(FormatError, match="does not have the job.s token"):
        server.feed(b"".join(stream))


@given(st.binary(max_size=400))
def test_garbage_is_never_heard(garbage: bytes) -> None:
    server, _ = ends()
    try:
        assert server.feed(garbage) == []
    except FormatError:
        assert not server.is_proven


def pair(folder: Path, server: Token = TOKEN, client: Token = TOKEN) -> tuple[Line | Exception, Line | Exception]:
    """Both ends of a line over a Unix socket, or why there is none."""
    found: dict[str, Line | Exception] = {}

    def answer() -> None:
        connection, _ = listener.accept()
        try:
            found["server"] = Line.answer(connection, server, patience_s=30)
        except (OSError, Error) as error:
            connection.close()
            found["server"] = error

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "link"))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            line: Line | Exception = Line.connect([str(folder / "link")], client, "calling", patience_s=30)
        except (OSError, Error) as error:
            line = error
        thread.join(60)
    return found["server"], line


def test_a_line_carries_messages_and_payloads_both_ways(tmp_path: Path) -> None:
    server, client = pair(tmp_path)
    assert isinstance(server, Line) and isinstance(client, Line)
    with server, client:
        data, room = bytes(range(256)) * 100, bytearray(25600)
        client.send({"type": "parcel", "nbytes": len(data)})
        client.send_payload(memoryview(data))
        client.send({"type": "after"})
        # What came together with a message is not lost to the payload that follows it.
        assert server.receive() == {"type": "parcel", "nbytes": len(data)}
        server.receive_payload(memoryview(room))
        assert bytes(room) == data
        server.send({"type": "kept"})
        assert client.receive() == {"type": "kept"} and server.receive() == {"type": "after"}
        client.close()
        assert server.receive() is None


def test_a_caller_with_another_token_gets_no_line(tmp_path: Path) -> None:
    server, client = pair(tmp_path, client=OTHER)
    assert isinstance(server, FormatError) and "does not have the job's token" in str(server)
    assert isinstance(client, Line)
    with client:
        assert client.receive() is None


def test_a_caller_that_proves_nothing_is_given_up_in_time() -> None:
    """However often it says a little."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.01):
            try:
                theirs.send(b"\0")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with ours, pytest.raises((TimeoutError, FormatError)):
            Line.answer(ours, TOKEN, patience_s=0.2)
    finally:
        ended.set()
        thread.join()
        theirs.close()


def test_nobody_at_the_other_end_is_told_by_address(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"calling: no process answers \(.*nowhere: .*; 127.0.0.1:1: "):
        Line.connect([str(tmp_path / "nowhere"), ("127.0.0.1", 1)], TOKEN, "calling")
