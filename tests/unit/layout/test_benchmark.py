"""The benchmarks of the room, tiny: they run, and their pairs are what their names say."""

from benchmarks.layout import overlap


def test_overlap_benchmark_runs_on_sixteen_ranks():
    rows = overlap.overlaps(4)
    assert len(rows) == len(overlap.pairs(4))
    assert any("rows to columns, 256 slices" in row.case for row in rows)


def test_other_rows_run():
    assert overlap.small_tensors(2)[0].goal == 0.001
    assert overlap.against_comparing_all(2)[0].value > 0
    assert overlap.building(2)[0].unit == "s"


def test_every_pair_is_of_complete_layouts():
    for name, (src, dst) in overlap.pairs(3).items():
        src.check(name)
        dst.check(name)
