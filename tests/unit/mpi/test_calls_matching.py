"""Messages and receives find each other as MPI's rule says, compared with a dumb reading of the rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.calls.table import ANY
from remesh.mpi.lower.matching import Arrived, Matching, Posted


@dataclass
class _Oracle:
    """Everything that happened, in order; the rule looks at all of it every time."""

    events: list[tuple[str, int, int, int]] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)

    def add(self, kind: str, comm: int, source: int, tag: int) -> int | None:
        """The earlier event of the other kind that this one meets, by its position."""
        here = len(self.events)
        self.events.append((kind, comm, source, tag))
        for earlier, (other, other_comm, other_source, other_tag) in enumerate(self.events[:here]):
            if other == kind or earlier in self.taken or other_comm != comm:
                continue
            wanted = (source, tag) if kind == "post" else (other_source, other_tag)
            message = (other_source, other_tag) if kind == "post" else (source, tag)
            if all(want in (ANY, got) for want, got in zip(wanted, message, strict=True)):
                self.taken |= {earlier, here}
                return earlier
        return None


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["post", "arrive"]), st.integers(0, 1), st.integers(-1, 2), st.integers(-1, 2)),
    max_size=40,
)


@given(_EVENTS)
def test_the_oldest_that_fits_is_taken(events: list[tuple[str, int, int, int]]) -> None:
    oracle, matching = _Oracle(), Matching()
    for position, (kind, comm, source, tag) in enumerate(events):
        if kind == "post":
            found = matching.post(Posted(position, comm, source, tag))
            met = None if found is None else found.sender_request
        else:
            source, tag = max(source, 0), max(tag, 0)
            receive = matching.arrive(Arrived(comm, source, tag, 0, b"", position))
            met = None if receive is None else receive.request
        assert met == oracle.add(kind, comm, source, tag)


def test_a_message_that_comes_between_two_receives_goes_to_the_first_that_fits() -> None:
    matching = Matching()
    matching.post(Posted(1, 7, ANY, 5))
    matching.post(Posted(2, 7, 3, ANY))
    receive = matching.arrive(Arrived(7, 3, 5, 0, b"", 0))
    assert receive is not None and receive.request == 1


def test_a_receive_that_is_taken_back_gets_nothing() -> None:
    matching = Matching()
    matching.post(Posted(1, 0, ANY, ANY))
    assert matching.withdraw(1)
    assert not matching.withdraw(1)
    assert matching.arrive(Arrived(0, 0, 0, 0, b"", 0)) is None
