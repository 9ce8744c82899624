"""The ranks' agreement on the run: who proposes, who answers, and who has read the answer."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore

from ddpobs.ranks.run_identity import IdentityExchange, RunIdentity


def propose() -> RunIdentity:
    return {"run": "r", "attempt": "a"}


def test_the_leader_knows_when_every_rank_that_asked_has_read_the_run() -> None:
    store = HashStore()
    leader, other = (IdentityExchange(store, rank, propose) for rank in range(2))
    assert leader.poll() == propose()
    assert not leader.all_have_read()
    assert other.all_have_read()  # It waits for nobody.
    assert other.poll() == propose()
    assert leader.all_have_read()
    other.leave()
    assert not leader.all_have_left()
    leader.leave()
    assert leader.all_have_left()
    late = IdentityExchange(store, 2, propose)
    assert not leader.all_have_read()
    assert late.poll() == propose()
    assert leader.all_have_read()


def test_nobody_waits_for_readers_of_a_store_that_outlives_the_ranks() -> None:
    """The requests of an earlier attempt stay in it, and nobody reads their answers."""
    store = HashStore()
    IdentityExchange(store, 1, propose)
    IdentityExchange(store, 0, propose).poll()
    leader = IdentityExchange(store, 0, propose)
    leader.is_leader = True
    assert leader.all_have_read()
