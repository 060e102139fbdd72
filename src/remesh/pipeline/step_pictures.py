"""Pictures of a simulated step, as text and as SVG.

Each rank has a lane; time runs to the right; a box is an action with the number of its micro-batch. In the SVG the
values that a rank sends are thin bars under its lane, from start to end of the transfer: forwards dark, backwards
light. Blocking transfers have no bars: they are the gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from remesh.pipeline.actions import ActionKind
from remesh.pipeline.edge_values import Pass
from remesh.pipeline.step_simulation import Simulation, TimedAction, TimedTransfer

_FILL = {ActionKind.F: "-", ActionKind.B: "=", ActionKind.I: "~", ActionKind.W: "+"}
_IDLE = "."
_COLOURS = {ActionKind.F: "#a9c7ea", ActionKind.B: "#8fcfa8", ActionKind.I: "#8fcfa8", ActionKind.W: "#ecd28a"}
_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}
_SENT_COLOURS = {Pass.FORWARD: "#31598f", Pass.BACKWARD: "#d98850"}
_SENT_NAMES = {Pass.FORWARD: "values sent", Pass.BACKWARD: "gradients sent"}
_LABEL_PX = 64
_RIGHT_PX = 28
_BOX_PX = 24
_SENT_PX = 5
_LANE_PX = _BOX_PX + 2 * _SENT_PX + 6
_HEAD_PX = 46
_AXIS_PX = 26
_NUM_TICKS = 8


def draw_text(simulation: Simulation, *, width: int = 100) -> str:
    """A clock: one line for each rank, ``width`` characters for the step; ``.`` is idle.

    >>> from remesh.pipeline.costs import Costs
    >>> from remesh.pipeline.graph import StageGraph
    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> from remesh.pipeline.step_simulation import simulate_schedule
    >>> chain = StageGraph.chain(2)
    >>> print(draw_text(simulate_schedule(one_f_one_b(2, 2), chain, Costs.uniform(chain)), width=36))
    rank 0 |F0--F1--........B0======....B1======|
    rank 1 |....F0--B0======F1--B1======........|
            0 .. 9    F- B=
    """
    scale = width / simulation.step_s if simulation.step_s else 0.0
    margin = len(str(len(simulation.actions) - 1))
    lines = [f"rank {rank:>{margin}} |{_line(row, scale, width)}|" for rank, row in enumerate(simulation.actions)]
    used = {timed.action.kind for row in simulation.actions for timed in row}
    legend = " ".join(f"{kind}{fill}" for kind, fill in _FILL.items() if kind in used)
    return "\n".join([*lines, f"{' ' * (margin + 7)}0 .. {simulation.step_s:.6g}    {legend}"])


def _line(row: Sequence[TimedAction], scale: float, width: int) -> str:
    text = [_IDLE] * width
    for timed in row:
        start, end = round(timed.start_s * scale), round(timed.end_s * scale)
        label = f"{timed.action.kind}{timed.action.microbatch}"
        text[start:end] = label[: end - start].ljust(end - start, _FILL[timed.action.kind])
    return "".join(text)


def draw_svg(simulation: Simulation, *, title: str = "", bound_s: float | None = None, width_px: int = 960) -> str:
    """The picture as an SVG document; ``bound_s``, what no schedule beats, is drawn as a dashed line."""
    total_s = max(simulation.step_s, bound_s or 0.0) or 1.0
    scale = (width_px - _LABEL_PX - _RIGHT_PX) / total_s
    base = _HEAD_PX + len(simulation.actions) * _LANE_PX
    height = base + _AXIS_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height}" '
        f'viewBox="0 0 {width_px} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width_px}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="17" font-size="13">{escape(title)}</text>',
        *_legend(simulation),
    ]
    for rank, row in enumerate(simulation.actions):
        y = _HEAD_PX + rank * _LANE_PX
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        parts += [_box(timed, scale, y) for timed in row]
    parts += [_bar(transfer, scale) for transfer in simulation.transfers if transfer.end_s > transfer.start_s]
    parts += _axis(total_s, scale, base)
    if bound_s is not None:
        x = _LABEL_PX + bound_s * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD_PX - 6}" y2="{base}" stroke="#000" stroke-dasharray="5 3">'
            f"<title>no schedule beats {bound_s:.4g}</title></line>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(simulation: Simulation) -> list[str]:
    kinds = {timed.action.kind for row in simulation.actions for timed in row}
    shown = [(_COLOURS[kind], name) for kind, name in _NAMES.items() if kind in kinds]
    if any(transfer.end_s > transfer.start_s for transfer in simulation.transfers):
        shown += [(_SENT_COLOURS[way], name) for way, name in _SENT_NAMES.items()]
    parts, x = [], float(_LABEL_PX)
    for colour, name in shown:
        parts.append(f'<rect x="{x:.0f}" y="26" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="35">{name}</text>')
        x += 30 + 6.2 * len(name)
    return parts


def _box(timed: TimedAction, scale: float, y: int) -> str:
    x, width = _LABEL_PX + timed.start_s * scale, (timed.end_s - timed.start_s) * scale
    label = str(timed.action.microbatch)
    text = ""
    if width > 6.5 * len(label) + 2:
        text = f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" pointer-events="none">{label}</text>'
    tip = f"{timed.action}: {timed.start_s:.4g} to {timed.end_s:.4g}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_BOX_PX}" '
        f'fill="{_COLOURS[timed.action.kind]}" stroke="#556" stroke-width="0.5"><title>{tip}</title></rect>{text}'
    )


def _bar(transfer: TimedTransfer, scale: float) -> str:
    way = transfer.value.way
    x, width = _LABEL_PX + transfer.start_s * scale, (transfer.end_s - transfer.start_s) * scale
    y = _HEAD_PX + transfer.ranks[0] * _LANE_PX + _BOX_PX + 1 + way * (_SENT_PX + 1)
    tip = f"micro-batch {transfer.value.microbatch} to rank {transfer.ranks[1]}, edge {transfer.value.edge}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.5):.1f}" height="{_SENT_PX}" '
        f'fill="{_SENT_COLOURS[way]}"><title>{tip}</title></rect>'
    )


def _axis(total_s: float, scale: float, y: int) -> list[str]:
    parts = [f'<line x1="{_LABEL_PX}" x2="{_LABEL_PX + total_s * scale:.1f}" y1="{y}" y2="{y}" stroke="#000"/>']
    apart_s = _round_up(total_s / _NUM_TICKS)
    for tick in range(math.floor(total_s / apart_s) + 1):
        at_s = tick * apart_s
        x = _LABEL_PX + at_s * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#000"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{at_s:.4g}</text>')
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value * (1 - 1e-9))
