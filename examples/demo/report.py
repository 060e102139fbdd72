"""The demo's report: one HTML file without anything outside it. Pure: figures in, text out."""

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 324, 46, 52
"""Of the loss plot; the steps and the legend are in its bottom margin, where no line of the plot goes."""
PHASE_COLOURS = {
    "leave": "#c2410c",
    "meet": "#b45309",
    "grow": "#0f766e",
    "fill": "#1d4ed8",
    "first step": "#7e22ce",
}
PHASE_MEANINGS = {
    "leave": "all workers have left the broken collective (or, when growing, have finished the step)",
    "meet": "rendezvous: who is alive, and which mesh is next",
    "grow": "process groups are made",
    "fill": "the model is built again; its state is planned and moved",
    "first step": "the first step on the new mesh ends",
}

STYLE = """
:root { --ink: #1c1917; --soft: #57534e; --line: #d6d3d1; --paper: #fafaf9; --card: #ffffff; --accent: #1d4ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7e5e4; --soft: #a8a29e; --line: #44403c; --paper: #1c1917; --card: #292524; --accent: #93c5fd; }
}
body { margin: 0 auto; max-width: 920px; padding: 2rem 1.2rem; background: var(--paper); color: var(--ink);
       font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); } code { font-size: .9em; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: .7rem 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
       border-bottom: 1px solid var(--line); vertical-align: top; } .number { text-align: right;
       font-variant-numeric: tabular-nums; }
.kept { color: #15803d; font-weight: 600; } .broken { color: #b91c1c; font-weight: 600; }
@media (prefers-color-scheme: dark) { .kept { color: #86efac; } .broken { color: #fca5a5; } }
.newest { display: flex; flex-wrap: wrap; gap: .4rem 1.7rem; }
.newest b { display: block; color: var(--ink); font-size: 1.25rem; }
.meshes { display: flex; flex-wrap: wrap; gap: .8rem; align-items: center; }
.mesh { display: grid; gap: 3px; } .rank { border: 1px solid var(--line); border-radius: 4px; padding: .1rem .5rem;
       font-size: 12px; text-align: center; } .arrow { color: var(--soft); }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; background: var(--line); margin: .5rem 0; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: .35rem; }
"""
CURVE_STYLE = """
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg { max-width: 100%; height: auto; }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--accent); stroke-width: 1.6; }
.reference { fill: none; stroke: var(--soft); stroke-width: 7; opacity: .3; }
.mark { stroke: #c2410c; stroke-dasharray: 4 3; } svg .mark-text { fill: #c2410c; font-weight: 600; }
@media (prefers-color-scheme: dark) { svg .mark-text { fill: #fdba74; } .mark { stroke: #fdba74; } }
"""


def render(summary: dict[str, Any], curves: dict[str, Any]) -> str:
    """The whole page."""
    kept = sum(summary["promises"].values())
    machine = summary["machine"]
    parts = [
        "<h1>Remesh: a job that lost a node and went on</h1>",
        f'<p class="soft">{summary["steps"]} steps, {summary["samples"]} samples, {summary["seconds"]:.0f} s in all; '
        f"{machine['cpus']} CPUs, load {machine['load']:.1f} at the end, Python {escape(machine['python'])}.</p>",
        _newest(summary, curves),
        "<h2>Loss</h2>",
        f'<div class="card">{_loss_plot(curves, summary["changes"])}'
        f'<p class="soft">Thick grey: the same training, never interrupted. Largest difference '
        f"{summary['max_loss_difference']:.1e}, tolerance {summary['loss_tolerance']:.0e}: "
        f"{escape(summary['loss_tolerance_reason'])}.</p></div>",
        f"<h2>Promises: {kept} of {len(summary['promises'])} kept</h2>",
        _promises(summary["promises"]),
        "<h2>Meshes</h2>",
        f'<div class="card"><div class="meshes">{_meshes(summary["meshes"], summary["members"])}</div>'
        f'<p class="soft">Processes of the surviving node before the loss: {summary["survivor_pids_before"]}, '
        f"after the return: {summary['survivor_pids_after']}.</p></div>",
        "<h2>Changes</h2>",
        _legend(),
        *(_change(change) for change in summary["changes"]),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Remesh demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{CURVE_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def render_picture(curves: dict[str, Any], changes: list[dict[str, Any]]) -> str:
    """The loss curve alone, as an SVG file for light and dark pages."""
    root, dark = STYLE.split("\nbody", 1)[0].split("@media", 1)
    style = f"{root}@media{dark}{CURVE_STYLE}".replace(":root", "svg")
    plot = _loss_plot(curves, changes)
    opened = plot.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    paper = '<rect width="100%" height="100%" rx="6" style="fill: var(--card)"/>'  # readable on any page around it
    return opened.replace(">", f"><style>{style}</style>{paper}", 1) + "\n"


def format_axes(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())


def format_bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.2f} MiB"


def _promises(promises: dict[str, bool]) -> str:
    verdicts = {name: "kept" if kept else "broken" for name, kept in promises.items()}
    rows = "".join(f'<tr><td class="{v}">{v}</td><td>{escape(name)}</td></tr>' for name, v in verdicts.items())
    return f'<div class="card"><table>{rows}</table></div>'


def _newest(summary: dict[str, Any], curves: dict[str, Any]) -> str:
    """What people look for first."""
    step, loss = curves["job"][-1]
    shown = {
        "newest loss": f"{loss:.3f} at step {step}" if math.isfinite(loss) else f"not a number ({loss}) at step {step}",
        "speed": f"{summary['steps_per_s']:.1f} steps/s",
        "all train again after the loss": f"{summary['recovery_s']['total']:.2f} s",
        "after the return": f"{summary['growth_s']['total']:.2f} s",
        "read from disk": format_bytes(summary["bytes_from_disk"]),
    }
    cells = "".join(f'<div class="soft">{name}<b>{escape(value)}</b></div>' for name, value in shown.items())
    return f'<div class="card newest">{cells}</div>'


def _loss_plot(curves: dict[str, Any], changes: list[dict[str, Any]]) -> str:
    drawn = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    last = max(step for step, _ in curves["reference"])
    top = max((loss for points in drawn.values() for _, loss in points), default=1.0) * 1.05
    lost = [step for step, loss in curves["job"] if not math.isfinite(loss)]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 14) * step / last

    def y(loss: float) -> float:
        return 34 + (HEIGHT - BOTTOM - 34) * (1 - loss / top)

    def path(points: list[list[float]]) -> str:
        return " ".join(f"{'L' if i else 'M'}{x(step):.1f},{y(loss):.1f}" for i, (step, loss) in enumerate(points))

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 14}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v}</text>'
        for v in range(int(top) + 1)
    )
    ticks = "".join(
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, 20)
    )
    marks = "".join(_mark(x(change["step"]), at, change["what"]) for at, change in enumerate(changes))
    legend = (
        f'<path class="curve" d="M{LEFT},{HEIGHT - 12} h26"/>'
        f'<text x="{LEFT + 32}" y="{HEIGHT - 8}">this job, loss by step</text>'
        f'<path class="reference" d="M{LEFT + 180},{HEIGHT - 12} h26"/>'
        f'<text x="{LEFT + 212}" y="{HEIGHT - 8}">the same training, never interrupted</text>'
    )
    if lost:
        legend += (
            f'<text class="mark-text" x="{LEFT + 6}" y="{HEIGHT - BOTTOM - 8}">no number from step {lost[0]}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss by step">{grid}{ticks}'
        f'<path class="reference" d="{path(drawn["reference"])}"/>'
        f'<path class="curve" d="{path(drawn["job"])}"/>{marks}{legend}</svg>'
    )


def _mark(x: float, at: int, what: str) -> str:
    """A dashed line where something happened, and what; names take turns on two lines, and stay in the picture."""
    y = 16 if at % 2 else 28
    is_right = x > 0.75 * WIDTH
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="mark-text" x="{x - 3 if is_right else x + 3:.1f}" y="{y}" '
        f'text-anchor="{"end" if is_right else "start"}">{escape(what)}</text>'
    )


def _meshes(meshes: list[dict[str, int]], members: list[list[dict[str, Any]]]) -> str:
    shown = []
    for axes, ranks in zip(meshes, members, strict=True):
        sizes = list(axes.values())
        columns = sizes[-1] if len(sizes) > 1 else 1
        cells = "".join(
            f'<div class="rank">rank {rank} · {escape(one["node"])}<br>pid {one["pid"]}</div>'
            for rank, one in enumerate(ranks)
        )
        shown.append(
            f'<div><div class="soft">{format_axes(axes)}</div>'
            f'<div class="mesh" style="grid-template-columns: repeat({columns}, auto)">{cells}</div></div>'
        )
    return '<span class="arrow">→</span>'.join(shown)


def _change(change: dict[str, Any]) -> str:
    total = sum(change["phases"].values())
    bars = "".join(
        f'<div style="width:{100 * seconds / (total or 1):.2f}%;background:{PHASE_COLOURS[name]}" '
        f'title="{escape(name)} {seconds:.3f} s"></div>'
        for name, seconds in change["phases"].items()
    )
    phases = " ".join(
        f'<span class="key" style="background:{PHASE_COLOURS[name]}"></span>{escape(name)} {seconds:.3f} s&emsp;'
        for name, seconds in change["phases"].items()
    )
    moved = "".join(
        f'<tr><td>{escape(giver)}</td><td>{escape(taker)}</td><td class="number">{format_bytes(count)}</td></tr>'
        for giver, taker, count in change["moved"]
    )
    table = f"<table><tr><th>from</th><th>to</th><th class=number>moved</th></tr>{moved}</table>" if moved else ""
    return (
        f'<div class="card"><strong>{escape(change["what"])}: mesh {format_axes(change["to"])}</strong> '
        f"at step {change['step']}, in {total:.2f} s"
        f'<p class="soft">{escape(change["reason"])}</p><div class="bar">{bars}</div><p class="soft">{phases}</p>'
        f"{table}<p>State that stayed in place: {format_bytes(change['bytes_kept'])}. "
        f"Read from disk: {format_bytes(change['bytes_from_disk'])}.</p></div>"
    )


def _legend() -> str:
    rows = "".join(
        f'<tr><td><span class="key" style="background:{colour}"></span>{escape(name)}</td>'
        f'<td class="soft">{escape(PHASE_MEANINGS[name])}</td></tr>'
        for name, colour in PHASE_COLOURS.items()
    )
    return f'<div class="card"><table>{rows}</table></div>'
