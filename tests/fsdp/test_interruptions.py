"""A sharded model that is gone, one that is called wrongly, and works that have no future."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import ddpobs
from ddpobs import never_raises
from ddpobs.autoload import patches
from ddpobs.fsdp import attachment as attachment_module
from tests.support.distributed.compare import batch, raising_in_backward
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.sharded import sharded, train_sharded


def collected(rank: int, _size: int) -> tuple[int, int]:
    """Steps that were sent, and units that are still known: another object may get the address of one."""
    with sending() as sent:
        model = sharded()
        attachment = ddpobs.attach(model, sent.config)
        assert attachment is not None
        train_sharded(model, rank, 1)
        del model
        gc.collect()
        known = len(attachment_module._by_unit)
        attachment.detach()
    return len(sent.steps("step")), known


def test_an_attachment_outlives_its_model() -> None:
    assert run_ranks(collected, 2) == [(1, 0), (1, 0)]


def attached_inside(rank: int, _size: int) -> list[list[float]]:
    """Parameters after a training, without telemetry and with it on the model and on one of its blocks."""
    plain = train_sharded(sharded(), rank, 2)
    with sending() as sent:
        model = sharded()
        attachments = [ddpobs.attach(each, sent.config) for each in (model, model.blocks[0])]
        recorded = train_sharded(model, rank, 2)
        for attachment in attachments:
            assert attachment is not None
            attachment.detach()
    return [torch.cat([shard.flatten() for shard in shards]).tolist() for shards in (plain, recorded)]


def test_a_block_may_be_attached_beside_its_model() -> None:
    for plain, recorded in run_ranks(attached_inside, 2):
        assert plain == recorded


def called_inside(_rank: int, _size: int) -> str:
    """Call a unit before its root, which torch refuses."""
    state = _fsdp_state.FSDPState
    with patch.object(state, "_root_pre_forward", state._root_pre_forward):  # Restored at the end.
        patches._patch_fully_shard(_fsdp_state)
        model = sharded()
        try:
            model.blocks[0](torch.zeros(1, 32))
            model(torch.zeros(1, 8))
        except RuntimeError as error:
            return str(error)
    return ""


def test_torchs_error_at_the_first_forward_reaches_the_script() -> None:
    for message in run_ranks(called_inside, 2):
        assert "has already been lazily initialized for blocks.0" in message


def raising(rank: int, _size: int) -> dict[str, Any]:
    """Train two steps, of which the loss of another batch between them raises."""
    with sending() as sent:
        model = sharded()
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, 1)
        with pytest.raises(ValueError, match="it fails"):
            raising_in_backward(model(batch(rank, 1))).sum().backward()
        train_sharded(model, rank, 1)
    spans = list(zip(sent.spans("step"), sent.spans("bucket"), strict=True))
    return {"spans": spans, "rows": len(sent.layouts[0].buckets)}


def test_a_backward_that_raises_leaves_no_spans_to_the_next_step() -> None:
    for rank in run_ranks(raising, 2):
        assert len(rank["spans"]) == len(set(rank["spans"]))
        # The root stays gathered after the forward whose loss raised.
        assert len(rank["spans"]) == 2 * rank["rows"] - 1


class _NoFuture:
    """A work of a backend that has no futures."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> Any:
        return self._work.wait()

    def get_future(self) -> Any:
        raise RuntimeError("this backend has no futures")


class _Gather(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        return None if work is None else _NoFuture(work)


def without_futures(rank: int, _size: int) -> tuple[list[str], int, int]:
    failed: list[str] = []
    with sending() as sent, patch.object(never_raises, "log_failure", lambda call: failed.append(call.__name__)):
        model = sharded()
        for module in (model, *model.blocks):
            module.set_custom_all_gather(_Gather())
        ddpobs.attach(model, sent.config)
        train_sharded(model, rank, 3, lambda _: model.unshard(async_op=True))
    late = sum(done < launched for done, launched in zip(sent.spans("done_ns"), sent.spans("launched_ns"), strict=True))
    return failed, len(sent.steps("step")), late


def test_a_work_without_a_future_ends_no_training_and_is_told_once() -> None:
    """The first gather precedes torch's own preparations."""
    for failed, steps, late in run_ranks(without_futures, 2):
        assert failed == ["_follow"]
        assert (steps, late) == (3, 0)
