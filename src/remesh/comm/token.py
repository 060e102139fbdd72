"""Who belongs to the job? A secret that all its nodes hold, and proofs of holding it that do not show it.

A message is *signed*: HMAC-SHA256 over the job's name, where the message stands (its key in the store), and its bytes.
A copy put under another key or into another job does not fit. Whoever joins signs a *challenge* too: a random text that
the job's first node chose; so what was recorded of an earlier job with the same name and secret does not fit either. A
job without a secret signs with an empty one, so that a node with a secret and one without do not fit.
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
    >>> mac = token.sign("end", b"data")
    >>> token.fits("end", b"data", mac), token.fits("plan", b"data", mac)
    (True, False)
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

    def fits(self, place: str, data: bytes, mac: bytes) -> bool:
        """Whether ``mac`` is the proof for these bytes in this place; takes the same time for every wrong one."""
        return hmac.compare_digest(self.sign(place, data), mac)
