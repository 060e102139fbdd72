"""The Trainer of transformers on a tiny random Llama. STEPS [WORKERS]"""

import hashlib
import os
import sys
import tempfile

# Where DeepSpeed is installed, transformers imports it, and it prints with the time that it has found no device.
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0


class Printing(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(state.global_step, float(logs["loss"]).hex(), float(logs["grad_norm"]).hex(), flush=True)


set_seed(7)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config)
texts = torch.randint(0, 128, (1024, 16), generator=torch.Generator().manual_seed(8))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=workers,
        seed=9,
    )
    data = [{"input_ids": one, "labels": one} for one in texts]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Printing()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print("end", dist.get_rank(), digest, flush=True)
dist.barrier()
dist.destroy_process_group()
