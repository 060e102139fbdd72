"""Machine properties that are built into a process: the kernel's code, CPU registers and features."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from remesh.carried.images.form.format import Machine
from remesh.foundation.errors import FormatError
from remesh.foundation.linux.proc_text import SPECIAL_AREAS
from remesh.foundation.linux.procfs import read_areas


@functools.cache
def this_machine(xstate_bytes: int) -> Machine:
    """The machine that this process runs on; ``xstate_bytes`` is the size of a thread's extended state here."""
    areas = {area.path: area for area in read_areas(os.getpid()) if area.path in SPECIAL_AREAS}
    vdso = areas["[vdso]"]
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        code = os.pread(memory.fileno(), vdso.num_bytes, vdso.start)
    return Machine(
        vdso_sha256=hashlib.sha256(code).hexdigest(),
        special_areas={name: area.num_bytes for name, area in areas.items()},
        xstate_bytes=xstate_bytes,
        cpu_flags=_cpu_flags(),
        kernel=platform.release(),
    )


def _cpu_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return " ".join(sorted(line.partition(":")[2].split()))
    return ""


def check_fits(image: Machine, here: Machine, where: str) -> None:
    """Raise `FormatError` when a process of machine ``image`` cannot run on ``here``; ``where`` names the image."""
    if image.special_areas != here.special_areas or image.vdso_sha256 != here.vdso_sha256:
        raise FormatError(
            "other-kernel",
            f"restoring {where}: it was made under kernel {image.kernel}, whose code in every process differs "
            f"from that of this machine's kernel {here.kernel}; restart on machines with the same kernel build",
        )
    if image.xstate_bytes != here.xstate_bytes:
        raise FormatError(
            "other-processor",
            f"restoring {where}: its threads have {image.xstate_bytes} bytes of extended registers, this processor "
            f"{here.xstate_bytes}; restart on machines with the same kind of processor",
        )
    missing = sorted(set(image.cpu_flags.split()) - set(here.cpu_flags.split()))
    if missing:
        raise FormatError(
            "other-processor",
            f"restoring {where}: this processor lacks {', '.join(missing)}, which the program's libraries may use; "
            "restart on machines with the same kind of processor",
        )
