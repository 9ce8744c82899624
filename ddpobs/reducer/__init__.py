"""Gradient reduction: one backward, from the first gradient to the last result.

    autograd accumulates a gradient
        readiness.py    a hook per parameter counts its bucket down; the first hook of a backward starts it
        reducer.py      bucket_ready: launch the full buckets, strictly in bucket order, while autograd goes on
        comm/           the strategy starts the bucket's communication
    autograd is done
        reducer.py      finish: launch the last bucket, wait for all, raise faults, settle unused parameters

| file | content |
|---|---|
| `reducer.py` | launch and wait |
| `readiness.py` | start of a backward, hooks, count-down |
| `front_end.py` | the methods that a front end adds: `module_reducer.py` (torch's DDP), `horovod/reduction.py` |
| `observer.py` | the contract with telemetry |
| `participation.py`, `find_unused.py`, `static_graph.py`, `dropped_layers.py` | policies: which parameters take part |
| `layer_drop.py` | the module whose layers a step leaves out |
| `used_map.py`, `unused_parameters.py` | the comparison of the ranks, and `.grad` of unused parameters |
| `fault_broadcast.py` | how every rank raises the same error |
| `zero_participation.py` | a rank without gradients: out of data, or after an error |
| `substitution.py` | a forward with other parameters than the module's |
| `shared_parameters.py` | a parameter that two modules reduce in one backward |
| `model_check.py` | whether all ranks built the same model |
| `ddp_logger.py`, `ddp_timings.py` | the figures of torch's `_get_ddp_logging_data` |
"""
