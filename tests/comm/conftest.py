"""Fixtures of comparisons with torch's DDP."""

from tests.support.distributed.verdicts import verdicts_by_rank

__all__ = ["verdicts_by_rank"]
