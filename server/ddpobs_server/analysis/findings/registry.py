"""The other findings: each a function of the evidence that gives findings, or says what is missing."""

from __future__ import annotations

from collections.abc import Callable

from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.findings.comm_bound import comm_bound
from ddpobs_server.analysis.findings.input_bound import input_bound
from ddpobs_server.analysis.findings.misconfiguration import epoch_not_set
from ddpobs_server.analysis.findings.telemetry_health import clock_skew, telemetry_loss
from ddpobs_server.analysis.findings.unused_parameters import find_unused_needless, unused_parameters

CATALOGUE: tuple[Callable[[Evidence], Judgement], ...] = (
    comm_bound,
    input_bound,
    unused_parameters,
    find_unused_needless,
    epoch_not_set,
    telemetry_loss,
    clock_skew,
)
