"""Process ids of the ranks' programs, each in a pid namespace of its own.

Each program lives in a pid namespace, where any id is free. But programs use their id as a unique name: they name files
by it in folders that all ranks see, and seed generators of random numbers with it. So each rank of a job has another
one, wherever it runs, and jobs begin at numbers of their own. A restart brings the same id back.

    ids   | 1 ... 999 |  rank 0, its threads and children  |  rank 1, its threads and children  |  ...  | 32767
                      '- first + shift                     '- first + step + shift
"""

from __future__ import annotations

from typing import Final

from remesh.wire.token import Token

_FIRST: Final = 1000
"""The kernel gives no id below 300 a second time."""
_NUM_IDS: Final = 31_000
"""Below 32,768 each kernel has room, however many processes it allows."""


def find_process_id(rank: int, num_ranks: int, token: Token) -> int:
    """The process id of a rank's program. That of another rank differs, up to 31,000 ranks; ``token`` is the job's.

    >>> token = Token("", b"0123456789abcdef")
    >>> [find_process_id(rank, 3, token) - find_process_id(0, 3, token) for rank in range(3)]
    [0, 10333, 20666]
    """
    step = max(1, _NUM_IDS // num_ranks)
    shift = int.from_bytes(token.sign("process ids", b"")[:4]) % step
    return _FIRST + rank * step % _NUM_IDS + shift
