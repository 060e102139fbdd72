"""A script of peft's guide to LoRA under transformers' Trainer: tied, Adafactor, accumulated gradients, bf16, dropout.

    trainer_lora.py FOLDER ours|theirs KILLED_AT

Saves after every second update. The first process leaves all weights in FOLDER/end.pt.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

if sys.argv[2] == "ours":
    from remesh.integrations.transformers import RemeshTrainer as Trainer
else:
    from transformers import Trainer

NUM_STEPS, LENGTH = 6, 8


class Ends(TrainerCallback):
    """Ends like a machine that dies."""

    def __init__(self, killed_at: int) -> None:
        self.killed_at = killed_at

    def on_step_begin(self, args, state, control, **more) -> None:
        if state.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, killed_at: int) -> None:
    set_seed(3)
    base = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=LENGTH))
    adapters = LoraConfig(
        r=2, lora_dropout=0.2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True
    )
    model = get_peft_model(base, adapters)
    tokens = torch.randint(32, (48, LENGTH), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=NUM_STEPS,
        save_steps=2,
        learning_rate=0.05,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        optim="adafactor",
        weight_decay=0.1,
        bf16=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    words = [{"input_ids": one, "labels": one} for one in tokens]
    trainer = Trainer(model, arguments, train_dataset=words, callbacks=[Ends(killed_at)])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    if arguments.process_index == 0:
        torch.save([model.state_dict(), trainer.optimizer.optimizer.state_dict()["state"]], folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
