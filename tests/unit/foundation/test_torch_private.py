"""Private names of torch are there, and one that is not is told by its name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from remesh.foundation import torch_private
from remesh.foundation.errors import ConfigError


def test_this_torch_has_every_private_name_that_is_used() -> None:
    assert torch_private.missing_names() == []


def test_a_name_that_torch_lacks_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed._functional_collectives.AsyncCollectiveTensor")
    lacking = "torch.distributed._functional_collectives.AsyncCollectiveTensor"
    with pytest.raises(ConfigError, match=rf"torch {torch.__version__.split('+')[0]}.* has no {lacking}"):
        _ = torch_private.AsyncCollectiveTensor
    assert lacking in torch_private.missing_names()


@pytest.mark.parametrize(
    ("home", "name", "user"),
    [
        ("torch.distributed.Backend", "_plugins", "remesh.foundation.torch_private"),
        ("torch.distributed.distributed_c10d", "_world", "remesh.foundation.torch_private"),
        (torch_private.FSDP_MODULE, "_get_fsdp_state", "remesh.elasticity.gradients"),
    ],
)
def test_a_member_that_torch_lacks_is_told_when_its_user_is_imported(
    home: str, name: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(importlib.import_module(user).__file__ or "").read_text()
    monkeypatch.delattr(f"{home}.{name}")
    with pytest.raises(ConfigError, match=rf"it has no [\w.]+\.{name}, which Remesh needs"):
        exec(compile(source, user, "exec"), {"__name__": user})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torch_private.nonsense
