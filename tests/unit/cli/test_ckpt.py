"""The tools for checkpoints, as a user sees them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.formats.directory import IN_PROGRESS_FNAME
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.cli import main
from remesh.cli.ckpt_verbs import draw_cut
from remesh.dist_checkpointing import ShardedTensor


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3; the second was aborted; in the third the matrix is cut in four."""
    matrix = torch.arange(16.0).reshape(4, 4)
    remesh.save({"w": matrix, "lr": 0.1}, tmp_path / step_name(1))
    remesh.save({"w": matrix}, tmp_path / step_name(2))
    (tmp_path / step_name(2) / "metadata.json").unlink()
    (tmp_path / step_name(2) / IN_PROGRESS_FNAME).touch()
    (tmp_path / step_name(3)).mkdir()
    pieces = [
        ShardedTensor.from_rank_offsets("w", matrix[2 * r : 2 * r + 2, 2 * c : 2 * c + 2], (0, r, 2), (1, c, 2))
        for r in range(2)
        for c in range(2)
    ]
    dist_checkpointing.save({"w": pieces, "lr": 0.2}, tmp_path / step_name(3))
    return tmp_path


def ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def test_ls_tells_the_state_of_each_step(root: Path) -> None:
    lines = ckpt("ls", root).output.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1", step_name(1), "complete"],
        ["2", step_name(2), "unfinished"],
        ["3", step_name(3), "complete"],
    ]


def test_show_lists_what_is_stored_and_draws_how_it_is_cut(root: Path) -> None:
    listed = ckpt("show", root / step_name(3)).output
    assert "float32" in listed
    assert "4 x 4" in listed
    assert "common lr = 0.2" in listed
    drawn = ckpt("show", root / step_name(3), "w", "--values").output
    assert "a a b b\n  a a b b\n  c c d d\n  c c d d" in drawn
    assert "__0_0.distcp[0:" in drawn
    assert "15." in drawn
    assert "'x' of" in ckpt("show", root / step_name(3), "x").output


def test_a_drawing_is_bounded_and_shows_the_last_two_dims(tmp_path: Path) -> None:
    remesh.save({"v": torch.zeros(1000), "t": torch.zeros(2, 100, 3), "s": torch.tensor(1)}, tmp_path)
    tensors = open_checkpoint(tmp_path).manifest.tensors
    assert draw_cut(tensors["v"]) == [" ".join("a" * 32)]
    assert draw_cut(tensors["t"]) == ["a a a"] * 32
    assert draw_cut(tensors["s"]) == []


def test_diff_compares_values_across_cuts(root: Path) -> None:
    same = ckpt("diff", root / step_name(1), root / step_name(3))
    assert same.exit_code == 0
    assert "the 1 tensors are equal" in same.output
    remesh.save({"w": torch.zeros(4, 4), "new": torch.ones(1)}, root / step_name(9))
    other = ckpt("diff", root / step_name(1), root / step_name(9))
    assert other.exit_code == 1
    assert "w: 15 of 16 values, by up to 15" in other.output
    assert f"only in {root / step_name(9)}: new" in other.output


def test_verify_finds_a_flipped_bit(root: Path) -> None:
    assert "ok" in ckpt("verify", root / step_name(1)).output
    data = root / step_name(1) / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[800] ^= 1
    data.write_bytes(content)
    found = ckpt("verify", root / step_name(1))
    assert found.exit_code == 1
    assert "checksum" in found.output
    assert "Traceback" not in found.output


def test_verify_reads_a_checkpoint_without_checksums(root: Path) -> None:
    (root / step_name(1) / ".remesh-checksums").unlink()
    assert "everything can be read" in ckpt("verify", root / step_name(1)).output


def test_gc_removes_nothing_without_yes(root: Path) -> None:
    assert "would be freed" in ckpt("gc", root, "--keep-last", 1).output
    assert len(list(root.iterdir())) == 3
    assert ckpt("gc", root, "--yes").exit_code == 0
    assert {path.name for path in root.iterdir()} == {step_name(1), step_name(3)}
    ckpt("gc", root, "--keep-last", 1, "--yes")
    assert {path.name for path in root.iterdir()} == {step_name(3)}


def test_export_writes_what_others_read(root: Path, tmp_path: Path) -> None:
    result = ckpt("export", root / step_name(3), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.arange(16.0).reshape(4, 4))
    assert "no tensor has the prefix" in ckpt("export", root / step_name(3), tmp_path / "o", "--prefix", "zz").output


def test_show_says_what_an_existing_file_is(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"12345")
    result = CliRunner().invoke(main, ["ckpt", "show", str(tmp_path / "common.pt")])
    assert result.exit_code != 0
    assert "is a file of 5 bytes, expected the folder of a checkpoint" in result.output
    assert "does not exist" not in result.output


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    """Three checkpoints with a loss, whose smallest is that of the second."""
    with remesh.Checkpoints(tmp_path) as checkpoints:
        for step, loss in ((1, 2.5), (2, 1.5), (3, math.nan)):
            checkpoints.save(step, {"w": torch.ones(1)}, metrics={"loss": loss, "accuracy": 1.0 / step})
    return tmp_path


def test_ls_shows_metrics(rated: Path) -> None:
    lines = ckpt("ls", rated).output.splitlines()
    assert lines[0].split() == ["step", "directory", "state", "size", "accuracy", "loss"]
    assert [line.split()[-2:] for line in lines[1:]] == [["1", "2.5"], ["0.5", "1.5"], ["0.333333", "nan"]]


def test_metrics_that_cannot_be_read_hide_no_other_checkpoint(rated: Path) -> None:
    (rated / step_name(1) / "metrics.json").write_text("[]")
    listed = ckpt("ls", rated)
    assert listed.exit_code == 0 and "1.5" in listed.output and "expected a JSON object of numbers" in listed.output
    assert ckpt("gc", rated, "--keep-smallest", "loss", "--yes").exit_code == 1
    assert len(list(rated.iterdir())) == 3


@pytest.mark.parametrize(("option", "kept"), [("--keep-smallest", {2, 3}), ("--keep-largest", {1, 3})])
def test_gc_keeps_the_best(rated: Path, option: str, kept: set[int]) -> None:
    assert ckpt("gc", rated, option, "loss", "--yes").exit_code == 0
    assert {path.name for path in rated.iterdir()} == {step_name(step) for step in kept}


def test_gc_refuses_a_metric_that_no_checkpoint_has(rated: Path) -> None:
    misspelt = ckpt("gc", rated, "--keep-smallest", "los", "--yes")
    assert misspelt.exit_code == 2 and "found checkpoints with accuracy, loss, expected 'los'" in misspelt.output
    assert len(list(rated.iterdir())) == 3


def test_gc_refuses_metrics_where_there_are_none(root: Path) -> None:
    assert "found checkpoints with no metrics" in ckpt("gc", root, "--keep-smallest", "loss", "--yes").output
    assert len(list(root.iterdir())) == 3


def test_a_folder_without_steps_is_told_by_what_it_is(tmp_path: Path) -> None:
    remesh.save({"w": torch.zeros(2)}, tmp_path / "mine")
    itself = CliRunner().invoke(main, ["ckpt", "ls", str(tmp_path / "mine")]).output.replace("\n", "")
    assert "is a checkpoint itself: see remesh ckpt show" in itself
    above = CliRunner().invoke(main, ["ckpt", "ls", str(tmp_path)]).output.replace("\n", "")
    assert "expected directories named step-00000120" in above


def test_names_and_values_out_of_files_are_never_markup_and_never_cut(tmp_path: Path) -> None:
    names = ["[red]w[/red]", "[/] no tag is open", "long." + "x" * 150, "[link=file:///etc]k[/link]"]
    state = {name: torch.ones(2) for name in names} | {"[bold]common": "[/nothing]"}
    remesh.Checkpoints(tmp_path).save(1, state, metrics={"[blue]loss": 0.5, "y" * 90: 1.0})
    directory = tmp_path / step_name(1)
    shown = ckpt("show", directory)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    for name in names:
        assert [line for line in lines if line.strip().startswith(name)], name
    assert any("[bold]common = '[/nothing]'" in line for line in lines)
    listed = ckpt("ls", tmp_path)
    assert listed.exit_code == 0 and "[blue]loss" in listed.output and "y" * 90 in listed.output
    (directory / "__0_0.distcp").rename(directory / "gone")
    decided = ckpt("gc", tmp_path)
    assert decided.exit_code == 0 and "use another one" in decided.output, "the reason is there to its end"
