"""What the examination of a machine says where something is missing."""

from __future__ import annotations

import pytest

from remesh.carried.images import doctor


def _by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in findings}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda: iter([]))


def test_another_platform_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    (finding,) = doctor.examine_machine()
    assert not finding.good
    assert "Linux" in finding.advice


def test_a_machine_without_user_namespaces_gets_the_command_that_mends_it(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor, "_text", lambda path: "0" if "max_user" in path else None)
    finding = _by_name(doctor.examine_machine())["namespaces"]
    assert not finding.good
    assert "user.max_user_namespaces" in finding.advice


def test_yama_may_forbid_tracing(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_text", lambda path: "3" if "yama" in path else None)
    assert not _by_name(doctor.examine_machine())["tracing"].good


def test_what_is_good_needs_no_advice_and_what_is_not_has_some(quiet: None) -> None:
    for finding in doctor.examine_machine():
        assert finding.good == (not finding.advice), finding
