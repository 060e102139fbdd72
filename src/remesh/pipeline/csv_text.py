"""CSV forms of schedules, as ``torch.distributed.pipelining`` reads and writes them.

One line for each rank, one cell for each action.

- *compute only*: F, B, I and W; an empty cell is an idle slot and means nothing. Two fused actions,
  ``(2F1;0B0)OVERLAP_F_B``, stand in one cell; read, they are two actions in that order.
- *compute and communication*: also SEND and RECV, no idle slots. A send follows what it sends. A receive stands where
  its rank is when the sender sends, so it is posted ahead, and both ends of a pair of ranks agree on the order. The
  string has a stage and a micro-batch, but no edge: this form exists for chains of stages only. Stages on one rank send
  each other nothing.

UNSHARD, RESHARD, REDUCE_GRAD and all that waits are read over in both: they belong to the runtime that made the table.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from remesh.pipeline.actions import COMMUNICATION_KINDS, Action, ActionKind
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import order_of_progress

_WAITS = {ActionKind.SEND_F: ActionKind.WAIT_SEND_F, ActionKind.SEND_B: ActionKind.WAIT_SEND_B}
_FUSED = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", re.ASCII)


class TableForm(StrEnum):
    """The form of a table; the values are those of torch's ``format``."""

    COMPUTE_ONLY = "compute_only"
    COMPUTE_COMMS = "compute_comms"


def write_csv(schedule: Schedule, form: TableForm = TableForm.COMPUTE_ONLY, *, with_waits: bool = False) -> str:
    """The schedule as CSV, as torch's ``_load_csv`` reads it in the same form.

    ``with_waits`` adds to a table with communication what torch wants from 2.15 on, and did not know before: that every
    send is waited for. It is where that costs nothing, at the end of the rank's row.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> print(write_csv(one_f_one_b(2, 2), TableForm.COMPUTE_COMMS), end="")
    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
    1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1
    """
    rows = schedule.rows if form is TableForm.COMPUTE_ONLY else add_communication(schedule)
    if with_waits:
        rows = tuple((*row, *map(_wait_for, filter(_is_send, row))) for row in rows)
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def read_csv(text: str, form: TableForm = TableForm.COMPUTE_ONLY, *, name: str = "table") -> Schedule:
    """The schedule that a table in this form means, without its communication.

    `PipelineError` names the row and the cell that cannot be, or the communication that is missing or misplaced.
    """
    rows = [
        [action for number, cell in enumerate(cells) for action in _read_cell(cell, form, f"{name}:{line}:{number}")]
        for line, cells in enumerate(csv.reader(text.splitlines()))
    ]
    compute = tuple(tuple(action for action in row if action.is_compute) for row in rows)
    found = [action for row in compute for action in row]
    if not found:
        raise PipelineError(f"reading the schedule {name!r}: found no F, B, I or W in it; name a file with a schedule")
    num_stages = 1 + max(action.stage for action in found)
    num_microbatches = 1 + max(action.microbatch or 0 for action in found)
    schedule = Schedule(name, num_stages, num_microbatches, compute)
    if form is TableForm.COMPUTE_COMMS:
        _check_communication(schedule, rows)
    return schedule


def _read_cell(cell: str, form: TableForm, where: str) -> list[Action]:
    """The actions of a cell; ``where`` is table, row and cell, counted from 0."""
    fused = _FUSED.fullmatch(cell.strip())
    if not cell.strip() and form is TableForm.COMPUTE_ONLY:
        return []
    try:
        actions = [Action.parse(part) for part in (fused.groups() if fused else (cell,))]
    except PipelineError as error:
        raise PipelineError(f"reading {where} (row and cell count from 0): {error}") from error
    wrong = [action for action in actions if form is TableForm.COMPUTE_ONLY and action.kind in COMMUNICATION_KINDS]
    if wrong:
        raise PipelineError(
            f"reading {where}: expected no communication, found {wrong[0]}; read the table as "
            f"{TableForm.COMPUTE_COMMS.value}, or leave its communication out"
        )
    return actions


def add_communication(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The rows of a chain of stages with their sends and receives; `PipelineError` for a schedule with a deadlock."""
    row_of = schedule.row_of
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for action in order_of_progress(schedule, StageGraph.chain(schedule.num_stages)):
        rows[row_of[action.stage]].append(action)
        for send, receive in _communication_of(action, row_of):
            rows[row_of[send.stage]].append(send)
            rows[row_of[receive.stage]].append(receive)
    return tuple(map(tuple, rows))


def _is_send(action: Action) -> bool:
    return action.kind in _WAITS


def _wait_for(send: Action) -> Action:
    return Action(send.stage, _WAITS[send.kind], send.microbatch)


def _communication_of(action: Action, row_of: dict[int, int]) -> Iterator[tuple[Action, Action]]:
    """The send and the receive that follow an action, if it has any."""
    if action.kind is ActionKind.W:
        return
    is_forward = action.kind is ActionKind.F
    peer = action.stage + (1 if is_forward else -1)
    if peer in row_of and row_of[peer] != row_of[action.stage]:
        send, receive = (ActionKind.SEND_F, ActionKind.RECV_F) if is_forward else (ActionKind.SEND_B, ActionKind.RECV_B)
        yield Action(action.stage, send, action.microbatch), Action(peer, receive, action.microbatch)


def _check_communication(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> None:
    """Every value between ranks is sent once, after it is made, and received once, before it is used."""
    row_of = schedule.row_of
    at: dict[Action, tuple[int, int]] = {}
    for number, row in enumerate(rows):
        for place, action in enumerate(row):
            if action in at and (action.is_compute or action.kind in COMMUNICATION_KINDS):
                raise PipelineError(f"reading the schedule {schedule.name!r}: {action} appears twice; remove one")
            at[action] = (number, place)
    expected = set()
    for action in schedule.actions():
        for send, receive in _communication_of(action, row_of):
            expected |= {send, receive}
            users = [use for use in _users(receive) if use in at]
            for before, after in ((action, send), *((receive, use) for use in users)):
                if before not in at or after not in at or at[before] > at[after] or at[before][0] != at[after][0]:
                    raise PipelineError(
                        f"reading the schedule {schedule.name!r}: expected {after} after {before} on rank "
                        f"{row_of[before.stage]}; correct the table, or read it without communication"
                    )
    foreign = [action for action in at if action.kind in COMMUNICATION_KINDS and action not in expected]
    if foreign:
        raise PipelineError(
            f"reading the schedule {schedule.name!r}: no action needs {foreign[0]}; values only go from a stage to "
            "the next one on another rank"
        )


def _users(receive: Action) -> Iterator[Action]:
    """The actions that may use what is received."""
    kinds = (ActionKind.F,) if receive.kind is ActionKind.RECV_F else (ActionKind.B, ActionKind.I)
    for kind in kinds:
        yield Action(receive.stage, kind, receive.microbatch)
