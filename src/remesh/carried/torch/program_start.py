"""``python -m remesh.carried.torch.program_start [-m] SCRIPT ARGUMENTS``: runs a program of torch.distributed under
Remesh.

To the program all looks as if Python had started it. Only what torch gives for gloo, NCCL and the store of its
rendezvous is different, once the program has imported torch.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import parse_qsl, urlparse

from remesh.carried.images.form.kinds import CHANNEL_PATH
from remesh.carried.torch.children import ForkGuard
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.hook import after_import
from remesh.carried.torch.keeper_line import ControlThread, token_of
from remesh.carried.torch.successors import prepare_successors, refuse

if TYPE_CHECKING:
    from remesh.carried.torch.backends import Backends

_TORCH: Final = "torch.distributed"
_COMPILER_RULES: Final = "torch._dynamo.trace_rules"
_SYMMETRIC_MEMORY: Final = "torch.distributed._symmetric_memory"


class CarriedProgram:
    """One program from its start on."""

    def __init__(self, notices: Path = Path(CHANNEL_PATH)) -> None:
        self._gate, self._pid = Gate(), os.getpid()
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._control = ControlThread(self._gate, self._rank, notices)
        self._backends: Backends | None = None

    def run(self, arguments: list[str]) -> dict[str, Any]:
        """Run the program to its end. Returns its names: what they stand for lasts as long as they are kept."""
        self.begin()
        return _run_as_main(arguments)

    def begin(self) -> None:
        """Do what comes before the program's first line."""
        prepare_successors()
        after_import(_TORCH, self._on_torch)
        after_import(_COMPILER_RULES, _leave_out_ours)
        after_import(_SYMMETRIC_MEMORY, _refuse_symmetric_memory)
        self._control.start()
        ForkGuard(self._descriptors)
        # Called as the last of all: threads of the program may communicate after its last line, and so may `atexit`.
        atexit.register(self._control.send_goodbye)
        self._take_leave_before_os_exit()

    def _take_leave_before_os_exit(self) -> None:
        """Have a program that ends by `os._exit` wait for a cut and send goodbye, as one that ends by itself."""
        end, pid = os._exit, os.getpid()

        def _exit(status: int) -> NoReturn:
            # Children end as they did. An end with an error ends the job anyway.
            if not status and os.getpid() == pid:
                self._control.send_goodbye_aside()
            end(status)

        os._exit = _exit

    def _descriptors(self) -> list[int]:
        of_groups = [] if self._backends is None else self._backends.descriptors()
        return [*self._control.descriptors(), *of_groups]

    def _on_torch(self, module: ModuleType) -> None:
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        handlers = rendezvous._rendezvous_handlers
        handlers["env"] = handlers["tcp"] = self._rendezvous
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        original = c10d._new_process_group_helper

        def helper(*args: Any, **options: Any) -> Any:
            backends = self._find_backends()
            return backends.make_by(original, *args, **options)

        c10d._new_process_group_helper = helper  # type: ignore[attr-defined]
        one_by_one = c10d.batch_isend_irecv

        @functools.wraps(one_by_one)
        def batch(p2p_op_list: list[Any]) -> list[Any]:
            from remesh.carried.torch.backends import post_batch  # noqa: PLC0415  imports torch, as the program has

            return post_batch(c10d, one_by_one, p2p_op_list)

        # Now: modules of the program keep what they import.
        c10d.batch_isend_irecv = module.batch_isend_irecv = batch  # type: ignore[attr-defined]

    def _rendezvous(self, url: str, **_: Any) -> Iterator[Any]:
        named = dict(parse_qsl(urlparse(url).query))
        rank, size = (int(named.get(name, os.environ[name.upper()])) for name in ("rank", "world_size"))
        return self._find_backends().rendezvous(rank, size)

    def _find_backends(self) -> Backends:
        """Return the backends, made at the first call, when torch has been imported as a whole."""
        if os.getpid() != self._pid:
            refuse()
        if self._backends is None:
            from remesh.carried.torch.backends import Backends  # noqa: PLC0415  imports torch, as the program has
            from remesh.carried.torch.program_store import StoreLink  # noqa: PLC0415  as above

            notice = self._control.notice
            link = StoreLink(self._gate, notice.store, token_of(notice))
            self._backends = Backends(self._gate, link, self._rank, self._size)
            self._backends.install(*(sys.modules[name] for name in ("torch.distributed.distributed_c10d", _TORCH)))
            self._control.carried = self._backends.cut
        return self._backends


def _leave_out_ours(rules: ModuleType) -> None:
    """Have torch.compile run Remesh's code without tracing it.

    torch.compile sees each Python frame that C++ calls while compiled code runs; it would trace into carried groups.
    """
    rules.add(__package__)


def _refuse_symmetric_memory(module: ModuleType) -> None:
    """Have ranks share no memory of their devices, by CUDA IPC or NVLS: no driver takes it to the host."""

    def rendezvous(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "making symmetric memory of devices: Remesh cannot checkpoint memory that ranks share (CUDA IPC, NVLS); "
            "use collectives of process groups; see docs/torch_programs/limits.md"
        )

    module._SymmetricMemory.rendezvous = staticmethod(rendezvous)


def _run_as_main(arguments: list[str]) -> dict[str, Any]:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    return runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Kept to the end of Python, as those of a script that it runs itself. A group of gloo that is let go of earlier, at
    # the last line, may wait for a thread that waits for the interpreter (pytorch/pytorch#56297).
    NAMES = CarriedProgram().run(sys.argv[1:])
