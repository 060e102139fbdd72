"""TLS for snapshots and stores between nodes, with certificates that the operator gives.

Both sides show a certificate of the job's authority, and refuse a peer without one. Names in certificates are not
compared: nodes go by addresses that change, and a node with a certificate of this authority belongs here.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """Three files in PEM form."""

    certificate: str
    key: str
    authority: str
    """Certificate of the authority that signed this one and the other nodes'."""

    @classmethod
    def from_message(cls, paths: Sequence[str] | None) -> Tls | None:
        """What `to_message` made, in another process."""
        return None if paths is None else cls(*map(str, paths))

    def to_message(self) -> list[str]:
        """The paths as a message to a worker of this node."""
        return [self.certificate, self.key, self.authority]

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """The TLS context for one side of connections; ConfigError if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"reading --tls-cert {self.certificate}, --tls-key {self.key}, --tls-ca {self.authority}: {error}; "
                "give files in PEM form that this user can read, and a key that fits the certificate"
            ) from error
        return context
