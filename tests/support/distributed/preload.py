"""Imports of every rank, done once in the fork server."""

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.pipelining  # noqa: F401 - takes a second

import ddpobs.ddp
import ddpobs.telemetry  # noqa: F401
