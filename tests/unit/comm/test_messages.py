"""Messages between the parts of a job: bounded, data only, and only for who knows the token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.comm.messages import (
    MAX_FRAME_BYTES,
    FrameReader,
    compute_proof,
    is_proof,
    make_nonce,
    pack_frame,
)
from remesh.errors import FormatError

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(st.dictionaries(st.text(), _VALUES)), st.lists(st.integers(1, 50)))
def test_any_cutting_of_the_stream_gives_the_same_messages(bodies: list[dict[str, object]], cuts: list[int]) -> None:
    messages = [{**body, "type": "x"} for body in bodies]
    stream = b"".join(map(pack_frame, messages))
    reader, found = FrameReader(), []
    for cut in cuts:
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found + reader.feed(stream) == messages


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FormatError, match=f"at most {MAX_FRAME_BYTES}"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"\x80\x04.", b"[]", b"{}", b'{"type":1}', b"{"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError, match="reading a message"):
        FrameReader().feed(len(body).to_bytes(4, "big") + body)


def test_only_the_token_answers_a_nonce() -> None:
    nonce = make_nonce()
    assert is_proof(b"token", nonce, compute_proof(b"token", nonce))
    assert not is_proof(b"token", nonce, compute_proof(b"other", nonce))
    assert not is_proof(b"token", nonce, compute_proof(b"token", make_nonce()))
