"""What is wrong with a command is said before anything starts."""

from __future__ import annotations

import socket
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from click.core import ParameterSource
from torch.distributed.run import config_from_args, get_args_parser

from remesh.cli.run import run
from remesh.elasticity.launch.flag_checks import wait_for_names
from remesh.elasticity.launch.flags import Mode
from remesh.elasticity.launch.request import (
    Request,
    check_request,
    complete_endpoint,
    describe_uncovered,
    in_process_job,
    parse_nnodes,
    restart_job,
    token_of,
)
from remesh.foundation.errors import ConfigError
from tests.support.certificates import make_tls


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    return str(path)


def request_of(script: str, *line: str) -> Request:
    context = run.make_context("run", [*line, script])
    values = {key: value for key, value in context.params.items() if key not in ("script", "arguments")}
    given = {name for name in values if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    return Request(values, frozenset(given), script, ())


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4)), ("3:", (3, 3))])
def test_numbers_of_nodes_are_read_as_torchrun_reads_them(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "4:1", ":2", "a", "1:2:3", "-1"])
def test_senseless_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_nnodes(text)


def test_quotes_around_the_options_of_a_rendezvous_are_taken_away(script: str) -> None:
    """torch's own tests and examples have them where no shell does."""
    line = ["--nnodes", "1:2", "--rdzv-conf", "'join_timeout=7,last_call_timeout=2'"]
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "head:1", "--rdzv-id", "x"]
    for mode in Mode:
        request = request_of(script, "--mode", mode.value, *line, *place)
        check_request(request)
    meeting = in_process_job(request).rules.meeting
    assert (meeting.join_timeout_s, meeting.last_call_s) == (7.0, 2.0)
    configs = restart_job(request, Path(script).parent).config.rdzv_configs
    assert (configs["join_timeout"], configs["last_call_timeout"]) == ("7", "2")


@pytest.mark.parametrize("text", ["::1", "[::1]", "fe80::2%lo"])
def test_an_address_of_ipv6_gets_a_port_too(text: str) -> None:
    assert complete_endpoint(text) == f"[{text.strip('[]')}]:29400"


def test_endpoint_gets_torchruns_port_or_a_free_one() -> None:
    assert complete_endpoint("head") == "head:29400"
    assert complete_endpoint("head:1234") == "head:1234"
    host, port = complete_endpoint("").split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


@pytest.mark.parametrize(
    ("mode", "line", "named"),
    [
        (Mode.RESTART, ["--nnodes", "4:2"], "--nnodes '4:2'"),
        (Mode.IN_PROCESS, ["--exclude-after", "-1"], "--exclude-after -1: expected 0 or more"),
        (Mode.RESTART, ["--max-restarts", "-1"], "--max-restarts -1"),
        (Mode.RESTART, ["--no-python", "-m"], "--no-python"),
        (Mode.RESTART, ["--no-python"], "not a program on the PATH"),
        (Mode.RESTART, ["--tls-cert", "a"], "has no --tls-cert, since its agents and stores are torch's"),
        (Mode.RESTART, ["--last-call", "3"], "restart mode has no --last-call;"),
        (
            Mode.IN_PROCESS,
            ["--role", "r", "--start-method", "fork"],
            "has no --role, --start-method;",
        ),
    ],
)
def test_senseless_flags_are_named(script: str, mode: Mode, line: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_request(request_of(script, "--mode", mode.value, *line))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("flag", ["--log-dir", "--events-dir"])
def test_folder_that_cannot_be_written_is_named(script: str, flag: str, mode: Mode) -> None:
    """A file stands where a folder of logs should be: holds for every user, root too."""
    with pytest.raises(ConfigError, match=f"{flag} .*train.py/logs cannot be written"):
        check_request(request_of(script, "--mode", mode.value, flag, f"{script}/logs"))


@pytest.mark.parametrize("factor", ["-1", "0.5", "1"])
def test_factor_that_would_leave_out_anybody_is_refused(script: str, factor: str) -> None:
    with pytest.raises(ConfigError, match="--exclude-slower"):
        check_request(request_of(script, "--exclude-slower", factor))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["--nproc-per-node", "many"], "many"),
        (["--redirects", "x"], "x does not match"),
        (["--local-ranks-filter", "a"], "local_ranks_filter"),
        (["--logs-specs", "nobody"], "nobody"),
        (["--shutdown-timeout", "-3"], "-3"),
    ],
)
def test_what_torch_refuses_is_an_input_error(script: str, line: list[str], named: str, tmp_path: Path) -> None:
    if "--shutdown-timeout" in line and not hasattr(get_args_parser().parse_args(["x.py"]), "shutdown_timeout"):
        pytest.skip("this torch has no --shutdown-timeout")
    with pytest.raises(ConfigError, match=named):
        restart_job(request_of(script, *line), tmp_path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["--nproc-per-node", "0"], "expected 1 or more"),
        (["--nproc-per-node", "many"], "auto, cpu, gpu"),
        (["--rdzv-backend", "etcd"], "c10d store, found --rdzv-backend etcd"),
        (["--rdzv-endpoint", "head"], "--rdzv-id"),
        (["--rdzv-conf", "color=blue"], "color"),
        (["--tee", "0:3"], "for all workers"),
        (["--tee", "9"], "stream choice"),
    ],
)
def test_what_in_process_mode_refuses_is_an_input_error(script: str, line: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        in_process_job(request_of(script, *line))


def test_a_flag_of_a_newer_torch_keeps_its_default(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.15 wants to find ``log_line_prefix_template``, a later one may want another, unknown to us."""

    def newer_parser() -> ArgumentParser:
        parser = get_args_parser()
        parser.add_argument("--from-the-future", default="as ever")
        return parser

    def newer_config(asked: Namespace) -> Any:
        assert asked.from_the_future == "as ever"
        return config_from_args(asked)

    monkeypatch.setattr("remesh.elasticity.launch.request.get_args_parser", newer_parser)
    monkeypatch.setattr("remesh.elasticity.launch.request.config_from_args", newer_config)
    assert restart_job(request_of(script, "--nproc-per-node", "3"), tmp_path).config.nproc_per_node == 3


def test_a_flag_that_this_torch_lacks_is_refused_when_it_is_given(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = ArgumentParser()
    parser.add_argument("training_script")
    monkeypatch.setattr("remesh.elasticity.launch.request.get_args_parser", lambda: parser)
    with pytest.raises(ConfigError, match="has no --log-line-prefix-template; leave it out"):
        restart_job(request_of(script, "--log-line-prefix-template", "${rank}: "), tmp_path)


def test_fixed_ranks_name_the_store_of_an_in_process_job(script: str) -> None:
    line = ["--nnodes", "2", "--master-addr", "head", "--rdzv-id", "mine"]
    jobs = [in_process_job(request_of(script, *line, "--node-rank", rank)) for rank in ("0", "1")]
    assert [(job.endpoint, job.hosts_store, job.run_id) for job in jobs] == [
        ("head:29500", True, "mine"),
        ("head:29500", False, "mine"),
    ]


def test_torchs_meeting_settings_hold_in_process_too(script: str) -> None:
    line = ["--nnodes", "1:2", "--rdzv-conf", "join_timeout=7,last_call_timeout=2", "--shutdown-timeout", "3"]
    rules = in_process_job(request_of(script, *line)).rules
    assert (rules.meeting.join_timeout_s, rules.meeting.last_call_s, rules.exit_timeout_s) == (7, 2, 3)


def test_job_of_one_node_gets_a_free_port_unless_it_names_one(script: str, tmp_path: Path) -> None:
    free = restart_job(request_of(script), tmp_path).config
    assert (free.rdzv_backend, free.rdzv_endpoint) == ("c10d", "localhost:0")
    fixed = restart_job(request_of(script, "--master-port", "1234"), tmp_path).config
    assert (fixed.rdzv_backend, fixed.rdzv_endpoint) == ("static", "127.0.0.1:1234")


@pytest.mark.parametrize("text", ["import torch\n", "import remesh\nremesh.elastic(train, mesh={'dp': -1})\n"])
def test_the_mode_is_what_is_asked_for_whatever_the_script_says(script: str, text: str) -> None:
    Path(script).write_text(text)
    assert request_of(script).mode is Mode.IN_PROCESS
    assert request_of(script, "--mode", "restart").mode is Mode.RESTART


def test_token_comes_from_a_file_or_the_environment_and_never_shows(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMESH_TOKEN", raising=False)
    assert token_of(request_of(script)).secret == b""
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    token = token_of(request_of(script, "--token-file", str(path)))
    assert token.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(token)
    monkeypatch.setenv("REMESH_TOKEN", "fedcba9876543210")
    assert token_of(request_of(script)).secret == b"fedcba9876543210"
    monkeypatch.setenv("REMESH_TOKEN", "short")
    with pytest.raises(ConfigError, match="found 5 bytes, expected 16"):
        token_of(request_of(script))
    with pytest.raises(ConfigError, match="--token-file"):
        token_of(request_of(script, "--token-file", str(tmp_path / "none")))


@pytest.mark.procs
def test_tls_beyond_loopback_says_what_it_does_not_cover(script: str, tmp_path: Path) -> None:
    tls = make_tls(tmp_path / "tls")
    files = ["--tls-cert", tls.certificate, "--tls-key", tls.key, "--tls-ca", tls.authority]
    abroad = in_process_job(request_of(script, *files, "--local-addr", "10.0.0.1"))
    assert "collectives on 10.0.0.1 (gloo, NCCL) are not encrypted" in str(describe_uncovered(abroad, {}))
    assert describe_uncovered(abroad, {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}) is None
    local = request_of(script, *files, "--local-addr", "127.0.0.1")
    assert describe_uncovered(in_process_job(local), {}) is None
    assert describe_uncovered(in_process_job(request_of(script, "--local-addr", "10.0.0.1")), {}) is None


WRONG = [
    *(("--nproc-per-node", text) for text in ("0", "-1", "many", "1.5", "")),
    *(("--rdzv-backend", text) for text in ("foo", "")),
    *(("--rdzv-endpoint", text) for text in ("127.0.0.1:99999", "127.0.0.1:x", "127.0.0.1:-1", "a b:1", ":1")),
    *(("--master-port", text) for text in ("99999", "-1")),
    *(("--metrics-port", text) for text in ("65536", "-1")),
    *(("--node-rank", text) for text in ("-1", "7")),
    *(("--monitor-interval", text) for text in ("-1", "0", "nan")),
    *(("--signals-to-handle", text) for text in ("SIGFOO", "15", "SIGKILL")),
    *(("--local-ranks-filter", text) for text in ("a", "0;1")),
    *(("--redirects", text) for text in ("7", "0:x")),
    *(("--rdzv-conf", text) for text in ("a", "=1", "join_timeout=soon", "last_call_timeout=-1")),
    *(("--max-restarts", "-1"), ("--shutdown-timeout", "-1"), ("--nnodes", "0")),
    *(("--event-log-handler", "nobody"), ("--logs-specs", "nobody")),
]


@pytest.mark.parametrize("mode", ["in-process", "restart"])
@pytest.mark.parametrize(("flag", "text"), WRONG, ids=lambda text: text)
def test_wrong_values_of_flags_are_input_errors_before_anything_starts(
    script: str, tmp_path: Path, mode: str, flag: str, text: str
) -> None:
    others = ["--rdzv-id", "x"] if flag == "--rdzv-endpoint" else []
    others += ["--rdzv-backend", "c10d"] if flag == "--rdzv-endpoint" and mode == "restart" else []
    request = request_of(script, "--mode", mode, *others, f"{flag}={text}")
    with pytest.raises(ConfigError):
        check_request(request)
        in_process_job(request) if mode == "in-process" else restart_job(request, tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_with_a_main_is_a_script_as_for_python(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    if is_there:
        (folder / "__main__.py").touch()
        check_request(request_of(str(folder)))
    else:
        with pytest.raises(ConfigError, match="a folder without __main__.py"):
            check_request(request_of(str(folder)))


def test_a_host_that_nobody_knows_is_told_at_once_and_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, _port: None) -> list[object]:
        if host != "head":
            raise socket.gaierror(-2, "Name or service not known")
        return []

    told: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wait_for_names(["nobody:1", "head:29400"], 60.0, told.append)
    wait_for_names([], 60.0, told.append)
    assert not told
    with pytest.raises(ConfigError, match="could not look up the host of 'nobody:29400': Name or service not known"):
        wait_for_names(["nobody:29400"], 0.0, told.append)
    monkeypatch.setattr(time, "sleep", lambda _: monkeypatch.setattr(socket, "getaddrinfo", lambda *_: []))
    wait_for_names(["nobody:1"], 60.0, told.append)
    assert told == ["cannot look up the host of 'nobody:1': Name or service not known; trying again for 60 s"]
