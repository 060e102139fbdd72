"""An agent that is woken: it looks for news now."""

from pathlib import Path

from remesh.elasticity.node.switchboard import Switchboard

LONG_S = 3600.0


def test_an_agent_that_is_called_ends_its_wait_without_a_word(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with Switchboard(tmp_path / "a", "127.0.0.1") as caller, Switchboard(tmp_path / "b", "127.0.0.1") as called:
        caller.wake([("127.0.0.1", called.pulse_port)])
        assert called.wait(LONG_S) == []
        caller.wait(0.0)


def test_nobody_waits_for_agents_that_are_gone_or_have_a_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with Switchboard(tmp_path / "a", "127.0.0.1") as caller:
        with Switchboard(tmp_path / "b", "127.0.0.1") as gone:
            port = gone.pulse_port
        caller.wake([("127.0.0.1", port), ("::1", port), ("no-such-host.invalid", port)])
        assert caller.wait(0.0) == []
