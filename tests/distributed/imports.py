"""What every rank imports, imported once by the server that they are forked from."""

import ddpobs.ddp
import ddpobs.telemetry  # noqa: F401
