"""What torch's C++ side says of lost stores is kept off an agent's terminal, and nobody else's."""

from __future__ import annotations

import os

import pytest

from remesh.cli import quiet


@pytest.mark.parametrize(("given", "meanwhile"), [(None, "FATAL"), ("INFO", "INFO")])
def test_torch_is_loaded_silent_unless_asked_and_workers_get_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch, given: str | None, meanwhile: str
) -> None:
    if given is None:
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
    seen = []

    def load(_name: str) -> None:
        seen.append(os.environ["TORCH_CPP_LOG_LEVEL"])
        os.environ["SET_WHEN_LOADED"] = "1"

    monkeypatch.setattr(quiet.importlib, "import_module", load)
    before = dict(os.environ)
    quiet.import_quietly("torch")
    assert seen == [meanwhile]
    assert dict(os.environ) == before
