"""How does planning grow with the number of ranks? The same moves on ever larger meshes, as a table and a plot.

``python -m benchmarks.reshard.scale`` measures, and writes ``docs/reshard/scale.md`` and its plot; about a minute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.reshard.planning import PAIRS, pair_of_halves, timed
from remesh.reshard import Plan, plan_reshard

RANKS = tuple(1 << power for power in range(3, 14))
_DOCS = Path(__file__).resolve().parents[2] / "docs" / "reshard"
_COLOURS = ("#4455aa", "#cc6677", "#117733", "#ddaa33", "#882255", "#44aa99", "#999933", "#888888")

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
    """Seconds over ranks, both logarithmic; dashed lines are the goals at 1,024 and at 8,192 ranks."""
    width, height, left, right, top, bottom = 760, 420, 60, 150, 24, 40
    ranks = list(next(iter(curves.values())))
    low, high = -4.0, 1.0

    def x_of(num_ranks: int) -> float:
        span = math.log2(ranks[-1] / ranks[0]) or 1.0
        return left + math.log2(num_ranks / ranks[0]) / span * (width - left - right)

    def y_of(seconds: float) -> float:
        share = (min(max(math.log10(seconds), low), high) - low) / (high - low)
        return height - bottom - share * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="14" font-size="12">Planning time over ranks</text>',
    ]
    for power in range(int(low), int(high) + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for num_ranks in ranks:
        label = f'<text x="{x_of(num_ranks):.1f}" y="{height - bottom + 16}" text-anchor="middle">{num_ranks}</text>'
        parts.append(label)
    for goal, num_ranks in ((0.05, 1024), (2.0, 8192)):
        if ranks[0] <= num_ranks <= ranks[-1]:
            x, y = x_of(num_ranks), y_of(goal)
            line = f'<line x1="{x - 40:.1f}" x2="{x + 20:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'{line} stroke="#000" stroke-dasharray="4 3"><title>goal: {goal:g} s</title></line>')
    for number, (move, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = ' stroke-dasharray="6 3"' if number >= len(_COLOURS) else ""
        points = " ".join(f"{x_of(n):.1f},{y_of(seconds):.1f}" for n, (seconds, _) in curve.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        y = top + 16 * number + 10
        key = f'<line x1="{width - right + 12}" x2="{width - right + 36}" y1="{y}" y2="{y}"'
        parts.append(f'{key} stroke="{colour}" stroke-width="1.6"{dash}/>')
        parts.append(f'<text x="{width - right + 42}" y="{y + 4}">{move}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: Path = _DOCS, ranks: Sequence[int] = RANKS, repeat: int = 3) -> None:
    """Measure, and write the page and its plot."""
    curves = measure(ranks, repeat)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.svg").write_text(plot_svg(curves))
    (folder / "scale.md").write_text(
        "# How planning grows\n\nWritten by `python -m benchmarks.reshard.scale`; do not edit. Load at the end "
        f"{load}.\n\nA matrix of 8,192 x 4,096 moves from one half of the ranks to the other; meshes are (hosts, 8). "
        "Milliseconds of\nprocessor time from the description to the checked plan, least of "
        f"{repeat}; the last column counts the messages\nof the largest plan. Goals: 50 ms at 1,024 ranks, 2 s at "
        f"8,192.\n\n{table_text(curves)}\n\n"
        "![planning time over ranks](scale.svg)\n"
    )


if __name__ == "__main__":
    main()
