"""Accelerate around a tiny GPT-2 of transformers, with gradients accumulated. STEPS [WORKERS]"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(3, device_specific=True)
config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
generator = torch.Generator().manual_seed(4)
texts = torch.randint(0, 128, (1024, 16), generator=generator)
loader = DataLoader([{"input_ids": one, "labels": one} for one in texts], 4, shuffle=True, num_workers=workers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 5, 2 * steps)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
step = 0
while step < steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step += 1
        means = accelerator.gather(loss.detach().reshape(1))
        if accelerator.is_main_process:
            print(step, *(each.hex() for each in means.tolist()), flush=True)
        if step == steps:
            break
accelerator.wait_for_everyone()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print("end", accelerator.process_index, digest, flush=True)
accelerator.end_training()
