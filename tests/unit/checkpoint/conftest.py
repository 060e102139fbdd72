"""Fixtures of this room: the places where checkpoints are kept."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.stores import BUCKET, object_store


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with object_store() as environment:
        yield environment


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of its own for the test, in each kind of store, as text."""
    if request.param == "local":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    for name, value in request.getfixturevalue("s3_environment").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4()}"
