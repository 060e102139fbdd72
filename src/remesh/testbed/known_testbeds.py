"""Testbeds on this machine, found by the names of their namespaces, and changed without their owner."""

from __future__ import annotations

from dataclasses import dataclass

from remesh.foundation.errors import ConfigError
from remesh.testbed.commands import BedNames, commands_to_cut, commands_to_mend, commands_to_shape
from remesh.testbed.network_namespaces import check_able, find_namespaces, group_by_testbed, is_alive, run_commands
from remesh.testbed.testbed_spec import BedSpec, HostSpec, Owner


@dataclass(frozen=True, slots=True)
class KnownTestbed:
    """A testbed as its namespaces show it; rates are not known."""

    owner: Owner
    bed: int
    """Counts the testbeds of the owner."""
    hosts: tuple[str, ...]
    """By position."""
    is_alive: bool
    """Whether its owner still lives."""

    @property
    def label(self) -> str:
        """What names it on the command line."""
        return f"{self.owner.pid}.{self.bed}"


def find_testbeds() -> list[KnownTestbed]:
    """All testbeds of this machine, by owner."""
    found = []
    for (owner, bed), names in group_by_testbed(find_namespaces()).items():
        hosts = sorted((name.index, name.host) for name in names if name.index is not None)
        found.append(KnownTestbed(owner, bed, tuple(host for _, host in hosts), is_alive(owner)))
    return sorted(found, key=lambda each: (each.owner.pid, each.bed))


def choose_testbed(label: str) -> KnownTestbed:
    """The testbed of this label; the only one that is in use when the label is empty."""
    beds = [bed for bed in find_testbeds() if bed.is_alive]
    fitting = [bed for bed in beds if label in ("", bed.label)]
    if len(fitting) != 1:
        raise ConfigError(
            f"choosing testbed {label or '(none named)'}: {len(fitting)} fit, expected one; in use are "
            f"{', '.join(bed.label for bed in beds) or 'none'}; name one with --bed"
        )
    return fitting[0]


def set_rate(bed: KnownTestbed, host: str, bytes_per_s: float | None) -> None:
    """Give a host's link another rate; None for full speed."""
    check_able()
    run_commands(commands_to_shape(_names(bed), host, bytes_per_s), f"changing the rate of {host!r}")


def cut(bed: KnownTestbed, host: str) -> None:
    """Pull a host's cable."""
    check_able()
    run_commands(commands_to_cut(_names(bed), host), f"cutting off {host!r}")


def mend(bed: KnownTestbed, host: str) -> None:
    """Put the cable back."""
    check_able()
    run_commands(commands_to_mend(_names(bed), host), f"mending the link of {host!r}")


def _names(bed: KnownTestbed) -> BedNames:
    return BedNames(BedSpec(tuple(HostSpec(host, None) for host in bed.hosts)), bed.owner, bed.bed)
