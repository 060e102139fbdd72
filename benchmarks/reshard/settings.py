"""Settings of the reshard benchmarks, from the environment.

    SIZE_MIB=32 RATE_MBIT=50 REPEATS=3 CASES=F5,F6-3 make bench ROOM=reshard

Fixed costs and the share of the processor shrink with slower links and larger tensors, so both stand in the report.

| variable | what it says | default |
|---|---|---|
| ``SIZE_MIB`` | size of a case's tensors | 16 |
| ``RATE_MBIT`` | rate of every link | 100 |
| ``REPEATS`` | runs of each contestant, which take turns | 3 |
| ``DEVICES`` | ranks on a host where the paper has four | 2 |
| ``CASES`` | beginnings of the names of cases: ``F5``, ``F5(4,2)``, ``F6-3``, ``N`` | all |
| ``PEERS`` | ``0``: only ours, and the plain message that it is measured by | 1 |
| ``PARTS`` | some of ``planning,loopback,links`` | all |
| ``KEEP`` | ``1``: rows of the last report, of the same commit, stay where they are not measured anew | 0 |
| ``QUICK`` | ``1``: smaller, and a handful of cases | 0 |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = ("planning", "loopback", "links")
_QUICK_CASES = ("F5(2,2)", "F6-3", "F6-6", "F6-7", "N1", "N5", "N6")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    size_mib: int = 16
    rate_mbit: int = 100
    """Of every link."""
    num_repeats: int = 3
    num_devices: int = 2
    """Ranks on a host where the paper has four."""
    cases: tuple[str, ...] = ()
    """Beginnings of names; all cases when empty."""
    with_peers: bool = True
    """Whether others run beside ours."""
    parts: tuple[str, ...] = PARTS
    keeps: bool = False
    """Whether rows of the last report stay where they are not measured anew."""
    is_quick: bool = False

    def __post_init__(self) -> None:
        for name in ("size_mib", "rate_mbit", "num_repeats", "num_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"settings of the benchmark: {name} is {getattr(self, name)}, expected at least 1")
        if unknown := set(self.parts) - set(PARTS):
            found = sorted(unknown)
            raise ValueError(f"settings of the benchmark: parts {found} are unknown, expected some of {PARTS}")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """What these variables say."""
        is_quick = _is_on(environment, "QUICK", "0")
        cases = _list(environment.get("CASES", ""))
        return cls(
            size_mib=int(environment.get("SIZE_MIB", "8" if is_quick else "16")),
            rate_mbit=int(environment.get("RATE_MBIT", "100")),
            num_repeats=int(environment.get("REPEATS", "3")),
            num_devices=int(environment.get("DEVICES", "2")),
            cases=cases or (_QUICK_CASES if is_quick else ()),
            with_peers=_is_on(environment, "PEERS", "1"),
            parts=_list(environment.get("PARTS", "")) or PARTS,
            keeps=_is_on(environment, "KEEP", "0"),
            is_quick=is_quick,
        )

    @property
    def links(self) -> str:
        """What rows over the links may be compared with each other by."""
        return f"{self.size_mib} MiB over {self.rate_mbit} Mbit/s, {self.num_devices} devices"

    def chooses(self, case: str) -> bool:
        """Whether a case of this name is to be measured.

        >>> Settings(cases=("F5(4,2)", "N")).chooses("F5 1 -> (4,2)"), Settings(cases=("N",)).chooses("F6-1: x")
        (True, False)
        """
        short = case.replace(" ", "").replace("1->", "")
        return not self.cases or any(short.startswith(each.replace(" ", "").replace("1->", "")) for each in self.cases)


def _is_on(environment: Mapping[str, str], name: str, default: str) -> bool:
    return environment.get(name, default) not in ("", "0")


def _list(text: str) -> tuple[str, ...]:
    """Parts between commas, save those in parentheses."""
    return tuple(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip())


def choose(names: Sequence[str], settings: Settings) -> list[str]:
    """The names that are to be measured; raises ValueError for a wish that none fulfils."""
    chosen = [name for name in names if settings.chooses(name)]
    if not chosen:
        raise ValueError(f"settings of the benchmark: no case begins with one of {settings.cases}; known are {names}")
    return chosen
