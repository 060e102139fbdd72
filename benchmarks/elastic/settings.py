"""Settings of the elastic benchmarks, from the environment.

    PARTS=worker,node KILLS=5 make bench ROOM=elastic

| variable | what it says | default |
|---|---|---|
| ``PARTS`` | some of ``costs,worker,node,host,plane,shaped,attempts`` | all but ``attempts`` |
| ``KILLS`` | kills of each case for each program | 20 |
| ``PEER_MINUTES`` | how long another program may take for one case; it has the kills that it came to by then | 2 |
| ``PEERS`` | some of ``torchrun,torchft,nvrx``, or ``none`` | all that are there |
| ``KEEP`` | ``1``: rows of the last report, of the same commit, stay where they are not measured anew | 0 |
| ``QUICK`` | ``1``: one kill of each, fewer steps, smaller jobs | 0 |

``python -m benchmarks.elastic estimate`` only tells how long it will take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PARTS = ("costs", "worker", "node", "host", "plane", "shaped")
PARTS = (*DEFAULT_PARTS, "attempts")
PEERS = ("torchrun", "torchft", "nvrx")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    parts: tuple[str, ...] = DEFAULT_PARTS
    num_kills: int = 20
    peer_minutes: float = 2.0
    """How long another program may take for one case, jobs that it loses included."""
    peers: tuple[str, ...] = PEERS
    keeps: bool = False
    """Whether rows of the last report stay where they are not measured anew."""
    is_quick: bool = False

    def __post_init__(self) -> None:
        if self.num_kills < 1 or self.peer_minutes <= 0:
            raise ValueError(
                f"settings of the benchmark: KILLS is {self.num_kills} and PEER_MINUTES {self.peer_minutes}, expected "
                "at least 1 and more than 0"
            )
        for name, found, known in (("PARTS", self.parts, PARTS), ("PEERS", self.peers, PEERS)):
            if unknown := sorted(set(found) - set(known)):
                raise ValueError(f"settings of the benchmark: {name} has {unknown}, expected some of {known}")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """What these variables say.

        >>> Settings.of({"PARTS": "node,plane", "KILLS": "3", "PEERS": "none"}).peers
        ()
        """
        is_quick = environment.get("QUICK", "") not in ("", "0")
        return cls(
            parts=_list(environment.get("PARTS", "")) or DEFAULT_PARTS,
            num_kills=int(environment.get("KILLS", "1" if is_quick else "20")),
            peer_minutes=float(environment.get("PEER_MINUTES", "2")),
            peers=() if environment.get("PEERS") == "none" else _list(environment.get("PEERS", "")) or PEERS,
            keeps=environment.get("KEEP", "") not in ("", "0"),
            is_quick=is_quick,
        )


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def estimate_minutes(settings: Settings) -> dict[str, float]:
    """About how long each part takes on a quiet machine of two cores, at most where peers are bounded.

    From runs there: a job of four workers stands after 8 s, a kill of ours with the newcomer after it takes 7 s, a kill
    of the store's host needs a new job, torchrun's jobs that do not come back are three of 30 s each at most. A job in
    restart mode takes 9 s with its kill, on each of four meeting places; three starts of both launchers take 20 s.
    """
    kills, quick = settings.num_kills, settings.is_quick
    ours = (kills * 7 + (kills + 4) // 5 * 10) / 60
    num_peers = len(settings.peers)
    peers = settings.peer_minutes if kills > 1 else 0.6
    with_torchrun = "torchrun" in settings.peers
    minutes = {
        "costs": 0.6 if quick else 1.6,
        "worker": ours + num_peers * peers,
        "node": ours + num_peers * peers,
        "host": kills * 12 / 60 + with_torchrun * min(kills, 3) * 0.7,
        "plane": 0.2 if quick else 1.5,
        "shaped": 1.0 if quick else 1.5,
        "attempts": 4 * (kills * 9 / 60 + with_torchrun * peers) + with_torchrun * (0.4 if quick else 1.7),
    }
    return {part: minutes[part] for part in PARTS if part in settings.parts}
