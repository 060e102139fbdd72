"""A program finds torch as it is, but for our groups."""

from __future__ import annotations

import pytest
from torch._dynamo import trace_rules

from remesh.carried.torch import groups, program_start


def test_the_compiler_of_torch_runs_our_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SKIP_DIRS", "SKIP_DIRS_RE"):
        value = getattr(trace_rules, name)
        monkeypatch.setattr(trace_rules, name, list(value) if isinstance(value, list) else value)
    assert not trace_rules.check_file(groups.__file__).skipped
    program_start._leave_out_ours(trace_rules)
    assert trace_rules.check_file(groups.__file__).skipped
    assert not trace_rules.check_file("/somewhere/train.py").skipped
