"""How are hosts on one machine used? `Testbed`: make them, run ranks and programs on them, hurt their links.

A bed is made by root, of network namespaces and shaped virtual links (`commands`). It is taken apart when the context
is left, and everything that still runs on its hosts is killed. If the owner is killed, its ranks end with it, and the
next bed that anybody makes, or ``remesh testbed clean``, removes what is left.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from remesh.errors import ConfigError
from remesh.testbed import namespaces
from remesh.testbed.commands import (
    NIC,
    BedNames,
    commands_to_cut,
    commands_to_make,
    commands_to_mend,
    commands_to_shape,
)
from remesh.testbed.inside import Door, command_inside
from remesh.testbed.ranks import Job, Run, Site, StoreProcess, fork_server, places
from remesh.testbed.spec import BedSpec

_BEDS: Final = itertools.count()
"""Numbers the beds of this process."""


@dataclass(frozen=True, slots=True)
class NicBytes:
    """What a host's link has carried since the bed was made, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: NicBytes) -> NicBytes:
        return NicBytes(self.sent - earlier.sent, self.received - earlier.received)


class Testbed:
    """Hosts on this machine; a context manager.

    ``start`` raises `ConfigError` without root, without iproute2, or when the kernel refuses.

        with Testbed(BedSpec.parse("4x200mbit")) as bed:
            results = bed.run(work, ranks_per_host=2, args=(1 << 20,))
    """

    __test__ = False  # pytest takes it for a test otherwise

    def __init__(self, spec: BedSpec) -> None:
        self.spec = spec
        self._site: Site | None = None
        self._context: ForkServerContext | None = None
        self._store: StoreProcess | None = None
        self._num_runs = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Make the hosts; remove what dead owners have left first."""
        namespaces.check_able()
        namespaces.clean()
        names = BedNames(self.spec, namespaces.this_owner(), next(_BEDS))
        self._site = Site(names, Path(tempfile.mkdtemp(prefix="remesh-testbed-")))
        try:
            self._site.write_hosts_file()
            namespaces.run_commands(commands_to_make(names), f"making a testbed of {len(self.spec.hosts)} hosts")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; the bed may be started again."""
        if self._store is not None:
            self._store.end()
            self._store = None
        if self._site is not None:
            namespaces.remove(self._site.names.namespaces)
            shutil.rmtree(self._site.folder, ignore_errors=True)
            self._site = None

    # --- work ---

    def run(
        self,
        fn: Callable[..., Any],
        ranks_per_host: int | Mapping[str, int] = 1,
        args: Sequence[Any] = (),
        *,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Call ``fn(*args)`` on every rank, each inside its host, in a fresh gloo group; the results in order of rank.

        Ranks go host by host, in order of the spec. ``fn`` stands at the top of a module; arguments and results are
        pickled. Raises `RanksFailed` when a rank raises, dies or has not returned after ``timeout_s``.
        """
        with self.start_ranks(fn, ranks_per_host, args, timeout_s=timeout_s) as run:
            return run.wait()

    def start_ranks(
        self,
        fn: Callable[..., Any],
        ranks_per_host: int | Mapping[str, int] = 1,
        args: Sequence[Any] = (),
        *,
        timeout_s: float = 60.0,
    ) -> Run:
        """Like `run`, but return while the ranks are at work, so that links can be changed; a context manager."""
        site = self._need_site("running ranks")
        where = places(site.names, ranks_per_host)
        if self._context is None:
            self._context = fork_server()
        if self._store is None:
            self._store = StoreProcess(self._context, site)
        self._num_runs += 1
        return Run(self._context, site, where, Job(fn, tuple(args), self._num_runs, timeout_s))

    def start_program(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; ``output`` takes both its streams.

        Its environment is this one's, ``env``, and the name of the host's interface for gloo and NCCL.
        """
        inside = command_inside(self._need_site(f"starting {command[0]!r}").door_of(host), command)
        errors = subprocess.STDOUT if output is not None else None
        return subprocess.Popen(inside, env={**os.environ, **(env or {})}, stdout=output, stderr=errors)

    def hosts_of_ranks(self, ranks_per_host: int | Mapping[str, int] = 1) -> dict[int, str]:
        """The host of every rank that `run` would start."""
        return {place.rank: place.host for place in places(self._need("placing ranks"), ranks_per_host)}

    def address_of(self, host: str) -> str:
        """IPv4 address of a host."""
        return self._need("looking up an address").address_of(host)

    def door_of(self, host: str) -> Door:
        """What a process needs to enter a host."""
        return self._need_site("entering a host").door_of(host)

    @property
    def switch_door(self) -> Door:
        """What a process needs to enter the switch, from where all hosts can be reached."""
        site = self._need_site("entering the switch")
        return Door(site.names.switch, "switch", str(site.hosts_file))

    @property
    def switch_address(self) -> str:
        """IPv4 address of the switch."""
        return self._need("looking up an address").switch_address

    # --- links ---

    def set_rate(self, host: str, bytes_per_s: float | None) -> None:
        """Give a host's link another rate, each direction; None for full speed. Connections live on."""
        names = self._need("changing a rate")
        namespaces.run_commands(commands_to_shape(names, host, bytes_per_s), f"changing the rate of {host!r}")

    def cut(self, host: str) -> None:
        """Pull a host's cable: packets are lost both ways, connections hang until they time out or are mended."""
        namespaces.run_commands(commands_to_cut(self._need("cutting a link"), host), f"cutting off {host!r}")

    def mend(self, host: str) -> None:
        """Put the cable back; TCP goes on with its next retransmission."""
        namespaces.run_commands(commands_to_mend(self._need("mending a link"), host), f"mending the link of {host!r}")

    def nic_bytes(self, host: str) -> NicBytes:
        """The interface counters of a host."""
        names = self._need("reading counters")
        command = ("ip", "-n", names.namespace_of(host), "-statistics", "-json", "link", "show", "dev", NIC)
        counters = json.loads(namespaces.run_command(command, f"reading the counters of {host!r}"))[0]["stats64"]
        return NicBytes(counters["tx"]["bytes"], counters["rx"]["bytes"])

    def _need(self, doing: str) -> BedNames:
        return self._need_site(doing).names

    def _need_site(self, doing: str) -> Site:
        if self._site is None:
            raise ConfigError(f"{doing} on a testbed: it is not started; use it as a context manager, or call start()")
        return self._site
