"""``transformers.Trainer`` with checkpoints of Remesh: saved by all ranks, in one step, for any number of them.

    from remesh.integrations.transformers import RemeshTrainer as Trainer

    class Trainer(SFTTrainer, RemeshTrainer):    # a Trainer of another library: its own first
        pass

``checkpoint-N`` has the model, optimizer and scheduler, each rank's random numbers, and the Trainer's own state, all in
one step: a crash leaves the checkpoint before, and ``train(resume_from_checkpoint=True)`` finds it. Weights alone, for
``from_pretrained``, are written by ``save_model`` as ever.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict

from remesh.checkpoint.plain import load, load_chosen, save
from remesh.checkpoint.run.housekeeping import remove_checkpoint
from remesh.checkpoint.run.load_requests import stored_names
from remesh.checkpoint.run.reader import OpenCheckpoint, is_complete
from remesh.checkpoint.storage import location_of
from remesh.comm.gather import all_gather_json, step_together
from remesh.foundation.errors import ConfigError
from remesh.foundation.files import replace_whole
from remesh.integrations.first_rank import buffer_names, with_first_buffers
from remesh.integrations.host_programs import check_host
from remesh.integrations.moments import set_moments, stored_moments
from remesh.integrations.random_numbers import random_rows, rows_to_load, take_random_rows

check_host("transformers", (5, 0))

from transformers import Trainer  # noqa: E402 - what is missing is reported first
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

_NAME = re.compile(r"checkpoint-(\d+)")


class RemeshTrainer(Trainer):
    """A ``Trainer`` that saves and resumes with Remesh.

    Under a Trainer of another library it comes last, in the place of transformers' own: what that library does around
    saves and loads is done around ours. `ConfigError` for a class that names it before such a Trainer.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(RemeshTrainer) + 1 :]
        if passed_over := [one.__name__ for one in behind if one is not Trainer and issubclass(one, Trainer)]:
            raise ConfigError(
                f"making the class {cls.__name__}: RemeshTrainer stands before {', '.join(passed_over)}, whose own "
                f"saves and loads would be passed over; name it last: class {cls.__name__}({passed_over[0]}, "
                "RemeshTrainer)"
            )
        loads = next(one for one in cls.__mro__ if "_load_from_checkpoint" in vars(one))
        if not issubclass(loads, RemeshTrainer):  # it looks for the files of transformers
            cls._load_from_checkpoint = RemeshTrainer._load_from_checkpoint  # type: ignore[method-assign]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; True resumes from the newest complete checkpoint, or starts anew if there is none."""
        self._refuse_what_it_cannot()
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = next(reversed(complete_checkpoints(Path(self.args.output_dir))), None)
            all_gather_json(None)  # no rank saves the next one before all have looked
        if folder is not None:
            stored = load({"trainer": ""}, folder)["trainer"]
            step_together(lambda: self._lay_out(stored, Path(folder)), None, f"loading {folder}")
        return super().train(None if folder is None else str(folder), *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        del model  # the one of this Trainer, wrapped
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        best = folder.with_name(f"checkpoint-{self.state.best_global_step}")
        if self.state.best_global_step and (best == folder or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        self._note_callbacks()
        text = json.dumps(dataclasses.asdict(self.state))
        tensors = self._tensors()
        weights = with_first_buffers(tensors["model"], buffer_names(self.model_wrapped, tensors["model"]))
        save({**tensors, "model": weights, "random": random_rows(), "trainer": text}, folder)
        if self.args.should_save:
            self._remove_old(folder.parent)

    def _note_callbacks(self) -> None:
        """Put the states of callbacks into the Trainer's own: one, or a list where there are several of a class."""
        states: dict[str, list[Any]] = {}
        for one in [*self.callback_handler.callbacks, self.control]:
            if isinstance(one, ExportableState):
                states.setdefault(type(one).__name__, []).append(one.state())
        for name, found in states.items():
            self.state.stateful_callbacks[name] = found if len(found) > 1 else found[0]

    def _remove_old(self, folder: Path) -> None:
        """Remove the oldest complete checkpoints beyond the limit, but never the newest or the best one."""
        limit, found = self.args.save_total_limit or 0, complete_checkpoints(folder)
        best = self.state.best_model_checkpoint
        kept = {*found[-1:], *(one for one in found if best is not None and one == Path(best))}
        num_removed = max(len(found) - max(limit, len(kept)), 0) if limit > 0 else 0
        for old in [one for one in found if one not in kept][:num_removed]:
            remove_checkpoint(location_of(old))
            shutil.rmtree(old, ignore_errors=True)  # the Trainer's state, and what another library has put beside

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing yet: the model is loaded with its optimizer, once both are wrapped for training."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        wanted = self._tensors()

        def choose(opened: OpenCheckpoint) -> dict[str, Any]:
            return {**wanted, "optimizer": stored_moments(wanted["optimizer"], "optimizer", stored_names(opened))}

        loaded = load_chosen(choose, checkpoint)
        set_model_state_dict(self.model_wrapped, loaded["model"])
        set_moments(self.model_wrapped, self._plain_optimizer(), loaded["optimizer"])
        self.lr_scheduler.load_state_dict(loaded["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: there is no scaler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return

        def choose(opened: OpenCheckpoint) -> dict[str, Any]:
            rows = rows_to_load(opened.manifest.tensors)
            return {"random": rows} if rows else {}

        if rows := load_chosen(choose, checkpoint).get("random"):
            take_random_rows(rows)

    def _lay_out(self, text: str, folder: Path) -> None:
        """Write the Trainer's state from the checkpoint into the file that the Trainer reads; done by one rank."""
        if self.args.should_save:
            replace_whole(folder / TRAINER_STATE_NAME, text.encode())

    def _tensors(self) -> dict[str, Any]:
        self._check_all_are_saved()
        model, optimizer = get_state_dict(self.model_wrapped, self._plain_optimizer())
        return {"model": model, "optimizer": optimizer, "scheduler": self.lr_scheduler.state_dict()}

    def _check_all_are_saved(self) -> None:
        """Raise `ConfigError` when the optimizer has parameters that are not the model's, as those of a loss."""
        of_model = {id(one) for one in self.model_wrapped.parameters()}
        groups = self._plain_optimizer().param_groups
        if foreign := [tuple(one.shape) for group in groups for one in group["params"] if id(one) not in of_model]:
            raise ConfigError(
                f"saving or loading with a Trainer: its optimizer has {len(foreign)} parameters that are not of "
                f"its model, of shapes {foreign[:5]}, and no checkpoint would have their values; make them a part of "
                "the model, or take a loss without parameters"
            )

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _refuse_what_it_cannot(self) -> None:
        cannot = {
            "load_best_model_at_end": self.args.load_best_model_at_end,
            "save_only_model": self.args.save_only_model,
            "deepspeed": self.is_deepspeed_enabled,
            "fp16": self.args.fp16,
            "push_to_hub": self.args.push_to_hub,
            "save_on_each_node": self.args.save_on_each_node,
            "enable_jit_checkpoint": getattr(self.args, "enable_jit_checkpoint", False),
            "fsdp_version 1": self.is_fsdp_enabled and not getattr(self.accelerator, "is_fsdp2", False),
        }
        if found := [name for name, is_on in cannot.items() if is_on]:
            raise ConfigError(
                f"setting up a Trainer of transformers: found {found}, which need files that Remesh does not write, or "
                "saves of one process alone; leave them out (bf16 needs no scaler), or take transformers' own Trainer"
            )


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of Remesh in an output directory, oldest first; torn and foreign ones are skipped."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found) if is_complete(location_of(path))]
