"""An error is the network's by where it comes from, never by its text alone."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from remesh.foundation.errors import PeerError
from remesh.groups.blame import is_network_error, is_network_text

TEXTS = (
    "Connection refused",
    "the database says: Broken pipe",
    "NCCL_DEBUG must be one of INFO, WARN",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1",
    "process group timed out",
)


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def both(error: Exception) -> tuple[bool, bool]:
    """Judged here, and from its text in another process."""
    return is_network_error(error), is_network_text("".join(traceback.format_exception(error)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [RuntimeError, OSError, ConnectionRefusedError, ValueError])
def test_an_error_of_the_program_is_its_own_whatever_it_says(text: str, kind: type[Exception]) -> None:
    def program() -> None:
        raise kind(text)

    assert both(raised(program)) == (False, False)


def test_an_error_of_a_c_function_that_is_not_torchs_is_the_programs() -> None:
    stream = io.BytesIO()
    stream.close()
    assert both(raised(stream.read)) == (False, False)
    assert both(raised(lambda: torch.zeros(2) + torch.zeros(3))) == (False, False)


def test_a_program_that_names_its_error_as_torch_does_is_not_believed() -> None:
    class DistNetworkError(RuntimeError):
        """A class of the program."""

    def program() -> None:
        raise DistNetworkError("Connection refused")

    assert both(raised(program)) == (False, False)


def test_errors_of_torch_distributed_are_the_networks() -> None:
    def unreachable() -> None:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=10))

    assert both(raised(unreachable)) == (True, True)

    def lost() -> None:
        raise PeerError("a peer is gone")

    assert both(raised(lost)) == (True, True)


def test_what_followed_from_the_networks_error_is_the_networks() -> None:
    def program() -> None:
        try:
            raise PeerError("a peer is gone")
        except PeerError as error:
            raise ValueError("no batch") from error

    assert both(raised(program)) == (True, True)


def test_errors_of_a_lost_peer_are_told_from_errors_of_user_code() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3769")
    assert is_network_error(lost)
    assert is_network_error(dist.DistNetworkError("recvValue failed"))
    assert is_network_error(PeerError("rank 3 is gone"))
    assert not is_network_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_network_error(ValueError("Connection closed by peer"))


def test_a_text_of_gloo_that_no_statement_raised_is_the_networks() -> None:
    error = RuntimeError(TEXTS[3])
    assert is_network_error(error)
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    work.wait()\n'
    text += f"RuntimeError: {error}\n"
    assert is_network_text(text)
    assert not is_network_text(text.replace("work.wait()", "raise RuntimeError(text)"))
    assert not is_network_text(text.replace(str(error), "Connection refused"))
    inside = text.replace("train.py", "/lib/torch/distributed/distributed_c10d.py")
    assert is_network_text(inside.replace(str(error), "Connection refused"))
    assert is_network_text(inside.replace(str(error), "NCCL communicator was aborted on rank 0."))
    assert not is_network_text(inside.replace(str(error), "Distributed package doesn't have NCCL built in"))
    assert not is_network_text("") and not is_network_text("Connection refused")
