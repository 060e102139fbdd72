"""A program that cannot be carried, or not now: a connection or a backend of its own, symmetric memory. WHICH"""

import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

if sys.argv[1] == "backend":
    dist.Backend.register_backend("its-own", lambda store, rank, size, timeout: None, devices=["cpu"])
    dist.init_process_group("its-own")
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "symmetric memory":
    symm_mem.rendezvous(torch.zeros(1), dist.group.WORLD)
listener = socket.create_server(("127.0.0.1", 0)) if rank == 1 else None
while True:
    dist.all_reduce(torch.zeros(1))
    if rank == 0:
        print("goes on", flush=True)
    time.sleep(0.01)
