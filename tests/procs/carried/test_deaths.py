"""Death at every step of an image: a dump of who is killed ends by name, and who waits for that end sees it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.carried.images import Upper, dump_image, freeze
from remesh.carried.images.write.dump_member import Phases
from remesh.foundation.errors import EndedError
from remesh.foundation.linux.procfs import children_of
from tests.procs.carried.torch_jobs import NEEDS_IMAGES
from tests.procs.stage import PATIENCE_S, WAIT_FOR_GO, Stage, wait_for

pytestmark = [pytest.mark.procs, NEEDS_IMAGES]

_FAMILY = f"""
import signal
child = os.fork()
if child == 0:
    threading.Thread(target=signal.pause).start()
    signal.pause()
threading.Thread(target=threading.Event().wait, daemon=True).start()
{WAIT_FOR_GO}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_STEPS = ("inspect", "freeze", "survey", "scan", "state", "pages", "track", "hash", "commit", "written")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def _kill_at(step: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process killed when the first phase of this name begins."""
    phase, first = Phases.phase, itertools.count()

    @contextlib.contextmanager
    def killing(self: Phases, name: str) -> Iterator[None]:
        if name == step and not next(first):
            os.kill(victim, signal.SIGKILL)
        with phase(self, name):
            yield

    monkeypatch.setattr(Phases, "phase", killing)


def _dump(upper: Upper, image: Path, step: str, victim: int) -> None:
    """By a keeper's way: freeze, dump, stand until the end of the round."""
    if step in ("inspect", "freeze"):
        dump_image(upper.pid, image, track=True)
        return
    with freeze(upper.pid) as frozen:
        dump_image(frozen, image, track=True)
        if step == "written":
            os.kill(victim, signal.SIGKILL)
            if victim == upper.pid:
                wait_for(lambda: upper.poll() is not None, "its end is not seen while it stands")


@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize("who", ["program", "child"])
def test_a_process_that_is_killed_at_any_step_of_an_image_is_named_and_reaped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, who: str, step: str
) -> None:
    upper = stage.start(_FAMILY)
    (child,) = children_of(upper.pid)
    victim = upper.pid if who == "program" else child
    image = stage.folder / "image"
    with monkeypatch.context() as patched:
        _kill_at(step, victim, patched)
        try:
            _dump(upper, image, step, victim)
        except EndedError as error:
            assert str(upper.pid) in str(error)
            assert not image.exists()
    if who == "program":
        assert upper.wait(PATIENCE_S) == -signal.SIGKILL
    else:
        (stage.work / "go").touch()
        assert stage.finish(upper) == "-9\n"
    upper.close()
