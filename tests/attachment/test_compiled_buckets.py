"""Torch's DDP whose all-reduces the compiler merges: the collector learns that `bucket_cap_mb` does not apply."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from tests.support.distributed.compare import net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending


def _settings(_rank: int, _ranks: int, mode: bool | str) -> list[bool]:
    from torch._dynamo import config  # Here, because it takes seconds.

    with config.patch(optimize_ddp=mode), sending() as records:
        ddpobs.attach(TorchDDP(net(), bucket_cap_mb=1), records.config)
    return [bool(sent.hello.settings["compiled_buckets"]) for sent in records.batches if sent.hello]


def test_the_hello_says_who_makes_the_buckets() -> None:
    for mode, compiled in ((True, False), (False, False), ("python_reducer", True)):
        (found,) = run_ranks(_settings, 1, mode)
        assert found
        assert set(found) == {compiled}
