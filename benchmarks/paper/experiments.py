"""The experiments: trainings that differ in one thing, and what the sources claim about their step times."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ONE_BUCKET_MB = 10_000.0
RANKS = tuple(2**power for power in range(1, 9))
"""Numbers of ranks that are predicted."""
LINES: dict[str, dict[str, Any]] = {
    **{f"every {batches}": {"accumulate": batches} for batches in (1, 2, 4, 8)},
    "every 1, 100 Gbit/s": {"link_gbps": 100.0},
}
"""The lines predicted over `RANKS`, each with its question. The paper's cluster has links of 100 Gbit/s."""
LINKS_GBPS = (1.0, 10.0, 100.0)
"""Links for which the gain of half the bytes is predicted."""
_DEFAULT_CAPS = "1:25"
"""Of the first bucket and the others, in MB."""


@dataclass(frozen=True)
class Variant:
    """One training of an experiment.

    Attributes:
        title: Its name in tables and plots.
        torch: Torch's own DDP instead of ours.
        cap_mb: `bucket_cap_mb`; None for the default, 25 MiB with a first bucket of 1 MiB.
        batches: Batches a step, all but the last under `no_sync`.
        synchronises: Whether the last batch reduces gradients.
        finds_unused: `find_unused_parameters`.
        has_unused: The model has a layer that its loss does not use: an eighth more parameters.
        groups: `round_robin_groups`.
        comm: The communication strategy.
        ranks: Number of ranks.
        mpi: The gradients travel over MPI, not gloo. Two ranks.
        predicts: It has telemetry, from which the experiment's questions are answered.
    """

    title: str
    torch: bool = False
    cap_mb: float | None = None
    batches: int = 1
    synchronises: bool = True
    finds_unused: bool = False
    has_unused: bool = False
    groups: int = 1
    comm: str = "all_reduce"
    ranks: int = 2
    mpi: bool = False
    predicts: bool = False


@dataclass(frozen=True)
class Claim:
    """A claim about the time of a batch, as a ratio of another variant's.

    Attributes:
        variant: Title of the variant.
        low: Smallest ratio that agrees with the claim.
        high: Largest.
        source: Where it stands, and on which machine it was measured.
        model: Name of the model that it is about; empty for any.
        base: Title of the other variant; empty for the experiment's first.
    """

    variant: str
    low: float
    high: float
    source: str
    model: str = ""
    base: str = ""


@dataclass(frozen=True)
class Experiment:
    """Trainings that differ in one thing.

    Attributes:
        title: The question.
        variants: The trainings; the others are compared with the first.
        claims: What the sources say.
        models: Names in `benchmarks.models`.
        rates: Speeds of the links, as tc writes them, each with the delay in one direction if it has one: "1gbit 5ms".
        smallest: Name of the model of the smallest run.
        questions: What a predicting variant is asked, by the predicted line: queries of `/whatif`.
    """

    title: str
    variants: tuple[Variant, ...]
    claims: tuple[Claim, ...]
    models: tuple[str, ...] = ("resnet50", "bert")
    rates: tuple[str, ...] = ("1gbit",)
    smallest: str = "tiny"
    questions: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def variant(self, title: str) -> Variant:
        """Return a variant by its title."""
        return next(variant for variant in self.variants if variant.title == title)

    def measured(self, found: Container[str]) -> list[Variant]:
        """Return the variants among the measured titles. An older result lacks those that came later."""
        return [variant for variant in self.variants if variant.title in found]

    def claims_about(self, model: str, found: Container[str]) -> list[Claim]:
        """Return the claims about this model, or about any, whose variant is measured."""
        return [claim for claim in self.claims if claim.model in ("", model) and claim.variant in found]


CAPS_MB = (0.001, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
FROM_25_MB = "predicted from 25 MB"
EXPERIMENTS = {
    "breakdown": Experiment(
        "Latency of a step by part, with and without overlap",
        (
            Variant("one bucket", cap_mb=ONE_BUCKET_MB),
            Variant("overlapped"),
            Variant("no communication", synchronises=False),
            Variant("one bucket, MPI", cap_mb=ONE_BUCKET_MB, mpi=True),
            Variant("overlapped, MPI", mpi=True),
        ),
        (
            Claim(
                "overlapped", 0.0, 1 - 0.268, "figure 6: ResNet-50 over gloo on 32 GPUs is 26.8 % faster", "resnet50"
            ),
            Claim("overlapped", 0.0, 1 - 0.215, "figure 6: BERT over gloo on 32 GPUs is 21.5 % faster", "bert"),
            Claim("overlapped, MPI", 0.0, 1.0, "3.2.3: overlap gains (no figure over MPI)", base="one bucket, MPI"),
        ),
        rates=("1gbit", "10gbit"),
    ),
    "buckets": Experiment(
        "Latency of a step by `bucket_cap_mb`",
        (
            Variant("25 MB", cap_mb=25.0),
            *(Variant(f"{cap:.0f} MB", cap_mb=cap) for cap in CAPS_MB if cap != 25.0),
            Variant("25 MB, telemetry", cap_mb=25.0, predicts=True),
        ),
        (
            Claim("0 MB", 1.0, float("inf"), "figures 7 and 8 (unchecked): 0 MB is slower than 25 MB"),
            Claim("100 MB", 0.0, 1 - 0.37, "the tutorials: 100 MB make BERT 37 % faster", "bert"),
        ),
        questions={FROM_25_MB: [{"bucket_cap_mb": cap} for cap in CAPS_MB]},
        smallest="uneven",  # A prediction needs buckets of two sizes.
    ),
    "delay": Experiment(
        "Latency of a step by `bucket_cap_mb`, on a link that delays",
        tuple(Variant(f"{cap:.0f} MB", cap_mb=cap) for cap in (25.0, 0.001, 1.0, 100.0)),
        tuple(
            Claim(title, 0.0, 0.97, "the tutorials: above 5 ms another setting pays") for title in ("1 MB", "100 MB")
        ),
        models=("resnet50",),
        rates=("1gbit 10ms",),
    ),
    "accumulation": Experiment(
        "Latency of a batch, with gradients reduced after every n batches",
        tuple(Variant(f"every {batches}", batches=batches) for batches in (1, 2, 4, 8)),
        (Claim("every 8", 0.0, 1 / 1.57, "figure 10 (unchecked): ResNet-50 over gloo on 256 GPUs is 57 % faster"),),
        models=("resnet50",),
    ),
    "unused": Experiment(
        "What `find_unused_parameters` costs",
        (
            Variant("ours"),
            Variant("ours, finds unused", finds_unused=True),
            Variant("ours, has unused", finds_unused=True, has_unused=True),
            Variant("torch", torch=True),
            Variant("torch, finds unused", torch=True, finds_unused=True),
            Variant("torch, has unused", torch=True, finds_unused=True, has_unused=True),
        ),
        (Claim("ours, finds unused", 1.10, 1.15, "the tutorials: 10 to 15 % more time and memory"),),
        models=("tiny", "transformer", "resnet50"),
        rates=("10gbit",),
    ),
    "groups": Experiment(
        "Latency of a step with round-robin process groups",
        tuple(Variant(f"{groups} group{'s' * (groups > 1)}", groups=groups) for groups in (1, 3, 5)),
        (Claim("3 groups", 0.0, 0.99, "figure 12 (unchecked): with BERT over NCCL on 16 GPUs 3 groups are faster"),),
    ),
    "compression": Experiment(
        "Latency of a step with half the bytes",
        (
            Variant("float32"),
            Variant("float16", comm="fp16"),
            Variant("float32, 0.5 MB", cap_mb=0.5, predicts=True),  # Small buckets show the latency of the link.
        ),
        (Claim("float16", 0.45, 0.55, "the tutorials: half the bytes take half the time"),),
        smallest="uneven",
        questions={
            line: [change | {"link_gbps": gbps, "bucket_cap_mb": _DEFAULT_CAPS} for gbps in LINKS_GBPS]
            for line, change in {"float32": {}, "float16": {"compression": "fp16"}}.items()
        },
    ),
    "scaling": Experiment(
        "Latency of a batch by the number of ranks",
        (
            Variant("1 rank", ranks=1),
            Variant("2 ranks"),
            Variant("2 ranks, 0.5 MB", cap_mb=0.5, predicts=True),  # Small buckets show the latency of the link.
            Variant("3 ranks", ranks=3),
            Variant("4 ranks", ranks=4),
            *(Variant(f"4 ranks, every {batches}", ranks=4, batches=batches) for batches in (2, 4, 8)),
        ),
        (Claim("4 ranks", 0.0, 1.2, "the abstract: near-linear scaling"),),
        models=("waiting",),
        smallest="uneven",
        questions={
            line: [change | {"world_size": ranks, "bucket_cap_mb": _DEFAULT_CAPS} for ranks in RANKS]
            for line, change in LINES.items()
        },
    ),
}
"""By the name on the command line."""
