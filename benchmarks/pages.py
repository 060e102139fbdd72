"""Table of the measured pages: which rows of which report stand where, and the verb that writes them.

python -m benchmarks.pages reshard/measured       docs/reshard/measured.md, from benchmarks/out/reshard.json
python -m benchmarks.pages                        the names of all pages, and what measures first
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.page import BOUND, GOAL, SPREAD, VALUE, Bars, Cases, Column, Grid, Growth, Page, Plain

_LINKS = r"(?P<case>{}.*?)(?:, |: )(?P<what>[\w ]+|bytes over NICs, counted over planned)"
_HURT = "(?P<case>one worker killed|one node killed|node with the rendezvous killed)"
_COMPUTED = "planned and validated, of the processor"
_REPEATED = (_COMPUTED, "again, with the plan remembered")
_SHARED = ("replicas share the writing, of the processor", "writers of plain states, of the processor")
_OVER = Column("over its bound", lambda row: f"{row.value / row.bound:.1f}" if row.bound else "")
_FRACTIONS = "simulated fraction of 1F1B's signal bound, S={} M={} c=(?P<c>.+)F: (?P<what>(?!searched over).+)"

PAGES = (
    Page(
        "reshard/measured",
        "make bench ROOM=reshard",
        "three that take turns, unless `REPEATS` says otherwise; the median",
        {
            "one sender": Cases(_LINKS.format("F5")),
            "table 2": Cases(_LINKS.format("F6")),
            "beyond": Cases(_LINKS.format("N")),
            "planner and loopback": Plain(columns=(VALUE, BOUND, GOAL)),
        },
    ),
    Page(
        "reshard/first_byte",
        "python -m benchmarks.reshard.first_byte",
        "one of each move",
        {"moves": Cases("(?P<move>.+): (?P<what>.+)")},
        report="reshard-first-byte",
    ),
    Page(
        "reshard/scale",
        "python -m benchmarks.reshard.scale",
        "three, the least of them",
        {
            "moves": Cases(
                "planning (?P<move>.+): (?P<what>.+)",
                picture=Growth(
                    *("scale.svg", "Planning time over ranks", "move", "what", "ranks"),
                    unit="s",
                    goals={1024: 0.05, 8192: 2.0},
                ),
            )
        },
        report="reshard-scale",
    ),
    Page(
        "reshard/ablation",
        "python -m benchmarks.reshard.ablation",
        "",
        {
            "orders": Cases(
                "simulated orders, (?P<case>.+): (?P<what>.+)",
                picture=Bars("ablation-orders.svg", "Finish over lower bound, by sender choice and order", "case"),
            ),
            "random pairs": Cases(r"orders of (?P<pairs>\d+) random pairs, (?P<what>.+): (?P<algorithm>.+)"),
            "ways": Cases(
                "simulated ways, (?P<mesh>.+): (?P<what>.+)",
                picture=Bars("ablation-ways.svg", "Time over one copy, one sender to (hosts, devices)", "mesh"),
            ),
        },
        report="reshard-ablation",
    ),
    Page(
        "checkpoint/measured",
        "make bench ROOM=checkpoint",
        "rounds of all programs in turn, the least of each",
        {
            "saves and loads": Plain(),
            "parts": Plain("an eighth of the.*"),
            "background": Plain(".*in the background by a.*"),
            "sums and conversions": Plain(".*(SHA-256|verify|convert).*"),
            "planning": Plain(".* ranks, .*"),
        },
    ),
    Page(
        "checkpoint/planning",
        "python -m benchmarks.checkpoint.planning",
        "the least of three",
        {
            "ranks": Cases(
                r"(?P<ranks>\d+) ranks, (?P<tensors_each>\d+) tensors each: (?P<what>.*)",
                picture=Growth(
                    *("planning.svg", "Seconds of planning over the number of ranks", "what", "ranks", "ranks"),
                    only=(*_REPEATED, *_SHARED),
                    unit="s",
                    linear=_COMPUTED,
                ),
            ),
            "growth": Plain(),
        },
        report="checkpoint-planning",
    ),
    Page(
        "elastic/measured",
        "make bench ROOM=elastic",
        "as many as the column of kills says; elsewhere the median of several",
        {
            "recovery": Cases(
                rf"{_HURT}: (?P<program>\w+),? (?P<what>kills|jobs that .*|kill to .*|over .*|steps lost)",
                (
                    *("kills", "jobs that did not come back", "kill to next step, p50", "kill to next step, p95"),
                    *("over remesh, p50", "over remesh, p95", "steps lost"),
                ),
            ),
            "phases": Cases(rf"{_HURT}: remesh, (?P<what>.+), (?P<share>p\d+)"),
            "costs": Plain(),
            "control plane": Cases(
                r"control plane, (?P<agents>\d+) agents, (?P<event>.+): (?P<what>.+)",
                by=("event", "agents"),
                picture=Growth(
                    *("control-plane.svg", "Messages of an event, for each agent", "event", "agents", "agents"),
                    only=("messages per agent",),
                ),
            ),
            "growth": Cases(r"control plane, (?P<event>[^:]+): (?P<what>growth of .+)"),
            "agents": Cases(r"control plane, (?P<agents>\d+) agents: (?P<what>.+)"),
        },
        rows="(?!restart mode, ).*",
    ),
    Page(
        "elastic/restarts",
        "PARTS=attempts KEEP=1 make bench ROOM=elastic",
        "as many as the column of kills says; the median",
        {
            "restarts": Cases(r"restart mode, (?P<meeting_place>\w+): (?P<launcher>\w+), (?P<what>.+)"),
            "starts": Cases("restart mode, start, (?P<start>.+): (?P<what>.+)"),
        },
        rows="restart mode, .*",
    ),
    Page(
        "elastic/recovery",
        "python -m benchmarks.elastic.bounds",
        "as many kills as the last row says; medians, of each phase by itself",
        {"phases": Plain(columns=(VALUE, BOUND, _OVER, GOAL))},
        report="elastic-recovery",
    ),
    Page(
        "integrations/measured",
        "make bench ROOM=integrations",
        "host and ours in turn; the median",
        {"weights": Plain("sync of.*"), "saves and loads": Plain()},
    ),
    Page(
        "memory",
        "make bench ROOM=memory",
        "each verb once, two ranks; the rank that took most",
        {"verbs": Cases("(?P<verb>.+): (?P<what>.+)")},
    ),
    Page(
        "mpi/measured",
        "python -m benchmarks.mpi.costs",
        "the median of interleaved turns",
        {"costs": Plain(columns=(VALUE, BOUND, GOAL))},
        report="mpi_costs",
    ),
    Page(
        "mpi/matrix",
        "python -m benchmarks.mpi.matrix",
        "17 restarts a job",
        {"pairs": Grid("pair (?P<configuration>.+) -> (?P<what>.+)"), "checkpoints": Plain()},
        report="mpi_matrix",
    ),
    Page(
        "mpi/images-measured",
        "python -m benchmarks.mpi.images && python -m benchmarks.mpi.engine",
        "the median, with its spread",
        {
            "jobs": Plain(columns=(VALUE, GOAL, SPREAD)),
            "one process": Plain("(full image|increment|the same pages|restore of).*", (VALUE, GOAL, SPREAD)),
        },
        report="mpi_images",
    ),
    Page(
        "pipeline/measured",
        "MODELS=1 make bench ROOM=pipeline",
        "three, the median",
        {
            "fractions": Cases("(?P<case>.+): fraction of the signal bound, (?P<what>.+)"),
            "gains": Plain(),
            "ablation": Cases(
                r"ablation U-Transformer, paced, M=(?P<micro_batches>\d+): (?P<what>.+)",
                picture=Bars("measured-ablation.svg", "Throughput over Broadcast, U-Transformer", "micro_batches"),
            ),
        },
        rows="(stubs|gpt-bench|u-transformer-bench|ablation U-Transformer).*",
    ),
    Page(
        "pipeline/simulated",
        "make bench ROOM=pipeline",
        "",
        {
            **{
                f"S={stages} M={num}": Cases(_FRACTIONS.format(stages, num))
                for stages, num in ((2, 32), (4, 16), (8, 32))
            },
            "time against memory": Cases("frontier S=4 M=16 c=1F, (?P<schedule>.+): (?P<what>.+)"),
            "ablation": Cases(
                r"simulated ablation, U-shaped S=4 c=0.5F M=(?P<micro_batches>\d+): (?P<what>.+)",
                picture=Bars("ablation.svg", "Throughput over blocking 1F1B, U-shaped, simulated", "micro_batches"),
            ),
        },
        rows="(simulated|frontier).*",
    ),
    Page(
        "torch_programs/measured",
        "make bench ROOM=torch_programs",
        "the least of interleaved turns; of calls, the median of bursts that take turns, and of their differences",
        {"costs": Plain()},
    ),
)


def main(names: Sequence[str]) -> None:
    """Write the pages that are named, or tell their names."""
    pages = {page.name: page for page in PAGES}
    if not names:
        print("\n".join(f"{page.name:<24} after {page.verb}" for page in PAGES))
    if unknown := sorted(set(names) - set(pages)):
        raise SystemExit(f"writing pages: found {', '.join(unknown)}, expected some of {', '.join(pages)}")
    for page in map(pages.__getitem__, names):
        if not page.report_path.exists():
            raise SystemExit(f"writing docs/{page.name}.md: no report {page.report_path}; measure first: {page.verb}")
        try:
            page.write(json.loads(page.report_path.read_text()))
        except ValueError as error:
            raise SystemExit(str(error)) from None
        print(f"written to docs/{page.name}.md")


if __name__ == "__main__":
    main(sys.argv[1:])
