"""Horovod's elastic training: state that is committed, restored and given to every rank.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state): ...

| event | what happens |
|---|---|
| a collective fails, all processes live | the ranks return to the last commit, connect, and call the function again |
| a process ends | torchrun starts all ranks anew; `run` loads the last commit of the attempt before |
| torchrun adds or removes a host | the same |
"""

from ddpobs.errors import HorovodInternalError, HostsUpdatedInterrupt
from ddpobs.horovod.elastic.recovery import run
from ddpobs.horovod.elastic.sampler import ElasticSampler
from ddpobs.horovod.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
