"""Checks of what this machine offers for process images, with advice: `examine_machine`.

Each finding stands for one thing that the engine needs. The last ones are the proof: a small process is started,
imaged, imaged again as an increment, killed, restored from that and ended, in a folder that is removed.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remesh.carried.images.form.kinds import Command, Site
from remesh.carried.images.look.frozen import freeze
from remesh.carried.images.restore.upper import restore_upper, start_upper
from remesh.carried.images.write.dump import dump_image
from remesh.foundation.errors import Error
from remesh.foundation.linux.calls import as_subreaper

_PROBE_TIMEOUT_S: Final = 30.0
_PROBE: Final = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str  # "user namespaces"
    good: bool
    needed: bool  # False: something works less well without it
    found: str  # what is there
    advice: str  # what to do; "" when good


def examine_machine() -> list[Finding]:
    """Check all that process images need or use, on this machine and with the rights of this process."""
    findings = [_platform()]
    if findings[0].good:
        findings += [_rights(), _root(), _tracing(), _clocks(), *_trial()]
    return findings


def _platform() -> Finding:
    found = f"{sys.platform} on {platform.machine()}, kernel {platform.release()}"
    good = sys.platform == "linux" and platform.machine() == "x86_64"
    return Finding("platform", good, True, found, "" if good else "process images need Linux on x86-64")


def _rights() -> Finding:
    what = "namespaces"
    if os.geteuid() == 0:
        return Finding(what, True, True, "this process is root", "")
    found = f"user {os.geteuid()}, in a user namespace"
    problems = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, command) in problems.items():
        if _text(path) == bad:
            return Finding(what, False, True, f"user {os.geteuid()}; {path} is {bad}", f"run as root, or `{command}`")
    return Finding(what, True, True, found, "")


def _root() -> Finding:
    good = os.geteuid() == 0
    found = "this process is root" if good else f"user {os.geteuid()}, who needs no more for jobs on this host"
    advice = "" if good else "hosts made on this machine (--testbed) need root"
    return Finding("root", good, False, found, advice)


def _tracing() -> Finding:
    scope = _text("/proc/sys/kernel/yama/ptrace_scope")
    found = "no limits by Yama" if scope is None else f"Yama's ptrace_scope is {scope}"
    good = scope is None or int(scope) < 2 or (int(scope) == 2 and os.geteuid() == 0)
    return Finding("tracing", good, True, found, "" if good else "`sysctl kernel.yama.ptrace_scope=1`")


def _clocks() -> Finding:
    good = Path("/proc/self/ns/time").exists()
    advice = "" if good else "a restored program sees its clocks jump; Linux 5.6 with CONFIG_TIME_NS is needed"
    return Finding("time namespaces", good, False, "available" if good else "missing", advice)


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _trial() -> Iterator[Finding]:
    """Image and restore a small process, in the folder where jobs have theirs."""
    what = "image and restore of a process"
    folder = Path(tempfile.mkdtemp(prefix="remesh-doctor-"))
    try:
        began = time.monotonic()
        with (
            as_subreaper()
        ):  # which a process that starts an upper half becomes, and this process is to stay what it was
            why_not = _image_and_restore(folder)
    except (Error, OSError) as error:
        yield Finding(what, False, True, str(error), "see the findings above; running as root gives every right needed")
    else:
        yield Finding(what, True, True, f"done in {time.monotonic() - began:.1f} s", "")
        advice = "every image is a full one; Linux 6.7 is needed, and the right to userfaultfd" if why_not else ""
        yield Finding("increments", not why_not, False, why_not or "one was made upon it and restored", advice)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _image_and_restore(folder: Path) -> str:
    """Image and restore the process; returns why the second image is no increment, or ""."""
    paths = [folder / name for name in ("channel", "out", "err")]
    for path in paths:
        path.touch()
    site = Site(*map(str, paths))
    upper = start_upper(Command((sys.executable, "-S", "-c", _PROBE), {}, str(folder)), site)
    try:
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        while not paths[1].read_text() and upper.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with freeze(upper.pid) as frozen:
            why_not = dump_image(frozen, folder / "first", track=True).not_tracked
            report = dump_image(frozen, folder / "image", previous=folder / "first")
            upper.kill()
        if not (why_not or report.num_pages_inherited):
            why_not = "the kernel took every page for a changed one"
        paths[1].write_text("")
        (folder / "go").touch()
    finally:
        upper.close()
    upper = restore_upper(folder / "image", site)
    try:
        upper.wait(_PROBE_TIMEOUT_S)
    finally:
        upper.close()
    return why_not
