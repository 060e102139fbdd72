"""State goes only to and from holders of a certificate of the job's authority."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import pytest
import torch

from remesh.elasticity.snapshots.choice import SnapshotChoice
from remesh.elasticity.snapshots.snapshot_keeper import SnapshotKeeper
from remesh.elasticity.snapshots.taker import Shelf, SnapshotTaker
from remesh.elasticity.training_state import HeldState
from remesh.foundation.errors import ConfigError
from remesh.layout.from_torch import piece_of
from remesh.wire.tls import Tls
from remesh.wire.token import Token
from tests.support.certificates import make_tls

pytestmark = pytest.mark.procs  # openssl makes the certificates

TOKEN = Token("job", b"0123456789abcdef")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls") / "ours")


def send_to(keeper: SnapshotKeeper, tls: Tls | None) -> list[str]:
    """Events of a worker that sends one snapshot."""
    told: list[str] = []
    weight = torch.arange(6.0)
    held = HeldState(3, 12, {"w": piece_of(weight)}, {})
    choice = SnapshotChoice({"w": frozenset(shard.box for shard in piece_of(weight).shards)}, "")
    shelf = Shelf(1, 0, ("127.0.0.1", keeper.port), TOKEN, tls)
    taker = SnapshotTaker(shelf, lambda _: None, lambda kind, **_: told.append(kind))
    taker.take(held, choice, 1)
    thread = taker._thread
    assert thread is not None
    taker.close()
    thread.join(60)
    return told


def test_snapshot_arrives_through_an_encrypted_connection(ours: Tls) -> None:
    with SnapshotKeeper("127.0.0.1", TOKEN, ours) as keeper:
        assert send_to(keeper, ours) == ["snapshot-kept"]
        assert len(keeper.paths()) == 1


def test_sender_in_the_clear_or_of_another_authority_is_dropped(ours: Tls, tmp_path: Path) -> None:
    with SnapshotKeeper("127.0.0.1", TOKEN, ours) as keeper:
        assert send_to(keeper, make_tls(tmp_path / "others")) == ["snapshot-unsent"]
        with socket.create_connection(("127.0.0.1", keeper.port), 100) as stranger:
            stranger.sendall(b"not a handshake" * 10)
            stranger.settimeout(100)
            with contextlib.suppress(ConnectionResetError):
                assert b"{" not in stranger.recv(100)
        assert not keeper.paths()
        assert send_to(keeper, ours) == ["snapshot-kept"]


def test_receiver_of_another_authority_gets_nothing(ours: Tls, tmp_path: Path) -> None:
    with SnapshotKeeper("127.0.0.1", TOKEN, make_tls(tmp_path / "others")) as keeper:
        assert send_to(keeper, ours) == ["snapshot-unsent"]
        assert not keeper.paths()


def test_files_that_cannot_be_used_are_refused_by_name(ours: Tls, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-key"):
        Tls(ours.certificate, str(tmp_path / "missing"), ours.authority).context(is_server=True)


def test_old_versions_of_the_protocol_are_not_spoken(ours: Tls) -> None:
    assert ours.context(is_server=True).minimum_version is ssl.TLSVersion.TLSv1_3
