"""The entry point ``torchrun.handlers``, which torch looks up each time that it loads its rendezvous.

torch does so in the middle of its own import, and also for other rendezvous backends, so nothing is loaded here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def handler_creator() -> Callable[[Any], Any]:
    """A function that makes a rendezvous handler of torch's ``RendezvousParameters``."""
    return _create_rendezvous


def _create_rendezvous(parameters: Any) -> Any:
    return importlib.import_module("remesh.integrations.torchrun").create_rendezvous(parameters)
