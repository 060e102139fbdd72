import pytest
import torch.distributed as dist

from remesh.comm.lower import LowerHalf, is_network_error
from remesh.errors import PeerError


def test_errors_of_a_lost_peer_are_told_from_errors_of_user_code() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3769")
    assert is_network_error(lost)
    assert is_network_error(dist.DistNetworkError("recvValue failed"))
    assert is_network_error(PeerError("rank 3 is gone"))
    assert not is_network_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_network_error(ValueError("Connection closed by peer"))


def test_a_lost_peer_behind_another_exception_is_still_seen() -> None:
    try:
        try:
            raise RuntimeError("Broken pipe")
        except RuntimeError as cause:
            raise KeyError("while logging") from cause
    except KeyError as error:
        assert is_network_error(error)


def test_a_member_lost_before_the_groups_are_made_is_not_forgotten() -> None:
    """The news of a death may come between the decision for a mesh and the making of its groups."""
    lower = LowerHalf("gloo", "cpu", 5.0)
    lower.sever()
    with pytest.raises(PeerError, match="lost meanwhile"):
        lower.grow(dist.HashStore(), 0, {"dp": 1})
    assert not dist.is_initialized()
    lower.shed()
    lower.grow(dist.HashStore(), 0, {"dp": 1})
    assert lower.mesh is not None
    assert lower.mesh.shape == (1,)
    lower.shed()
    assert not dist.is_initialized()
