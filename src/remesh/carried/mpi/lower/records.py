"""Operations, receives and messages: C structs, which the engine works on as the Python parts do (``_records.h``)."""

from __future__ import annotations

from typing import Any

from remesh.carried.mpi.native import NATIVE

Operation: Any = NATIVE.Request
"""One operation, of the engine's making too; complete when ``done``, gone when its completion has been told.

number          the virtual handle; never used twice in a job
kind            SEND, RECEIVE, COLLECTIVE, WINDOW
comm            or the window
peer            world rank: destination of a send, target of an access; source a receive asks for, or ANY
tag, address    in the upper half: where the payload is read from or written to; 0: nowhere
num_bytes       of the send; of a receive the capacity, or PARCEL
done, detached  nobody will ask for it: forget it when done
source, message_tag, message_bytes, error, cancelled    how it ended
written         the payload stands at ``address`` already
payload         of a completed receive or collective, until it is told
"""

Arrived: Any = NATIVE.Arrived
"""A message that no receive has taken: comm, source (world rank), tag, num_bytes, payload (None: announced only, the
sender still has it), sender_request (at the sender, when announced). Good only as long as this stay: pid and address of
the payload (0 for a rank elsewhere), waits (the sender's program does nothing else), ahead (tag of what comes before it
is wanted, 0: nothing does) and ahead_piece (bytes of each piece of that)."""
Posted: Any = NATIVE.Posted
"""A receive that no message has come for: request, comm, source (world rank or ANY), tag (or ANY)."""
