"""A verb ends as its tests do: one that tested nothing has not passed."""

from tests.rules.source_tree import ROOT


def test_no_verb_forgives_a_run_of_tests() -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", "").splitlines()
    found = [line for line in lines if "-m pytest" in line and (line.startswith("\t-") or "|" in line or ";" in line)]
    assert not found, "what make hears is pytest's own exit code, also 5 for a run that has found no test"


def test_ci_leaves_no_test_out_that_is_not_of_a_release() -> None:
    """What leaves the patience of a developer is marked `slow`, and runs there all the same; none is chosen by name."""
    verbs = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert verbs == ["make check", "make test", "make mpi", "make test-slow", "make docs"]
