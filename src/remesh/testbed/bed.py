"""Testbed of hosts on one machine: make them, run ranks and programs on them, degrade their links.

A testbed is made by root, of network namespaces and shaped virtual links (`commands`). It is taken apart when the
context is left, and everything that still runs on its hosts is killed. If the owner is killed, its ranks end with it,
and a `Watchdog` removes what is left; if that is killed, too, the next testbed here or ``testbed clean`` does.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from remesh.foundation.errors import ConfigError
from remesh.testbed import network_namespaces
from remesh.testbed.commands import (
    NIC,
    BedNames,
    commands_to_cut,
    commands_to_make,
    commands_to_mend,
    commands_to_shape,
)
from remesh.testbed.inside import HostEntry, command_inside
from remesh.testbed.pool import RankPool, RankRun
from remesh.testbed.testbed_spec import BedSpec
from remesh.testbed.watchdog import Watchdog

_BEDS: Final = itertools.count()
"""Numbers the testbeds of this process."""


@dataclass(frozen=True, slots=True)
class NicBytes:
    """What a host's link has carried since the testbed was made, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: NicBytes) -> NicBytes:
        return NicBytes(self.sent - earlier.sent, self.received - earlier.received)


@dataclass(frozen=True, slots=True)
class _Bed:
    """A testbed that is there."""

    names: BedNames
    folder: Path
    """For the file of hosts; removed with the testbed."""
    watchdog: Watchdog
    pool: RankPool

    @classmethod
    def begin(cls, names: BedNames) -> Self:
        """Everything but the hosts."""
        folder = network_namespaces.make_folder(names.owner)
        watchdog = Watchdog(names.namespaces, folder)
        hosts_file = folder / "hosts"
        addresses = [(names.address_of(host), host) for host in names.spec.names]
        known = [("127.0.0.1", "localhost"), (names.switch_address, "switch"), *addresses]
        hosts_file.write_text("".join(f"{address} {name}\n" for address, name in known))
        # The store of the groups lives with the switches, where no killed rank and no cut link reaches it.
        entry = HostEntry(names.switch, "switch", str(hosts_file))
        return cls(names, folder, watchdog, RankPool(store_address=names.switch_address, store_entry=entry))

    def entry_of(self, host: str) -> HostEntry:
        return HostEntry(self.names.namespace_of(host), host, str(self.folder / "hosts"))

    @property
    def switch_entry(self) -> HostEntry:
        return HostEntry(self.names.switch, "switch", str(self.folder / "hosts"))

    def end(self) -> None:
        try:
            self.pool.close()
            network_namespaces.remove(self.names.namespaces)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.watchdog.dismiss()


class Testbed:
    """Hosts on this machine; a context manager.

    ``start`` raises `ConfigError` without root, without iproute2, or when the kernel refuses.

        with Testbed(BedSpec.parse("4x200mbit")) as bed:
            results = bed.run(work, ranks_per_host=2, args=(1 << 20,))
    """

    __test__ = False  # pytest takes it for a test otherwise

    def __init__(self, spec: BedSpec) -> None:
        self.spec = spec
        self._bed: _Bed | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Make the hosts; remove what dead owners have left first."""
        network_namespaces.check_able()
        network_namespaces.clean()
        names = BedNames(self.spec, network_namespaces.this_owner(), next(_BEDS))
        self._bed = _Bed.begin(names)
        try:
            network_namespaces.run_commands(
                commands_to_make(names), f"making a testbed of {len(self.spec.hosts)} hosts"
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; the testbed may be started again."""
        if self._bed is not None:
            bed, self._bed = self._bed, None
            bed.end()

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
    ) -> RankRun:
        """Like `run`, but return while the ranks are at work, so that links can be changed; a context manager."""
        bed = self._need("running ranks")
        entries = [bed.entry_of(host) for host in _places(bed.names, ranks_per_host)]
        return bed.pool.begin(fn, entries, args, timeout_s=timeout_s)

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
        inside = command_inside(self._need(f"starting {command[0]!r}").entry_of(host), command)
        errors = subprocess.STDOUT if output is not None else None
        return subprocess.Popen(inside, env={**os.environ, **(env or {})}, stdout=output, stderr=errors)

    def hosts_of_ranks(self, ranks_per_host: int | Mapping[str, int] = 1) -> dict[int, str]:
        """The host of every rank that `run` would start."""
        return dict(enumerate(_places(self._need("placing ranks").names, ranks_per_host)))

    def address_of(self, host: str) -> str:
        """IPv4 address of a host."""
        return self._need("looking up an address").names.address_of(host)

    def entry_of(self, host: str) -> HostEntry:
        """What a process needs to enter a host."""
        return self._need("entering a host").entry_of(host)

    @property
    def switch_entry(self) -> HostEntry:
        """What a process needs to enter the switch, from where all hosts can be reached."""
        return self._need("entering the switch").switch_entry

    @property
    def switch_address(self) -> str:
        """IPv4 address of the switch."""
        return self._need("looking up an address").names.switch_address

    # --- links ---

    def set_rate(self, host: str, bytes_per_s: float | None) -> None:
        """Give a host's link another rate, each direction; None for full speed. Connections live on."""
        names = self._need("changing a rate").names
        network_namespaces.run_commands(commands_to_shape(names, host, bytes_per_s), f"changing the rate of {host!r}")

    def cut(self, host: str) -> None:
        """Pull a host's cable: packets are lost both ways, connections hang until they time out or are mended."""
        network_namespaces.run_commands(
            commands_to_cut(self._need("cutting a link").names, host), f"cutting off {host!r}"
        )

    def mend(self, host: str) -> None:
        """Put the cable back; TCP goes on with its next retransmission."""
        network_namespaces.run_commands(
            commands_to_mend(self._need("mending a link").names, host), f"mending the link of {host!r}"
        )

    def nic_bytes(self, host: str) -> NicBytes:
        """The interface counters of a host."""
        names = self._need("reading counters").names
        command = ("ip", "-n", names.namespace_of(host), "-statistics", "-json", "link", "show", "dev", NIC)
        counters = json.loads(network_namespaces.run_command(command, f"reading the counters of {host!r}"))[0][
            "stats64"
        ]
        return NicBytes(counters["tx"]["bytes"], counters["rx"]["bytes"])

    def _need(self, doing: str) -> _Bed:
        if self._bed is None:
            raise ConfigError(f"{doing} on a testbed: it is not started; use it as a context manager, or call start()")
        return self._bed


def _places(names: BedNames, ranks_per_host: int | Mapping[str, int]) -> list[str]:
    """The host of each rank, host by host in order of hosts; a host that the mapping leaves out has none."""
    if isinstance(ranks_per_host, int):
        ranks_per_host = dict.fromkeys(names.spec.names, ranks_per_host)
    for host in ranks_per_host:
        names.spec.index_of(host)
    hosts = [host for host in names.spec.names for _ in range(ranks_per_host.get(host, 0))]
    if not hosts or min(ranks_per_host.values()) < 0:
        raise ConfigError(f"placing ranks on a testbed: found {ranks_per_host} ranks per host, expected at least one")
    return hosts
