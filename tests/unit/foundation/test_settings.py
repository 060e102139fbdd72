"""The table of settings: nothing else reads a variable of ours, and the guide has all that are for users."""

from __future__ import annotations

import os
import re

import pytest

from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import SETTINGS, TIMEOUT_FACTOR, timeout_s
from tests.rules.source_tree import ROOT, SOURCE

_GUIDE = ROOT / "docs" / "cli.md"
_TABLE = re.compile(r"(<!-- settings: .*? -->\n)(.*?)(<!-- /settings -->)", re.DOTALL)
_IN_PYTHON = re.compile(r"""["'](REMESH_[A-Z_]+)["']""")
_IN_C = re.compile(r'getenv\("(REMESH_[A-Z_]+)"\)')


def test_the_table_of_the_guide_is_that_of_the_settings() -> None:
    rows = [
        f"| `{s.name}` | {s.default or '(none)'} | {s.reader} | {s.meaning} |" for s in SETTINGS if not s.is_internal
    ]
    table = "\n".join(["| variable | default | read by | meaning |", "|---|---|---|---|", *rows]) + "\n"
    text = _GUIDE.read_text()
    if os.environ.get("REMESH_WRITE_DOCS"):
        _GUIDE.write_text(_TABLE.sub(lambda found: found[1] + table + found[3], text))
    found = _TABLE.search(_GUIDE.read_text())
    assert found is not None
    assert found[2] == table, "the guide's table of settings is old; write it anew with REMESH_WRITE_DOCS=1"


def test_variables_stand_in_the_table_alone() -> None:
    known = {each.name for each in SETTINGS}
    assert len(known) == len(SETTINGS)
    home = SOURCE / "remesh" / "foundation" / "settings.py"
    in_python = [(path, name) for path in SOURCE.rglob("*.py") for name in _IN_PYTHON.findall(path.read_text())]
    assert not [f"{path}: {name}" for path, name in in_python if path != home]
    in_c = {name for path in SOURCE.rglob("*.c") for name in _IN_C.findall(path.read_text())}
    assert in_c <= known, sorted(in_c - known)


def test_a_setting_has_its_default_where_it_is_not_set() -> None:
    for each in SETTINGS:
        assert each.read({}) == each.default
        assert each.read({each.name: "1"}) == "1"
        assert each.is_on({each.name: "1"})


def test_a_slow_cluster_waits_longer_for_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_s(5.0) == 5.0
    monkeypatch.setenv(TIMEOUT_FACTOR.name, "3")
    assert timeout_s(5.0) == 15.0


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf", "1e9"])
def test_a_factor_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT_FACTOR.name, text)
    with pytest.raises(ConfigError, match=TIMEOUT_FACTOR.name):
        timeout_s(5.0)
