"""Supported platforms of process images: Linux on x86-64."""

from __future__ import annotations

import os
import sys

from remesh.foundation.errors import ConfigError


def check_platform() -> None:
    """Raise `ConfigError` unless this is Linux on x86-64, the one platform the engine knows."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine != "x86_64":
        raise ConfigError(
            f"using process images: this machine is {sys.platform} on {machine}, expected linux on x86_64; "
            "run the job on such machines"
        )
