"""The ranks' agreement on the run: who proposes, who answers, and who has read the answer."""

from __future__ import annotations

import json

from torch._C._distributed_c10d import HashStore

from ddpobs.ranks.run_identity import IdentityExchange, RunIdentity


def propose() -> RunIdentity:
    return {"run": "r", "attempt": "a"}


def _named(identity: RunIdentity | None) -> dict[str, str]:
    assert identity is not None
    return {"run": identity["run"], "attempt": identity["attempt"]}


def test_the_leader_knows_when_every_rank_that_asked_has_read_the_run() -> None:
    store = HashStore()
    leader, other = (IdentityExchange(store, rank, propose) for rank in range(2))
    assert _named(leader.poll()) == propose()
    assert not leader.all_have_read()
    assert other.all_have_read()  # It waits for nobody.
    assert _named(other.poll()) == propose()
    assert leader.all_have_read()
    assert not leader.all_have_read(3)  # Rank 2 has not asked.
    other.leave()
    assert not leader.all_have_left()
    leader.leave()
    assert leader.all_have_left()
    late = IdentityExchange(store, 2, propose)
    assert not leader.all_have_read()
    assert _named(late.poll()) == propose()
    assert leader.all_have_read(3)


def test_nobody_waits_for_readers_of_a_store_that_outlives_the_ranks() -> None:
    """The requests of an earlier attempt stay in it, and nobody reads their answers."""
    store = HashStore()
    IdentityExchange(store, 1, propose)
    IdentityExchange(store, 0, propose).poll()
    leader = IdentityExchange(store, 0, propose)
    leader.is_leader = True
    assert leader.all_have_read()


def test_rank_0_waits_for_no_leader_of_its_host_that_is_gone() -> None:
    store = HashStore()
    first = IdentityExchange(store, 0, propose).poll()
    assert first is not None
    assert IdentityExchange(store, 0, propose).poll() is None  # Its leader, this process, is alive.
    host, pid, _ = first["leader"]
    for leader, waits in ([host, pid, -1], False), (["another host", pid, -1], True):
        store.set("drawn", json.dumps(first | {"leader": leader}))
        assert (IdentityExchange(store, 0, propose).poll() is None) == waits


def test_a_rank_that_ends_before_the_answer_proposes_a_run_or_takes_the_one_that_was_proposed_meanwhile() -> None:
    store = HashStore()
    store.set("drawn", json.dumps(propose()))  # From before a restart.
    ranks = [IdentityExchange(store, rank, lambda: {"run": "r", "attempt": "b"}) for rank in (1, 2)]
    assert [rank.poll() for rank in ranks] == [None, None]
    assert [_named(rank.poll(wait=False)) for rank in ranks] == [{"run": "r", "attempt": "b"}] * 2
    assert [rank.is_leader for rank in ranks] == [True, False]
