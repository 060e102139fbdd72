import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.link import MAX_LINE_BYTES, LineBuffer
from remesh.errors import PeerError


@given(st.lists(st.dictionaries(st.text(), st.integers()), max_size=5), st.integers(1, 20))
def test_messages_survive_any_cut_of_the_stream(messages: list[dict[str, int]], size: int) -> None:
    stream = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    buffer = LineBuffer()
    received = [m for at in range(0, len(stream), size) for m in buffer.feed(stream[at : at + size])]
    assert received == messages


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\n", b"[1, 2]\n", b"\xff\xfe\n", b'"text"\n', b"{\n"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(PeerError, match="reading a message"):
        LineBuffer().feed(garbage)


def test_endless_line_is_refused() -> None:
    with pytest.raises(PeerError, match=f"over {MAX_LINE_BYTES} bytes"):
        LineBuffer().feed(b"x" * (MAX_LINE_BYTES + 1))
