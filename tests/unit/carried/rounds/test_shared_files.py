"""What ranks have noted of the files that several of them write to, made one at the commit."""

from __future__ import annotations

import random
from typing import Any

from remesh.carried.rounds.shared_files import agree_on_files


def _seen(place: str, mtime_ns: int, num_bytes: int, seen_ns: int) -> dict[str, Any]:
    seen = {"mtime_ns": mtime_ns, "num_bytes": num_bytes, "seen_ns": seen_ns}
    return {"path": "p", "place": place, **seen, "sha256": f"{mtime_ns}-{num_bytes}-{seen_ns}"}


def test_all_who_have_a_file_get_what_was_seen_last_whoever_stopped_first() -> None:
    chance = random.Random(1)
    for _ in range(200):
        # A history: each change has a later time, or the same one (clocks of files have ticks) and more bytes.
        looks, mtime_ns, num_bytes = [], 0, 0
        for seen_ns in range(5):
            mtime_ns, num_bytes = mtime_ns + chance.randrange(2), num_bytes + chance.randrange(2)
            looks.append(_seen("log", mtime_ns, num_bytes, seen_ns))
        ranks = chance.sample(range(5), 5)
        other = _seen("other", 99, 99, 99)
        reports = {rank: {"written_files": [look, other]} for rank, look in zip(ranks, looks, strict=True)}
        agreed = agree_on_files(reports)
        for report in agreed.values():
            log, untouched = report["written_files"]
            assert (log["num_bytes"], log["mtime_ns"], log["sha256"]) == (num_bytes, mtime_ns, looks[-1]["sha256"])
            assert untouched == other


def test_a_file_that_was_cut_by_a_rank_that_stopped_later_has_its_later_length() -> None:
    first, later = _seen("log", 1, 500, 1), _seen("log", 2, 100, 2)
    agreed = agree_on_files({0: {"written_files": [first]}, 1: {"written_files": [later]}, 2: {"has_image": False}})
    assert [agreed[rank]["written_files"][0]["num_bytes"] for rank in (0, 1)] == [100, 100]
    assert agreed[2]["written_files"] == []
