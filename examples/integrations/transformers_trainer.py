"""A script of transformers' guide to the ``Trainer``, with one line changed: the import of the ``Trainer``.

    torchrun --nproc-per-node 2 examples/integrations/transformers_trainer.py FOLDER
    torchrun --nproc-per-node 3 examples/integrations/transformers_trainer.py FOLDER

The first job saves after every second step and kills itself behind its fifth; the second one, of another number of
processes, goes on from the newest checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

from remesh.integrations.transformers import RemeshTrainer as Trainer

NUM_STEPS, KILLED_AT, BATCH, LENGTH = 8, 5, 6, 10


class Sentences(Dataset):
    """Random ones, the same in every run."""

    def __init__(self) -> None:
        self.tokens = torch.randint(32, (NUM_STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[at], "labels": self.tokens[at]}


class Told(TrainerCallback):
    """Tells each loss, and ends like a machine that dies."""

    def __init__(self, is_killed: bool) -> None:
        self.is_killed = is_killed

    def on_step_begin(self, args, state, control, **more) -> None:
        if self.is_killed and state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args, state, control, logs, **more) -> None:
        if args.process_index == 0 and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    set_seed(3)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=NUM_STEPS,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=0.02,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    is_new = not folder.exists()
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Sentences(), callbacks=[Told(is_new)])
    trainer.train(resume_from_checkpoint=not is_new)


if __name__ == "__main__":
    main()
