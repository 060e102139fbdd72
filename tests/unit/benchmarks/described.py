"""What every report says of its run, as tests of pages need it."""

from __future__ import annotations

from typing import Any

DESCRIBED: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "machine": {"system": "Linux-6.1", "processor": "x86_64", "num_cores": 2},
    "load_before": [0.1, 0.2, 0.3],
    "load": [2.0, 1.0, 0.5],
    "versions": {"python": "3.11.7 (main)", "torch": "2.13.0"},
    "quick": False,
}
