"""Imports of every rank, done once in the fork server."""

import pytest  # noqa: F401
import torch.distributed.pipelining  # noqa: F401 - takes a second
import torch._dynamo  # noqa: F401 - a process's first optimizer imports it, which takes seconds

import ddpobs.ddp
import ddpobs.telemetry  # noqa: F401
