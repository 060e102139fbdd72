"""torchrun's command lines mean the same to us: torch's own parser is walked, flag by flag."""

from __future__ import annotations

from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from remesh.cli.run import run
from remesh.elasticity.launch.flags import FLAGS, LIST, OUR_FLAGS, SWITCH, TORCHRUN_FLAGS, complete_name, find_flag
from remesh.elasticity.launch.request import DEFAULT_MASTER_PORT

_OF_TORCHRUN_ALONE = ("help", "print_completion")
ACTIONS = {
    action.dest: action
    for action in get_args_parser()._actions
    if action.option_strings and action.dest not in _OF_TORCHRUN_ALONE
}
OPTIONS = {option.name: option for option in run.params if isinstance(option, click.Option)}


def _meaning(dest: str, value: Any) -> Any:
    """Newer torches say None for a port that is not given, older ones the port that this means."""
    return DEFAULT_MASTER_PORT if dest == "master_port" and value is None else value


def parse(*line: str) -> dict[str, Any]:
    """The values that our command gives to its function."""
    return run.make_context("run", [*line, "script.py"]).params


def test_torchruns_table_has_exactly_torchruns_flags() -> None:
    # Of those that came with a newer torch the one that runs here may lack some.
    assert {flag.dest for flag in TORCHRUN_FLAGS if not flag.is_newer or flag.dest in ACTIONS} == set(ACTIONS)
    assert not {flag.dest for flag in OUR_FLAGS} & set(ACTIONS)
    assert len({flag.dest for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("dest", sorted(ACTIONS))
def test_flag_has_torchruns_spellings_default_and_choices(dest: str) -> None:
    action, option = ACTIONS[dest], OPTIONS[dest]
    for spelling in action.option_strings:
        name = spelling.lstrip("-")
        assert complete_name(name) in [one.lstrip("-") for one in option.opts], spelling
    default = list(option.default) if find_flag(dest).kind == LIST else option.default
    assert _meaning(dest, default) == _meaning(dest, action.default)
    assert (find_flag(dest).kind == SWITCH) == (action.nargs == 0)
    assert set(find_flag(dest).choices) == set(action.choices or ())


@pytest.mark.parametrize("dest", sorted(ACTIONS))
def test_flag_takes_torchruns_variable_and_the_command_line_wins(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    action = ACTIONS[dest]
    if type(action).__name__ not in ("env", "check_env"):
        assert OPTIONS[dest].envvar is None
        return
    value = {"int": "7", "float": "0.5"}.get(getattr(action.type, "__name__", ""), "1")
    value = action.choices[1] if isinstance(action.choices, list) else value
    monkeypatch.setenv(f"PET_{dest.upper()}", value)
    theirs = getattr(get_args_parser().parse_args(["script.py"]), dest)
    ours = parse()[dest]
    assert ours == (tuple(theirs) if find_flag(dest).kind == LIST else theirs)


@pytest.mark.parametrize(
    "line",
    [
        ["--nproc_per_node", "4", "--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv_endpoint=head:1", "--rdzv-id", "x"],
        ["--standalone", "--nproc-per-node=gpu", "-r", "3", "-t", "0:1,1:2", "--max_restarts", "2"],
        ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "4000", "--nproc-per", "2"],
        ["-m", "--rdzv-conf", "join_timeout=5,last_call_timeout=1", "--shutdown-timeout", "3", "--monitor-int", "0.5"],
        ["--no-python", "--log_dir", "logs", "--duplicate_stdout_filters", "apple,a,,b", "--virtual-local-rank"],
    ],
)
def test_command_line_is_read_as_torchrun_reads_it(line: list[str]) -> None:
    if "--shutdown-timeout" in line and "shutdown_timeout" not in ACTIONS:
        pytest.skip("this torch has no --shutdown-timeout")
    theirs = vars(get_args_parser().parse_args([*line, "script.py"]))
    ours = parse(*line)
    for dest in ACTIONS:
        meant = tuple(theirs[dest]) if isinstance(theirs[dest], list) else theirs[dest]
        assert _meaning(dest, ours[dest]) == _meaning(dest, meant), dest


@pytest.mark.parametrize("rest", [["a", "--nnodes", "9"], ["--", "-m"], ["-t", "3", "--unknown"], []])
def test_what_follows_the_script_belongs_to_the_script(rest: list[str]) -> None:
    params = run.make_context("run", ["-m", "job.main", *rest]).params
    assert (params["script"], list(params["arguments"]), params["nnodes"]) == ("job.main", rest, "1:1")


def test_flag_that_nobody_knows_is_refused_with_exit_code_2() -> None:
    with pytest.raises(click.NoSuchOption) as caught:
        parse("--nodes-per-proc", "2")
    assert caught.value.exit_code == 2


def test_beginning_that_fits_two_flags_is_left_as_it_is() -> None:
    assert complete_name("rdzv") == "rdzv"
    assert complete_name("m") == "m"
