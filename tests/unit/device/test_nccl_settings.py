"""Settings of torch by which a process ends because a neighbour did are refused by name, and ours let it go on."""

from __future__ import annotations

import itertools

import pytest

from remesh.device.nccl import NcclMember, check_members
from remesh.device.nccl_settings import let_groups_be_aborted, settings_here, why_it_would_end
from remesh.foundation.errors import ConfigError

HANDLING, BEFORE = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"
DUMPS, MONITORS, WAITS = (
    f"TORCH_NCCL_{name}" for name in ("DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "WAIT_TIMEOUT_DUMP_MILSEC")
)


def test_what_the_user_has_not_set_lets_the_process_go_on() -> None:
    environ = {"HOME": "/root"}
    let_groups_be_aborted(environ)
    assert environ == {"HOME": "/root", HANDLING: "2", DUMPS: "0", WAITS: "0"}
    assert why_it_would_end(settings_here(environ)) is None


@pytest.mark.parametrize("name", [HANDLING, BEFORE])
def test_what_the_user_has_set_stays(name: str) -> None:
    environ = {name: "0", DUMPS: "1", MONITORS: "0", WAITS: "7"}
    chosen = dict(environ)
    let_groups_be_aborted(environ)
    assert environ == chosen
    assert why_it_would_end(settings_here(environ)) is None


@pytest.mark.parametrize("handling", [None, "0", "1", "2", "3", "other"])
@pytest.mark.parametrize("name", [HANDLING, BEFORE])
def test_only_who_aborts_or_leaves_it_to_the_program_goes_on_after_an_error(name: str, handling: str | None) -> None:
    told = why_it_would_end({DUMPS: "0"} | ({} if handling is None else {name: handling}))
    assert (told is None) == (handling in (None, "0", "2"))
    if told is not None:
        assert told.startswith(f"{name} is '{handling}'") and told.endswith("unset it")


def test_a_dump_ends_who_comes_later_unless_nothing_watches() -> None:
    spellings = {None: True, "1": True, "true": True, "0": False, "False": False, "n": False}
    for (dumps, is_dumping), (monitors, is_watching) in itertools.product(spellings.items(), repeat=2):
        settings = {name: value for name, value in ((DUMPS, dumps), (MONITORS, monitors)) if value is not None}
        told = why_it_would_end(settings)
        assert (told is not None) == (is_dumping and is_watching), settings
        if told is not None:
            assert DUMPS in told and f"{MONITORS}=0" in told


def test_the_member_with_such_a_setting_is_named() -> None:
    members = [NcclMember("h", f"GPU-{n}", False, must_outlive=True, settings={DUMPS: str(n)}) for n in range(2)]
    with pytest.raises(ConfigError, match=f"on rank 1 of 2 {DUMPS} is '1', by which the processes that replace lost"):
        check_members(members)
    check_members([NcclMember("h", "GPU-a", False, settings={DUMPS: "1"})])
