"""Hangs, because rank 1 does not come to its fourth backward, and dumps the Flight Recorder: `hang_dump.py FOLDER`.

Its parent sets TORCH_FR_BUFFER_SIZE.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER, WAITED_S, ABSENT_S = sys.argv[1], 3, 600


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(4):
        if step == 3:
            threading.Thread(target=dump, args=(rank,)).start()
            time.sleep(ABSENT_S if rank == 1 else 0)
        model(torch.ones(2, 4)).sum().backward()


def dump(rank: int) -> None:
    time.sleep(WAITED_S)
    torch_c10d: Any = torch._C._distributed_c10d
    for ending, written in (("", torch_c10d._dump_fr_trace()), (".json", torch_c10d._dump_fr_trace_json())):
        Path(FOLDER, f"nccl_trace_rank_{rank}{ending}").write_bytes(written)
    os._exit(0)


main()
