"""Does anybody listen at an endpoint? A probe that asks nothing of whoever does."""

from __future__ import annotations

import socket

PROBE_TIMEOUT_S = 0.2


def is_listening(address: str, port: int, limit_s: float = PROBE_TIMEOUT_S) -> bool | None:
    """Whether a port accepts a connection; False when it is refused, None when nothing answers."""
    try:
        socket.create_connection((address, port), limit_s).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
