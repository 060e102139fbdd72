"""What tests with processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.carried.images import freeze
from remesh.foundation.errors import ConfigError
from tests.procs.stage import WAIT_FOR_GO, Stage


@pytest.fixture(scope="session")
def able(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where processes cannot be put into namespaces or traced."""
    stage = Stage(tmp_path_factory.mktemp("able"))
    try:
        upper = stage.start(WAIT_FOR_GO)
        freeze(upper.pid).thaw()
    except ConfigError as error:
        pytest.skip(f"needs namespaces and ptrace: {error}")
    finally:
        stage.close()


@pytest.fixture
def stage(tmp_path: Path, able: None) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()
