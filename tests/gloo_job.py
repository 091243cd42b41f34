"""A job of PyTorch whose rank 1 does not come to the fourth collective. Each rank writes its flight recorder's dump as
NCCL's watchdog would, says so, and waits until it is ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
store = dist.distributed_c10d._get_default_store()
for _ in range(3):
    dist.all_reduce(torch.ones(8))  # all come
if rank == 0:
    pending = dist.all_reduce(torch.ones(5), async_op=True)  # waits
else:
    store.wait(["dumped"])  # a dump from before the other's launch would show nothing
temporary = Path(f"{prefix}new{rank}")
temporary.write_bytes(torch._C._distributed_c10d._dump_fr_trace())
temporary.rename(f"{prefix}{rank}")
store.set("dumped", "")
print("dumped", flush=True)
sys.stdin.read()
