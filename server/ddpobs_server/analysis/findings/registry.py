"""The list of all findings, and the guide for adding another.

1. Write `findings/NAME.py`. It declares `CODES`, the codes of its findings, and a function that takes an `Evidence` and
   returns a `Judgement`: a list of `Finding`, and a `NotJudged` for each question that the evidence cannot answer.

       CODES = ("slow-checkpoint",)

       def slow_checkpoint(evidence: Evidence) -> Judgement:
           if len(evidence.joined) < MIN_STEPS:
               return [NotJudged("slow-checkpoint", f"fewer than {MIN_STEPS} steps")]
           ...
           return [Finding(code="slow-checkpoint", severity=severity_of(share), title=..., remedy=..., steps=...)]

   The function is pure: its input is the evidence alone, and the same evidence gives the same answer. It returns an
   empty list if nothing is wrong. It never guesses: with too little evidence it returns `NotJudged`.
2. Add the function to `FINDINGS` below.
3. Describe each code in `docs/diagnostics.md` under a heading of that name: when it appears, its evidence, its severity
   and its remedy. A test fails if a code has no heading, or if a file of this folder is not listed here.
4. Write tests in `tests/server/analysis/`: one run with the problem, one without it, and one with too little evidence.

`Evidence` holds the latest steps of all ranks, the steps joined over ranks, and facts such as settings and events. A
finding that needs a fact which is not there adds a field with a default; `reports/diagnosis.py` fills it. Columns that
are too large to read for every diagnosis come from `evidence.columns`. The page, the metrics and the command line show
any code without a change. A diagnosis is cached until the run's next commit.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.findings.comm_bound import comm_bound
from ddpobs_server.analysis.findings.crash import crash
from ddpobs_server.analysis.findings.hang import hang
from ddpobs_server.analysis.findings.input_bound import input_bound
from ddpobs_server.analysis.findings.misconfiguration import epoch_not_set
from ddpobs_server.analysis.findings.not_reduced import not_reduced
from ddpobs_server.analysis.findings.replicas_differ import replicas_differ
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.findings.telemetry_health import clock_skew, telemetry_loss
from ddpobs_server.analysis.findings.unused_parameters import find_unused_needless, unused_parameters

FINDINGS: tuple[Callable[[Evidence], Judgement], ...] = (
    crash,
    hang,
    not_reduced,
    replicas_differ,
    straggler,
    comm_bound,
    input_bound,
    unused_parameters,
    find_unused_needless,
    epoch_not_set,
    telemetry_loss,
    clock_skew,
)
"""All finding functions, in the order in which `missing` lists their unanswered questions."""
