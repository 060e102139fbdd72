"""Job secret and message authentication (HMAC): which processes belong to the job.

A message is *signed*: HMAC-SHA256 over the job's name, where the message stands (its key in the store), and its bytes.
A copy put under another key or into another job does not fit. A node that joins signs a *challenge* too: a random text
that the job's first node chose; so what was recorded of an earlier job with the same name and secret does not fit
either. A job without a secret signs with an empty one, so that a node with a secret and one without do not fit.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field, replace

MAC_BYTES = 32
MIN_SECRET_BYTES = 16
"""A shorter secret can be guessed."""


@dataclass(frozen=True, slots=True)
class Token:
    """The secret of one job. Its text never shows in a representation, a log or a process list.

    >>> token = Token("job", b"0123456789abcdef")
    >>> sealed = token.seal("end", b"data")
    >>> token.unseal("end", sealed), token.unseal("plan", sealed)
    (b'data', None)
    """

    run_id: str
    secret: bytes = field(default=b"", repr=False)

    def bound_to(self, challenge: str) -> Token:
        """A token whose proofs answer this challenge as well."""
        return replace(self, run_id=f"{self.run_id}\n{challenge}")

    def sign(self, place: str, data: bytes) -> bytes:
        """The proof, MAC_BYTES long."""
        head = f"{len(self.run_id)}:{self.run_id}:{len(place)}:{place}:".encode()
        return hmac.new(self.secret, head + data, hashlib.sha256).digest()

    def seal(self, place: str, data: bytes) -> bytes:
        """Bytes with their proof before them, for `unseal`."""
        return self.sign(place, data).hex().encode() + data

    def unseal(self, place: str, sealed: bytes) -> bytes | None:
        """The content that was sealed for this place with this token; None for anything else."""
        mac, data = sealed[: 2 * MAC_BYTES], sealed[2 * MAC_BYTES :]
        try:
            return data if hmac.compare_digest(self.sign(place, data), bytes.fromhex(mac.decode())) else None
        except ValueError:
            return None
