"""Training in the manner of torch's ImageNet example, with what scripts have around it. STEPS FOLDER

A convolutional net under DDP on fake images; two workers load them; bfloat16; gradients accumulated and clipped; every
epoch is validated, remainder included, and saved. Rank 0 logs through a thread that writes a file and through the pipe
of a child; the program has handlers of signals, and an `atexit`.
"""

import atexit
import contextlib
import hashlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

steps, folder = int(sys.argv[1]), Path(sys.argv[2])
ACCUMULATED, BATCH, CLASSES = 2, 8, 10


class FakeData(Dataset):
    """Images of chance, each made of its number."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % CLASSES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


class Summary(Enum):
    AVERAGE, SUM = range(2)


class Meter:
    """Of the example: the sum over all ranks is made at the end of a validation."""

    def __init__(self, summary):
        self.summary, self.sum, self.count = summary, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return (self.sum / max(self.count, 1) if self.summary is Summary.AVERAGE else self.sum).hex()


class Log:
    """A thread that writes lines into an open file, and a child that gets them through a pipe."""

    def __init__(self, path):
        self.file = path.open("w")
        # Workers inherit the pipe, so its end says nothing; a line does.
        piped = path.with_suffix(".piped").open("w")
        self.child = subprocess.Popen(["sed", "-u", "/^end/q"], stdin=subprocess.PIPE, stdout=piped, text=True)
        self.waiting = queue.Queue()
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def _write(self):
        while (line := self.waiting.get()) is not None:
            for end in (self.file, self.child.stdin):
                print(line, file=end, flush=True)

    def say(self, line):
        print(line, flush=True)
        self.waiting.put(line)

    def close(self):
        self.say("end of the log")
        self.waiting.put(None)
        self.thread.join()
        self.file.close()
        self.child.wait()


def validate(model, loader_of):
    """As the example does: what does not divide by the ranks is done by all."""
    correct, loss = Meter(Summary.SUM), Meter(Summary.AVERAGE)
    model.eval()
    whole = len(validation) // world * world

    def run(data, sampler):
        with torch.no_grad():
            for images, target in loader_of(data, sampler):
                output = model(images)
                loss.update(nn.functional.cross_entropy(output, target).item(), len(target))
                correct.update((output.argmax(1) == target).sum().item())

    run(Subset(validation, range(whole)), DistributedSampler(Subset(validation, range(whole)), shuffle=False))
    for meter in (correct, loss):
        meter.all_reduce()
    run(Subset(validation, range(whole, len(validation))), None)
    model.train()
    return correct, loss


def save(state, is_best):
    torch.save(state, folder / "checkpoint.pt")
    if is_best:
        shutil.copyfile(folder / "checkpoint.pt", folder / "best.pt")


@atexit.register
def last_words():
    (folder / f"exit-{rank}").touch()


signals = []
signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Net()) if "--sync" in sys.argv else Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
training, validation = FakeData(16 * BATCH * world), FakeData(3 * BATCH * world + 1)
sampler = DistributedSampler(training)
loader = DataLoader(training, BATCH, num_workers=2, sampler=sampler, persistent_workers=True)
log = Log(folder / "log.txt") if rank == 0 else None
torch.manual_seed(100 + rank)
step = epoch = best = 0
while step < steps:
    sampler.set_epoch(epoch)
    for number, (images, target) in enumerate(loader):
        is_last = number % ACCUMULATED == ACCUMULATED - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images).float(), target) / ACCUMULATED
            loss.backward()
        if is_last:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            signal.raise_signal(signal.SIGUSR1)
        step += 1
        if log:
            log.say(f"{step} {loss.item().hex()} {norm.item().hex() if is_last else '-'}")
    scheduler.step()
    correct, mean = validate(model, lambda data, sampler: DataLoader(data, BATCH, num_workers=1, sampler=sampler))
    found = [None] * world
    dist.all_gather_object(found, {"rank": rank, "epoch": epoch, "correct": correct.sum})
    if log:
        log.say(f"epoch {epoch} {correct} {mean} {[each['correct'] for each in found]}")
        save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, correct.sum >= best)
    best = max(best, correct.sum)
    dist.barrier()
    epoch += 1
with Join([model]):
    for _ in range(rank + 1):
        model(torch.ones(1, 3, 16, 16)).sum().backward()
digest = hashlib.sha256()
for each in model.state_dict().values():
    digest.update(each.numpy().tobytes())
for each in model.parameters():
    digest.update(each.grad.numpy().tobytes())
print("end", rank, digest.hexdigest(), len(signals), signal.SIGTERM in signals, flush=True)
if log:
    log.close()
    saved = torch.load(folder / "checkpoint.pt")["model"]
    same = all(torch.equal(saved[name], value) for name, value in model.state_dict().items() if "running" not in name)
    files = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("log.txt", "log.piped")]
    print("saved", same, files[0] == files[1], files, flush=True)
dist.destroy_process_group()
