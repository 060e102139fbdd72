"""Who says that a port is closed: the host's own kernel, which proves that its agent is gone, or a firewall between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.netns import answering_network

pytestmark = pytest.mark.netns


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize(("how", "told"), [("reset", "False"), ("port", "None"), ("prohibited", "None")])
def test_only_a_reset_proves_that_nobody_listens(how: str, told: str) -> None:
    """iptables and nft reject by "port unreachable", unless told otherwise; firewalld by "prohibited"."""
    command = ["unshare", "-n", sys.executable, "-m", answering_network.__name__, how]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.strip() == told
