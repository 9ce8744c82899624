"""What every rank imports, imported once by the server that they are forked from."""

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - the first optimizer of a process imports it, for seconds

import ddpobs.ddp
import ddpobs.telemetry  # noqa: F401
