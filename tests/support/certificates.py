"""TLS certificates of a test authority, made by openssl, for tests and benchmarks of encrypted jobs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from remesh.wire.tls import Tls


def make_tls(folder: Path, days: int = 1) -> Tls:
    """An authority of its own, and a certificate by it; one of -1 days has expired."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *kind, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "1")
    openssl("req", *kind, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    sign_again(folder, days)
    return Tls(str(folder / "node.pem"), str(folder / "node.key"), str(folder / "ca.pem"))


def sign_again(folder: Path, days: int, name: str = "node.pem") -> str:
    """Another certificate for the same node by the same authority; its path."""
    sign = ("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    subprocess.run(
        ["openssl", *sign, "-out", name, "-days", str(days)], cwd=folder, check=True, capture_output=True, timeout=60
    )
    return str(folder / name)
