"""Pictures of timed messages, as text and as SVG.

A picture has one *lane* for each host and direction, or for each rank and direction; time runs to the right. What fills
a lane names the other end. Messages that follow each other without a gap and with the same other end are one *bar*.
Times may be simulated (`remesh.resharding.planning.simulate`) or measured; a picture does not care.
"""

from __future__ import annotations

import colorsys
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from xml.sax.saxutils import escape

from remesh.resharding.model.program import Timing

_SYMBOLS = string.digits + string.ascii_letters
_IDLE = "."
_OTHER = "+"
_GAP = 1e-3
"""Messages nearer than this fraction of the whole time are drawn as one."""
_WIDTH_PX = 960
_LANE_PX = 22
_BAR_PX = 16
_LABEL_PX = 150
_RIGHT_PX = 48
"""Room for the last tick's label."""
_AXIS_PX = 44
_CAPTION_PX = 18
_NAME_PX = 125
_NAMED_IN_ROW = 6
_MAX_NAMED = 24
"""The legend names so many other ends at most, and the number that it leaves out."""
_NUM_TICKS = 5
_MAX_LANES = 64
"""A picture shows so many lanes at most, and the number that it leaves out."""
_MAX_BARS = 400
"""A lane of a picture has so many bars at most; more are joined to what happens in a stretch of time."""
_SEVERAL = "several"
"""Stands for other ends that one bar was joined of."""


class Lanes(Enum):
    """The meaning of a lane of a picture."""

    HOSTS = "hosts"
    """The NICs of a host in one direction; what stays inside hosts is left out."""
    RANKS = "ranks"
    """A rank in one direction."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in which a lane deals with one other end."""

    other: str
    """Name of the other end."""
    start_s: float
    finish_s: float
    nbytes: int
    first_round: int
    last_round: int

    def joined(self, later: Bar) -> Bar:
        """Both as one."""
        return Bar(
            self.other if self.other == later.other else _SEVERAL,
            self.start_s,
            max(self.finish_s, later.finish_s),
            self.nbytes + later.nbytes,
            min(self.first_round, later.first_round),
            max(self.last_round, later.last_round),
        )


def collect_bars(
    messages: Sequence[Timing], host_of: Mapping[int, str], lanes: Lanes = Lanes.HOSTS
) -> dict[tuple[str, str], list[Bar]]:
    """The bars of every lane that has any, by (name, ``"out"`` or ``"in"``), in the order of hosts or ranks."""
    gap_s = _GAP * _total_s(messages)
    found: dict[tuple[str, str], list[Bar]] = {}
    for message in sorted(messages, key=lambda each: (each.start_s, each.finish_s, each.giver)):
        if lanes is Lanes.HOSTS and host_of[message.giver] == host_of[message.taker]:
            continue
        ends = [host_of[rank] if lanes is Lanes.HOSTS else f"rank {rank}" for rank in (message.giver, message.taker)]
        for own, other, way in ((ends[0], ends[1], "out"), (ends[1], ends[0], "in")):
            _add(found.setdefault((own, way), []), other, message, gap_s)
    names = _all_names(host_of, lanes)
    return {(name, way): found[name, way] for name in names for way in ("out", "in") if (name, way) in found}


def _add(bars: list[Bar], other: str, message: Timing, gap_s: float) -> None:
    bar = Bar(other, message.start_s, message.finish_s, message.nbytes, message.round, message.round)
    last = bars[-1] if bars else None
    if last is not None and last.other == other and message.start_s <= last.finish_s + gap_s:
        bars[-1] = last.joined(bar)
    else:
        bars.append(bar)


def draw_text(
    messages: Sequence[Timing],
    host_of: Mapping[int, str],
    *,
    lanes: Lanes = Lanes.HOSTS,
    width: int = 72,
    unit: str = "s",
) -> str:
    """Lanes as lines of ``width`` characters, each standing for the other end that fills most of its time.

    >>> print(draw_text([Timing(1, 0, 0, 1, 8, 0.0, 1.0), Timing(1, 1, 0, 2, 8, 1.0, 2.0)],
    ...                 {0: "a", 1: "b", 2: "c"}, width=8))
    a out |11112222|
    b in  |0000....|
    c in  |....0000|
           0 .. 2 s    0=a 1=b 2=c
    """
    bars, left_out = _some_lanes(collect_bars(messages, host_of, lanes))
    if not bars:
        return "(nothing is sent)"
    total_s = _total_s(messages)
    names = list(dict.fromkeys(each.other for of_lane in bars.values() for each in of_lane))
    names = [name for name in _all_names(host_of, lanes) if name in names]
    symbol_of = {name: _SYMBOLS[n] if n < len(_SYMBOLS) else _OTHER for n, name in enumerate(names)}
    margin = max(len(name) for name, _ in bars)
    lines = [
        f"{name:<{margin}} {way:<3} |{_line(of_lane, symbol_of, total_s, width)}|"
        for (name, way), of_lane in bars.items()
    ]
    legend = " ".join(f"{symbol}={name}" for name, symbol in symbol_of.items() if symbol != _OTHER)
    if len(names) > len(_SYMBOLS):
        legend += f" {_OTHER}={len(names) - len(_SYMBOLS)} more"
    if left_out:
        lines.append(f"({left_out} more lanes)")
    return "\n".join([*lines, f"{' ' * (margin + 6)}0 .. {total_s:.4g} {unit}    {legend}"])


def _line(bars: Sequence[Bar], symbol_of: Mapping[str, str], total_s: float, width: int) -> str:
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    scale = width / total_s if total_s else 0.0
    for bar in bars:
        start, finish = bar.start_s * scale, bar.finish_s * scale
        for column in range(int(start), min(int(finish) + 1, width)):
            share = min(finish, column + 1) - max(start, column)
            symbol = symbol_of[bar.other]
            filled[column][symbol] = filled[column].get(symbol, 0.0) + max(share, 0.0)
    text = ""
    for shares in filled:
        idle = max(1.0 - sum(shares.values()), 0.0)
        best = max(shares, key=lambda symbol: (shares[symbol], symbol), default=_IDLE)
        # A hundredth of a column must be filled, or rounding would draw what is not there.
        text += best if shares and shares[best] >= max(idle, 0.01) else _IDLE
    return text


def draw_svg(
    messages: Sequence[Timing],
    host_of: Mapping[int, str],
    *,
    lanes: Lanes = Lanes.HOSTS,
    title: str = "",
    unit: str = "s",
    bound_s: float | None = None,
) -> str:
    """The picture as an SVG document; ``bound_s`` is drawn as a dashed line. ``unit`` is that of the times."""
    bars, left_out = _some_lanes(collect_bars(messages, host_of, lanes))
    total_s = max(_total_s(messages), bound_s or 0.0) or 1.0
    bars = {lane: _join_bars(of_lane, total_s) for lane, of_lane in bars.items()}
    if left_out:
        title = f"{title} ({left_out} more lanes)".lstrip()
    names = _all_names(host_of, lanes)
    hue_of = {name: number / len(names) for number, name in enumerate(names)} | {_SEVERAL: 0.0}
    scale = (_WIDTH_PX - _LABEL_PX - _RIGHT_PX) / total_s
    top = (30 if title else 8) + (_CAPTION_PX if bound_s is not None else 0)
    bottom = top + len(bars) * _LANE_PX
    others = sorted({bar.other for of_lane in bars.values() for bar in of_lane}, key=[*names, _SEVERAL].index)
    legend = _svg_legend({name: _colour(hue_of[name]) for name in others}, bottom + _AXIS_PX)
    height = bottom + _AXIS_PX + (_CAPTION_PX * len(legend) if others else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{height}" '
        f'viewBox="0 0 {_WIDTH_PX} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH_PX}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="8" y="18" font-size="13">{escape(title)}</text>')
    for row, ((name, way), of_lane) in enumerate(bars.items()):
        y = top + row * _LANE_PX
        parts.append(f'<text x="8" y="{y + 14}">{escape(_short(name))} {way}</text>')
        parts += [_svg_bar(bar, hue_of[bar.other], scale, y + 3) for bar in of_lane]
    parts += _svg_axis(total_s, unit, scale, bottom)
    parts += legend
    if bound_s is not None:
        x = _LABEL_PX + bound_s * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#000" stroke-dasharray="5 3">'
            "<title>lower bound</title></line>"
            f'<text x="{x:.1f}" y="{top - 5}" text-anchor="end">lower bound {bound_s:.4g}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _some_lanes(bars: dict[tuple[str, str], list[Bar]]) -> tuple[dict[tuple[str, str], list[Bar]], int]:
    """The lanes that a picture has room for, and the number of lanes that it leaves out."""
    return dict(list(bars.items())[:_MAX_LANES]), max(len(bars) - _MAX_LANES, 0)


def _join_bars(bars: list[Bar], total_s: float) -> list[Bar]:
    """Join bars that begin within one short interval, so that a reader can see each bar of a picture."""
    if len(bars) <= _MAX_BARS:
        return bars
    joined: dict[int, Bar] = {}
    for bar in bars:
        stretch = min(int(bar.start_s / total_s * _MAX_BARS), _MAX_BARS - 1)
        joined[stretch] = joined[stretch].joined(bar) if stretch in joined else bar
    return list(joined.values())


def _svg_bar(bar: Bar, hue: float, scale: float, y: int) -> str:
    x, width = _LABEL_PX + bar.start_s * scale, max((bar.finish_s - bar.start_s) * scale, 0.5)
    tip = f"{bar.other}: {bar.nbytes} bytes, rounds {bar.first_round} to {bar.last_round}"
    label = ""
    if width > 7 * len(bar.other):
        label = f'<text x="{x + 3:.1f}" y="{y + 12}" pointer-events="none">{escape(bar.other)}</text>'
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR_PX}" fill="{_colour(hue)}" '
        f'stroke="#555" stroke-width="0.4"><title>{escape(tip)}</title></rect>{label}'
    )


def _colour(hue: float) -> str:
    red, green, blue = (round(255 * each) for each in colorsys.hls_to_rgb(hue, 0.72, 0.6))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _svg_legend(colour_of: Mapping[str, str], y: int) -> list[str]:
    """One line for each row of the legend: what the colours of bars stand for."""
    named = list(colour_of.items())[:_MAX_NAMED]
    rows = []
    for first in range(0, len(named), _NAMED_IN_ROW):
        row = "" if first else f'<text x="8" y="{y + 11}">at the other end:</text>'
        for place in range(first, min(first + _NAMED_IN_ROW, len(named))):
            x, at = _LABEL_PX + (place - first) * _NAME_PX, y + first // _NAMED_IN_ROW * _CAPTION_PX
            row += f'<rect x="{x}" y="{at + 1}" width="11" height="11" fill="{named[place][1]}" stroke="#555"/>'
            row += f'<text x="{x + 15}" y="{at + 11}">{escape(_short(named[place][0]))}</text>'
        rows.append(row)
    if len(colour_of) > len(named):
        at = y + len(rows) * _CAPTION_PX + 11
        rows.append(f'<text x="{_LABEL_PX}" y="{at}">and {len(colour_of) - len(named)} more</text>')
    return rows


def _svg_axis(total_s: float, unit: str, scale: float, y: int) -> list[str]:
    parts = [f'<line x1="{_LABEL_PX}" x2="{_LABEL_PX + total_s * scale:.1f}" y1="{y}" y2="{y}" stroke="#000"/>']
    for tick in range(_NUM_TICKS + 1):
        at_s = total_s * tick / _NUM_TICKS
        x = _LABEL_PX + at_s * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#000"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{at_s:.3g}</text>')
    middle = _LABEL_PX + total_s * scale / 2
    parts.append(f'<text x="{middle:.1f}" y="{y + 33}" text-anchor="middle">time, {escape(unit)}</text>')
    return parts


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "~"


def _all_names(host_of: Mapping[int, str], lanes: Lanes) -> list[str]:
    return list(dict.fromkeys(host_of.values())) if lanes is Lanes.HOSTS else [f"rank {rank}" for rank in host_of]


def _total_s(messages: Sequence[Timing]) -> float:
    return max((message.finish_s for message in messages), default=0.0)
