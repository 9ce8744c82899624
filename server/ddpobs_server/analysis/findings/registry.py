"""The list of all findings, and the guide for adding another.

1. Write `findings/NAME.py`; no other file changes. It declares `CODES`, the codes of its findings, `FACTS`, the classes
   of their evidence, and for each code a function of that name with underscores. The function takes an `Evidence` and
   returns a `Judgement`: a list of `Finding`, and a `NotJudged` for each question that the evidence cannot answer.

       CODES = ("slow-checkpoint",)

       @dataclass(frozen=True)
       class SlowCheckpointFacts(Facts):
           saving_ns: int

       FACTS = (SlowCheckpointFacts,)

       def slow_checkpoint(evidence: Evidence) -> Judgement:
           if len(evidence.joined) < MIN_STEPS:
               return [NotJudged("slow-checkpoint", f"fewer than {MIN_STEPS} steps")]
           ...
           return [Finding(code="slow-checkpoint", severity=severity_of(share), verdict=..., measure=...,
                           cause=..., remedy=..., steps=..., evidence=SlowCheckpointFacts(...))]

   The function is pure: its input is the evidence alone, and the same evidence gives the same answer. It returns an
   empty list if nothing is wrong. It never guesses: with too little evidence it returns `NotJudged`.
2. Write a page `docs/findings/CODE.md` for each code, with the headings of the other pages, and add it to the table in
   `docs/diagnostics.md` and to `mkdocs.yml`. A test fails if a code has no page.
3. Write tests in `tests/server/analysis/`: one run with the problem, one without it, and one with too little evidence.

`Evidence` holds the latest steps of all ranks, the steps joined over ranks, and facts such as settings and events. A
finding that needs a fact which is not there adds a field with a default; `reports/diagnosis.py` fills it. Columns that
are too large to read for every diagnosis come from `evidence.columns`. The page, the metrics and the command line show
any code without a change. A diagnosis is cached until the run's next commit.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from ddpobs_server.analysis import findings
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts

MODULES = tuple(
    import_module(f"{findings.__name__}.{module.name}")
    for module in iter_modules(findings.__path__)
    if module.name != "registry"
)
FINDINGS: tuple[Callable[[Evidence], Judgement], ...] = tuple(
    getattr(module, code.replace("-", "_")) for module in MODULES for code in module.CODES
)
"""All finding functions, file by file."""
FACTS: tuple[type[Facts], ...] = tuple(facts for module in MODULES for facts in module.FACTS)
"""Classes of the findings' evidence, file by file."""
