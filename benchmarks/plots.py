"""Pictures of tables as SVG: groups of bars, and curves over sizes.

Both axes of curves are logarithmic: linear growth is a straight line of slope 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

_COLOURS = ("#4455aa", "#cc6677", "#117733", "#ddaa33", "#882255", "#44aa99", "#999933", "#888888")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 190, 24, 46
_ENTRY = 16


def plot_growth(
    curves: Mapping[str, Mapping[int, float]],
    title: str,
    sizes_are: str,
    *,
    unit: str = "",
    goals: Mapping[int, float] | None = None,
    dashed: Collection[str] = (),
) -> str:
    """A curve for each name: values by size. ``goals`` are short dashed lines, by size; values are in ``unit``."""
    sizes = sorted({size for curve in curves.values() for size in curve}) or [1]
    values = [value for curve in curves.values() for value in curve.values()] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x_of(size: int) -> float:
        share = math.log(size / sizes[0]) / (math.log(sizes[-1] / sizes[0]) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        share = (math.log10(value) - low) / ((high - low) or 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = _begin(_WIDTH, _HEIGHT, _LEFT, title)
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    for size in sizes:
        label = f'<text x="{x_of(size):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{size}</text>'
        parts.append(label)
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{sizes_are}</text>')
    for size, goal in (goals or {}).items():
        if size in sizes:
            x, y = x_of(size), y_of(goal)
            line = f'<line x1="{x - 40:.1f}" x2="{min(x + 20, _WIDTH - _RIGHT):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'{line} stroke="#000" stroke-dasharray="4 3"><title>goal: {goal:g} {unit}</title></line>')
    for number, (name, curve) in enumerate(curves.items()):
        is_dashed = name in dashed or number >= len(_COLOURS)
        style = f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="1.6"'
        style += ' stroke-dasharray="6 3"' if is_dashed else ""
        points = " ".join(f"{x_of(size):.1f},{y_of(value):.1f}" for size, value in sorted(curve.items()))
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        left, middle = _WIDTH - _RIGHT + 12, _TOP + _ENTRY * number + 10
        parts.append(f'<line x1="{left}" x2="{left + 24}" y1="{middle}" y2="{middle}" {style}/>')
        parts.append(f'<text x="{left + 30}" y="{middle + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def plot_bars(table: Mapping[str, Mapping[str, float]], title: str) -> str:
    """A table as groups of bars, by case and name; the dashed line is at 1, the bound."""
    names = list(dict.fromkeys(name for by_name in table.values() for name in by_name))
    height, left, bar, gap = 220, 40, 11, 16
    entry = max(95, 20 + 6 * max(map(len, names)))
    group = bar * len(names) + gap
    width = max(left + group * len(table) + 10, 8 + entry * len(names))
    highest = max(value for by_name in table.values() for value in by_name.values())
    scale = (height - 70) / highest
    base = height - 24
    parts = _begin(width, height, 8, title)
    for number, name in enumerate(names):
        x = 8 + number * entry
        parts.append(f'<rect x="{x}" y="22" width="9" height="9" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 12}" y="30">{name}</text>')
    for at, (case, by_name) in enumerate(table.items()):
        start = left + at * group
        for name, value in by_name.items():
            number, tall = names.index(name), value * scale
            parts.append(
                f'<rect x="{start + number * bar}" y="{base - tall:.1f}" width="{bar - 1}" height="{tall:.1f}" '
                f'fill="{_COLOURS[number % len(_COLOURS)]}"><title>{case}, {name}: {value:.3f}</title></rect>'
            )
        parts.append(f'<text x="{start}" y="{base + 14}">{case}</text>')
    for value in (1, highest):
        parts.append(f'<text x="4" y="{base - value * scale + 3:.1f}">{value:.2f}</text>')
    y = f"{base - scale:.1f}"
    parts.append(f'<line x1="{left - 6}" x2="{width - 6}" y1="{y}" y2="{y}" stroke="#000" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _begin(width: int, height: int, left: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="14" font-size="12">{title}</text>',
    ]
