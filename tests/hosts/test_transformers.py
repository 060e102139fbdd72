"""transformers' Trainer with our checkpoints: saved, killed, and gone on from by another number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import remesh
from remesh.cli import main
from remesh.foundation.errors import ConfigError
from tests.hosts.jobs import run_ranks

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "transformers_trainer.py"


def _run(num_processes: int, folder: Path, script: Path = _EXAMPLE) -> tuple[int, str]:
    return run_ranks(num_processes, (str(script), str(folder)))


def _losses(output: str) -> dict[int, float]:
    words = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in words}


@pytest.mark.timeout(1800)
def test_a_killed_job_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    code, output = _run(2, tmp_path / "a")
    assert code != 0 and set(_losses(output)) == {1, 2, 3, 4, 5}, output
    (tmp_path / "a" / "checkpoint-6").mkdir()  # as a save leaves it that was killed
    code, output = _run(3, tmp_path / "a")
    assert code == 0, output
    found = _losses(output)
    assert set(found) == {5, 6, 7, 8}, output
    whole = tmp_path / "whole.py"
    whole.write_text(
        _EXAMPLE.read_text().replace("KILLED_AT, BATCH, LENGTH = 8, 5", "KILLED_AT, BATCH, LENGTH = 8, 99")
    )
    code, output = _run(1, tmp_path / "b", whole)
    assert code == 0, output
    expected = _losses(output)
    assert found == pytest.approx({step: expected[step] for step in found}, rel=2e-3)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("option", ["save_only_model", "enable_jit_checkpoint"])
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path, option: str) -> None:
    from transformers import TrainingArguments  # noqa: PLC0415 - a host may be missing

    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **{option: True})
    with pytest.raises(ConfigError, match=rf"\['{option}'\]"):
        RemeshTrainer(torch.nn.Linear(2, 2), arguments).train()


class _OfALibrary:
    """What Trainers of other libraries do around transformers' own: a file beside, and a model of files of theirs."""

    coefficient = 0.0

    def _save_checkpoint(self, model: object, trial: object) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / "coefficient").write_text(str(self.state.global_step / 2))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.coefficient = float(Path(checkpoint, "coefficient").read_text())

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        raise OSError(f"no file of this library's in {checkpoint_path}")


def _library_trainer() -> type:
    from transformers import Trainer  # noqa: PLC0415 - a host may be missing

    return type("LibraryTrainer", (_OfALibrary, Trainer), {})


def _words_of(folder: Path, num_steps: int) -> tuple[object, object, object]:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments  # noqa: PLC0415 - a host may be missing

    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=8))
    words = [{key: torch.arange(start, start + 8) for key in ("input_ids", "labels")} for start in range(12)]
    options = {"max_steps": num_steps, "per_device_train_batch_size": 2, "save_steps": 1, "save_total_limit": 1}
    options["lr_scheduler_type"] = "constant"  # another one would know how long a job is
    return model, TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options), words


def test_under_a_trainer_of_a_library_its_own_saves_and_loads_are_done_too(tmp_path: Path) -> None:
    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415 - a host may be missing

    kind = type("Ours", (_library_trainer(), RemeshTrainer), {})
    found = []
    for folder, lengths in ((tmp_path / "resumed", (4, 6)), (tmp_path / "whole", (6,))):
        for num_steps in lengths:
            model, arguments, words = _words_of(folder, num_steps)
            trainer = kind(model, arguments, train_dataset=words)
            trainer.train(resume_from_checkpoint=True)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-6"]
        found.append((trainer.coefficient, model.state_dict()))
    (resumed, weights), (_, expected) = found
    assert resumed == 2.0
    assert all(weights[name].equal(one) for name, one in expected.items())


def test_a_class_that_would_pass_over_a_librarys_saves_is_refused_when_it_is_made() -> None:
    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415 - a host may be missing

    with pytest.raises(ConfigError, match=r"stands before LibraryTrainer.*class Ours\(LibraryTrainer, RemeshTrainer\)"):
        type("Ours", (RemeshTrainer, _library_trainer()), {})


def test_a_load_of_the_users_own_is_left_to_it() -> None:
    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415 - a host may be missing

    def own(self: object, *_: object) -> None: ...

    kind = type("Ours", (_library_trainer(), RemeshTrainer), {"_load_from_checkpoint": own})
    assert kind._load_from_checkpoint is own


def test_parameters_of_a_loss_that_no_checkpoint_would_have_are_refused_by_name(tmp_path: Path) -> None:
    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415 - a host may be missing

    model, arguments, words = _words_of(tmp_path, 1)
    loss = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    trainer = RemeshTrainer(model, arguments, train_dataset=words, optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match=r"1 parameters that are not of its model, of shapes \[\(2, 3\)\]"):
        trainer.train()


def test_a_parameter_that_never_had_a_gradient_goes_on_without_moments(tmp_path: Path) -> None:
    from transformers import Trainer  # noqa: PLC0415 - a host may be missing

    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415

    found = []
    for kind, lengths in ((RemeshTrainer, (4, 6)), (Trainer, (6,))):
        for num_steps in lengths:
            model, arguments, words = _words_of(tmp_path / kind.__name__, num_steps)
            model.unseen = torch.nn.Linear(3, 2)
            trainer = kind(model, arguments, train_dataset=words)
            trainer.train(resume_from_checkpoint=num_steps == 6 and kind is RemeshTrainer)
        states = trainer.optimizer.optimizer.state
        assert not [name for name, one in model.unseen.named_parameters() if states.get(one)]
        moments = [value for one in model.parameters() for value in states.get(one, {}).values()]
        found.append([*model.state_dict().values(), *moments])
    resumed, expected = found
    assert len(resumed) == len(expected) > 30
    assert all(one.equal(other) for one, other in zip(resumed, expected, strict=True))


class _Scored:
    """A Trainer whose model is best at its second step."""

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        metrics = {"eval_score": -abs(self.state.global_step - 2.0)}
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _train_and_resume(kind: type, folder: Path, limit: int | None) -> list[object]:
    """What lies in the folder, and which the Trainer calls the best, behind four steps and behind two more."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments  # noqa: PLC0415 - a host may be missing

    told: list[object] = []
    for num_steps in (4, 6):
        torch.manual_seed(3)
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=8))
        words = [{key: torch.arange(start, start + 8) for key in ("input_ids", "labels")} for start in range(12)]
        arguments = TrainingArguments(
            str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            max_steps=num_steps,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="score",
            greater_is_better=True,
            save_total_limit=limit,
        )
        trainer = type("Trainer", (_Scored, kind), {})(model, arguments, train_dataset=words, eval_dataset=words)
        trainer.train(resume_from_checkpoint=num_steps > 4)
        names = sorted(path.name for path in folder.iterdir())
        told += [names, trainer.state.best_model_checkpoint, trainer.state.best_global_step, trainer.state.total_flos]
        told += [model.transformer.wte.weight.detach().clone().tolist()]
    return [str(one).replace(str(folder), "FOLDER") for one in told]


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3])
def test_what_is_kept_is_what_transformers_keeps(tmp_path: Path, limit: int | None) -> None:
    from transformers import Trainer  # noqa: PLC0415 - a host may be missing

    from remesh.integrations.transformers import RemeshTrainer  # noqa: PLC0415

    expected = _train_and_resume(Trainer, tmp_path / "theirs", limit)
    assert _train_and_resume(RemeshTrainer, tmp_path / "ours", limit) == expected


def test_what_save_pretrained_has_written_in_several_files_goes_both_ways(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - a host may be missing

    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    for source, target, to in (("theirs", "ours", "torch_dist"), ("ours", "back", "safetensors")):
        verb = ["ckpt", "convert", str(tmp_path / source), str(tmp_path / target), "--to", to]
        main([*verb, *(("--max-file-bytes", "10000") if to == "safetensors" else ())], standalone_mode=False)
    (tmp_path / "back" / "config.json").write_bytes((tmp_path / "theirs" / "config.json").read_bytes())
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "back").state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys() and all(found[name].equal(one) for name, one in expected.items())
    wte = {"transformer.wte.weight": torch.zeros(40, 16)}
    loaded = remesh.load(wte, tmp_path / "ours", strict=False)
    assert loaded["transformer.wte.weight"].equal(expected["transformer.wte.weight"])
