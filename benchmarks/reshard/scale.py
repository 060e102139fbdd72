"""How does planning grow with the number of ranks? The same moves on ever larger meshes, as a table and a plot.

``python -m benchmarks.reshard.scale`` measures, and writes ``docs/reshard/scale.md`` and its plot; about a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.plots import plot_growth
from benchmarks.report import describe_run, header_of
from benchmarks.reshard.planning import PAIRS, pair_of_halves, timed
from remesh.resharding import Plan, plan_reshard

RANKS = tuple(1 << power for power in range(3, 14))
_DOCS = Path(__file__).resolve().parents[2] / "docs" / "reshard"

Curves = Mapping[str, Mapping[int, tuple[float, int]]]
"""For each move, by ranks, seconds and messages."""


def measure(ranks: Sequence[int] = RANKS, repeat: int = 3) -> Curves:
    """Least seconds of processor time to plan each of the moves, and how many messages the plan has."""
    found: dict[str, dict[int, tuple[float, int]]] = {}
    for src, dst in PAIRS:
        curve = found[f"{src} to {dst}"] = {}
        for num_ranks in ranks:
            # Eight devices on a host, and at least two hosts.
            num_hosts = max(2, num_ranks // 8)
            move, hosts = pair_of_halves(src, dst, num_hosts, num_ranks // num_hosts)
            act: Callable[[], Plan] = partial(plan_reshard, [move], hosts)
            seconds, plan = timed(act, repeat, time.thread_time)
            curve[num_ranks] = (seconds, len(plan.messages))
    return found


def table_text(curves: Curves) -> str:
    """Milliseconds by move and ranks, and the messages of the largest plan, as Markdown."""
    ranks = list(next(iter(curves.values())))
    lines = [f"| move | {' | '.join(f'{n:,}' for n in ranks)} | messages |", f"|---|{'---|' * (len(ranks) + 1)}"]
    for move, curve in curves.items():
        cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds, _ in curve.values())
        lines.append(f"| {move} | {cells} | {curve[ranks[-1]][1]:,} |")
    return "\n".join(lines)


def plot_svg(curves: Curves) -> str:
    """Seconds over ranks, with the goals at 1,024 and at 8,192 ranks."""
    seconds = {move: {ranks: value for ranks, (value, _) in curve.items()} for move, curve in curves.items()}
    return plot_growth(seconds, "Planning time over ranks", "ranks", unit="s", goals={1024: 0.05, 8192: 2.0})


def main(folder: Path = _DOCS, ranks: Sequence[int] = RANKS, repeat: int = 3, about: str = "") -> None:
    """Measure, and write the page and its plot."""
    curves = measure(ranks, repeat)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.svg").write_text(plot_svg(curves))
    (folder / "scale.md").write_text(
        "# How planning grows\n\n"
        f"{about}\n\nA matrix of 8,192 x 4,096 moves from one half of the ranks to the other; meshes are (hosts, 8). "
        "Milliseconds of\nprocessor time from the description to the checked plan, least of "
        f"{repeat}; the last column counts the messages\nof the largest plan. Goals: 50 ms at 1,024 ranks, 2 s at "
        f"8,192.\n\n{table_text(curves)}\n\n"
        "![planning time over ranks](scale.svg)\n"
    )


if __name__ == "__main__":
    main(about=header_of(describe_run(None), "python -m benchmarks.reshard.scale", "three, the least of them"))
