"""Private names of torch are there, and one that is not is told by its name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

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


def _is_traced() -> bool:
    return get_eval_frame_callback() is not None


@torch_private.never_compiled
class _Verbs:
    """One of each kind, which tells whether what it calls is traced."""

    def __init__(self) -> None:
        self.seen = [_is_traced()]

    def method(self) -> None:
        self.seen.append(_is_traced())

    @classmethod
    def of_class(cls) -> bool:
        return _is_traced()

    @property
    def shown(self) -> bool:
        return _is_traced()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self.seen.append(_is_traced())
        yield
        self.seen.append(_is_traced())

    @torch.no_grad()
    def graphless(self) -> None:
        self.seen.append(_is_traced())

    def one_by_one(self) -> Iterator[bool]:
        yield _is_traced()
        yield _is_traced()


@torch_private.never_compiled
def _verb() -> bool:
    return _is_traced()


def _call_all(add: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    verbs = _Verbs()
    verbs.method()
    verbs.graphless()
    found = [_Verbs.of_class(), verbs.shown, _verb()]
    with verbs.around():
        add = add + 1
    return add, [*verbs.seen, *found, *verbs.one_by_one()]


def test_what_is_never_compiled_runs_untraced_below_a_compiled_caller() -> None:
    for _ in range(2):
        added, traced = torch.compile(_call_all, backend="eager")(torch.zeros(1))
        assert added.item() == 1.0
        assert traced == [False] * 10


def test_a_graph_without_cuts_is_refused_with_the_reason() -> None:
    with pytest.raises(Exception, match="Remesh moves values"):
        torch.compile(lambda: _verb(), backend="eager", fullgraph=True)()
