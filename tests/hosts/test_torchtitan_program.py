"""torchtitan's own program, ``torchtitan.train``, with our manager in its config: killed, and gone on from."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from tests.hosts.jobs import run_job, stored_tensors

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_RANK = Path(__file__).with_name("titan_rank.py")
_ROOT = _RANK.parents[2]


def _make_data(folder: Path) -> None:
    """What its checkout has and its wheel has not: a tokenizer and some texts."""
    tokenizers = pytest.importorskip("tokenizers")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=4)) for _ in range(300)]
    texts = [" ".join(chance.choices(words, k=100)) for _ in range(400)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"unk_token": "<unk>", "bos_token": "<begin>", "eos_token": "<end>"}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=list(named.values())))
    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    made.save(str(assets / "tokenizer" / "tokenizer.json"))
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    (assets / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def _train(folder: Path, config: str, num_ranks: int, *more: str, killed_when: Path | None = None) -> dict[int, float]:
    """Losses by the steps that were done: six in all, saved at every second one; four sentences a step."""
    if not (folder / "tests").exists():
        _make_data(folder)
    of_run = "--training.steps 6 --training.seq_len 32 --training.global_batch_size 4 --training.local_batch_size 2"
    of_run += " --debug.seed 7"  # without a seed, runs begin with different parameters
    of_cpu = " --training.disable_cuda_graphs --validator.no-enable --parallelism.spmd_backend partial_dtensor"
    command = [str(_RANK), "--module", "tests.hosts.titan_rank", "--config", config, "--dump_folder", "."]
    command += (of_run + of_cpu).split()
    variables = {"PYTHONPATH": str(_ROOT), "NO_COLOR": "1"}
    said = run_job(num_ranks, [*command, *more], folder, variables=variables, killed_when=killed_when)
    plain = re.sub("\x1b[^m]*m", "", said)
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +(\d+\.\d+)", plain)}


@pytest.mark.timeout(1800)
def test_the_program_goes_on_after_a_kill_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    places = {name: tmp_path / name for name in ("theirs", "ours", "theirs-on-one", "ours-on-one")}
    for place in places.values():
        place.mkdir()
    whole = _train(places["theirs"], "theirs", 2)
    _train(places["ours"], "ours", 2, killed_when=places["ours"] / "checkpoint" / "step-4" / ".metadata")
    for name in ("theirs-on-one", "ours-on-one"):
        shutil.copytree(places["ours"], places[name], dirs_exist_ok=True)
    # To the bit, as if never killed.
    assert _train(places["ours"], "ours", 2) == {step: whole[step] for step in (5, 6)}
    _check_equal(places["ours"], places["theirs"])
    # torchtitan's position in the data belongs to the number of ranks.
    for by in ("theirs", "ours"):
        losses = _train(places[f"{by}-on-one"], by, 1, "--checkpoint.exclude_from_loading", "dataloader")
        assert losses.keys() == {5, 6}
    _check_equal(places["ours-on-one"], places["theirs-on-one"])


def _check_equal(found: Path, expected: Path) -> None:
    """The last checkpoints of two jobs hold the same parameters and moments."""
    told, wanted = (stored_tensors(place / "checkpoint" / "step-6") for place in (found, expected))
    named = {name: one for name, one in wanted.items() if not name.startswith("dataloader")}
    assert len(named) > 100 and all(told[name].equal(one) for name, one in named.items())
