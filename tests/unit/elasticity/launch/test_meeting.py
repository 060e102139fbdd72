"""The door of a job: cards, tokens, and a rendezvous state that only members can write."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from remesh.elasticity.launch.rendezvous import SignedBackend
from remesh.elasticity.store.admission import show_card
from remesh.elasticity.store.card import JobCard, describe_difference
from remesh.elasticity.store.shared import MAX_VALUE_BYTES, JobStore
from remesh.foundation.errors import ConfigError
from remesh.wire.token import Token

SECRET = b"0123456789abcdef"
CARD = JobCard("restart", 1, 2, "train.py")


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a stranger's pickle was opened",)


def test_nodes_of_one_job_pass_the_door_and_another_job_does_not() -> None:
    store = dist.HashStore()
    token = Token("job", SECRET)
    show_card(store, token, CARD)
    show_card(store, token, CARD)
    with pytest.raises(ConfigError, match="max nodes is 2 there and 3 here"):
        show_card(store, token, JobCard("restart", 1, 3, "train.py"))
    with pytest.raises(ConfigError, match="script is 'train.py' there and 'other.py' here"):
        show_card(store, token, JobCard("restart", 1, 2, "other.py"))
    show_card(store, Token("another", SECRET), JobCard("restart", 1, 3, "other.py"))


@pytest.mark.parametrize("secret", [b"", b"another-secret-of-a-stranger"])
def test_wrong_token_is_told_at_the_door_in_both_directions(secret: bytes) -> None:
    for first, second in ((SECRET, secret), (secret, SECRET)):
        store = dist.HashStore()
        show_card(store, Token("job", first), CARD)
        with pytest.raises(ConfigError, match="token does not fit"):
            show_card(store, Token("job", second), CARD)


@pytest.mark.parametrize("garbage", ["x", "ff" * 32, "ff" * 32 + "{}", "\x00" * 200, "a" * 100_000])
def test_garbage_in_place_of_a_card_is_one_clear_error(garbage: str) -> None:
    store = dist.HashStore()
    store.set("remesh/job/card", garbage)
    with pytest.raises(ConfigError, match="token does not fit"):
        show_card(store, Token("job", SECRET), CARD)


def test_card_says_every_difference() -> None:
    text = describe_difference("j", CARD, {"mode": "in-process", "min_nodes": 1, "max_nodes": 2})
    assert text is not None
    assert "mode is 'in-process' there and 'restart' here" in text
    assert "script is None there" in text
    assert describe_difference("j", CARD, CARD.to_json()) is None


def test_rendezvous_state_goes_round_and_a_strangers_is_never_unpickled() -> None:
    store = dist.HashStore()
    inner = C10dRendezvousBackend(store, "job")
    backend = SignedBackend(inner, Token("job", SECRET))
    assert backend.get_state() is None
    written = backend.set_state(b"first")
    assert written is not None
    state, token, is_ours = written
    assert (state, is_ours) == (b"first", True)
    found = backend.get_state()
    assert found is not None and found[0] == b"first"
    # A second writer with an old token sees what is there.
    assert backend.set_state(b"second", token)[2] is True  # type: ignore[index]
    stale = backend.set_state(b"third", token)
    assert stale is not None and (stale[0], stale[2]) == (b"second", False)
    stranger = SignedBackend(inner, Token("job", b"another-secret-of-a-stranger"))
    inner.set_state(pickle.dumps(Bomb()), backend.get_state()[1])  # type: ignore[index]
    for reader in (backend, stranger):
        with pytest.raises(RendezvousStateError, match="not signed with this job's token"):
            reader.get_state()


def test_only_values_signed_for_their_key_are_read() -> None:
    raw = dist.HashStore()
    ours = JobStore(raw, Token("job", SECRET))
    ours.put("gen/1/plan", {"number": 1})
    assert ours.get("gen/1/plan") == {"number": 1}
    assert JobStore(raw, Token("job")).get("gen/1/plan") is None
    assert JobStore(raw, Token("other", SECRET)).get("gen/1/plan") is None
    # A copy under another key is no decision.
    raw.set("gen/2/plan", raw.get("gen/1/plan"))
    assert ours.get("gen/2/plan") is None


@pytest.mark.parametrize("garbage", ["", "{}", "zz" * 40, "ff" * 32 + "null", "x" * (MAX_VALUE_BYTES + 1)])
def test_garbage_in_the_store_counts_as_not_there(garbage: str) -> None:
    raw = dist.HashStore()
    raw.set("end", garbage)
    assert JobStore(raw, Token("job", SECRET)).get("end") is None


def test_what_was_recorded_of_an_earlier_job_does_not_fit_the_next_of_that_name() -> None:
    token = Token("job", SECRET)
    stores = [dist.HashStore(), dist.HashStore()]
    first, second = (JobStore(store, show_card(store, token, CARD)) for store in stores)
    first.put("end", {"ok": True})
    stores[1].set("end", stores[0].get("end"))
    assert first.get("end") == {"ok": True}
    assert second.get("end") is None
