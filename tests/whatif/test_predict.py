"""Predictions of steps whose link, contention and time are known."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from ddpobs.whatif import Change, Fitted, Observed, Prediction, best_caps, fit, predict
from ddpobs.whatif.buckets import fill
from ddpobs.whatif.link import Link
from ddpobs.whatif.predict import LAUNCH_NOISE, of_a_launch
from ddpobs.whatif.strategies import HOST_NS
from tests.support.whatif import MS, World

PLAIN = World()
SLOWED = World(busy=0.6)
TWO_AT_ONCE = World(link=replace(PLAIN.link, in_flight=2))
CAPS = (0.5, 1.0, 5.0, 25.0, 100.0)


def fitted(observed: Observed) -> Fitted:
    result = fit(observed)
    assert isinstance(result, Fitted), result
    return result


def prediction(observed: Observed, change: Change) -> Prediction:
    result = predict(fitted(observed), change)
    assert isinstance(result, Prediction), result
    return result


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("world", [PLAIN, SLOWED, TWO_AT_ONCE], ids=["plain", "slowed", "two at once"])
def test_another_cap_takes_what_it_is_predicted_to_take(world: World, cap: float) -> None:
    answer = prediction(world.observed(2.5), Change(caps_mb=(cap,)))
    assert answer.step_ns == pytest.approx(world.step_ns(cap), rel=0.02)
    assert answer.low_ns <= answer.step_ns <= answer.high_ns


def test_another_launch_differs_by_the_noise_of_launches_beside_the_doubt_of_this_one() -> None:
    answer = prediction(SLOWED.observed(2.5), Change(caps_mb=(25.0,)))
    sure = replace(answer, low_ns=answer.step_ns, high_ns=answer.step_ns)
    noise_ns = 1.645 * LAUNCH_NOISE * answer.step_ns  # Nine in ten values of a normal distribution.
    assert of_a_launch(sure) == pytest.approx((answer.step_ns - noise_ns, answer.step_ns + noise_ns))
    low_ns, high_ns = of_a_launch(replace(answer, low_ns=answer.step_ns - noise_ns, high_ns=answer.step_ns))
    assert answer.step_ns - low_ns == pytest.approx(2**0.5 * noise_ns)
    assert high_ns - answer.step_ns == pytest.approx(noise_ns)


def test_no_change_predicts_the_measured_step() -> None:
    answer = prediction(SLOWED.observed(2.5), Change())
    assert answer.step_ns == pytest.approx(SLOWED.step_ns(2.5))
    assert answer.saved_ratio == pytest.approx(0, abs=1e-9)


def test_a_list_of_caps_fills_one_bucket_after_the_other() -> None:
    answer = prediction(PLAIN.observed(2.5), Change(caps_mb=(3, 1, 8)))
    assert answer.step_ns == pytest.approx(PLAIN.step_ns(3, 1, 8), rel=0.02)
    assert answer.bucket_bytes[:2] == pytest.approx([3.2e6, 1.2e6])


def test_another_link_moves_all_but_the_processors_part_of_a_byte_s_time() -> None:
    wire_ns = PLAIN.link.beta_ns - HOST_NS
    slow = World(link=replace(PLAIN.link, beta_ns=2 * wire_ns + HOST_NS))
    for change in (Change(link_factor=0.5), Change(link_gbps=8 / (2 * wire_ns))):
        assert prediction(PLAIN.observed(2.5), change).step_ns == pytest.approx(slow.step_ns(2.5), rel=0.01)


def test_another_link_of_accelerators_moves_all_of_it() -> None:
    slow = World(link=replace(PLAIN.link, beta_ns=16.0))
    observed = replace(PLAIN.observed(2.5), on_processor=False)
    for change in (Change(link_factor=0.5), Change(link_gbps=0.5)):
        assert prediction(observed, change).step_ns == pytest.approx(slow.step_ns(2.5), rel=0.01)


def test_computation_beside_communication_slows_down_with_a_faster_link() -> None:
    fast = replace(SLOWED.link, beta_ns=HOST_NS + (SLOWED.link.beta_ns - HOST_NS) / 2)
    answer = prediction(SLOWED.observed(2.5), Change(link_factor=2.0))
    assert answer.step_ns == pytest.approx(replace(SLOWED, link=fast).step_ns(2.5), rel=0.02)


def test_more_ranks_take_the_latency_and_the_bytes_of_their_ring() -> None:
    larger = World(link=replace(PLAIN.link, alpha_ns=3 * PLAIN.link.alpha_ns, beta_ns=12.0))
    answer = prediction(PLAIN.observed(2.5), Change(world_size=4))
    assert answer.step_ns == pytest.approx(larger.step_ns(2.5), rel=0.02)


def test_many_ranks_are_predicted_from_small_buckets_of_several_sizes() -> None:
    larger = World(link=Link(255 * PLAIN.link.alpha_ns, PLAIN.link.beta_ns * 255 / 128, is_separated=True))
    answer = prediction(PLAIN.observed(0.5, 1.0, 2.5), Change(world_size=256))
    assert answer.step_ns == pytest.approx(larger.step_ns(0.5, 1.0, 2.5), rel=0.03)


def test_a_latency_that_one_bucket_alone_shows_is_not_multiplied_by_many_ranks() -> None:
    observed = PLAIN.observed(1.0, 6.0)
    moving_ns = observed.moving_ns.copy()
    moving_ns[:, int(observed.bucket_bytes.argmin())] += 50 * MS  # It shared its time with another transfer.
    result = predict(fitted(replace(observed, moving_ns=moving_ns)), Change(world_size=256))
    assert isinstance(result, str)
    assert "smaller buckets, as bucket_cap_mb=0.5, show it" in result


def test_batches_that_are_not_reduced_wait_for_no_communication() -> None:
    answer = prediction(PLAIN.observed(2.5), Change(batches=4))
    alone_ns = (PLAIN.base_ms + PLAIN.backward_ms) * MS
    assert answer.step_ns == pytest.approx((PLAIN.step_ns(2.5) + 3 * alone_ns) / 4, rel=0.01)


def test_half_precision_moves_half_of_the_bytes_and_takes_its_casts() -> None:
    halved = World(link=replace(PLAIN.link, beta_ns=4.0))
    answer = prediction(PLAIN.observed(2.5), Change(strategy="fp16"))
    casts_ns = 0.45 * PLAIN.sizes.sum()
    assert answer.step_ns == pytest.approx(halved.step_ns(2.5) + casts_ns, rel=0.02)
    free = prediction(replace(PLAIN.observed(2.5), on_processor=False), Change(strategy="fp16"))
    assert free.step_ns == pytest.approx(halved.step_ns(2.5), rel=0.02)


def test_a_repaired_rank_saves_the_wait_for_it() -> None:
    own_ns = np.full((40, 3, 2), 20 * MS)
    own_ns[:, 1, 1] += 12 * MS
    observed = replace(PLAIN.observed(2.5), own_ns=own_ns, phases=("data", "backward"))
    whole = prediction(observed, Change(repaired_rank=1))
    half = prediction(observed, Change(repaired_rank=1, repaired_phase="backward"))
    assert whole.saved_ns == pytest.approx(12 * MS)
    assert half.saved_ns == pytest.approx(6 * MS)
    assert prediction(observed, Change(repaired_rank=0)).saved_ns == pytest.approx(0)


def test_changes_together_are_replayed_together() -> None:
    link = replace(PLAIN.link, beta_ns=16.0)
    both = prediction(PLAIN.observed(2.5), Change(caps_mb=(25,), link_factor=0.5))
    assert both.step_ns == pytest.approx(World(link=link).step_ns(25), rel=0.02)


@pytest.mark.parametrize("world", [PLAIN, SLOWED], ids=["plain", "slowed"])
def test_the_advised_caps_are_as_fast_as_the_best(world: World) -> None:
    result = best_caps(fitted(world.observed(2.5)))
    assert not isinstance(result, str), result
    change, answer = result
    assert change.caps_mb is not None
    taken_ns = world.step_ns(*change.caps_mb)
    assert taken_ns <= 1.01 * min(map(world.step_ns, CAPS))
    assert answer.step_ns == pytest.approx(taken_ns, rel=0.02)


def test_no_bucket_of_an_advised_list_waits_for_more_than_half_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of 45 ms: without a bound the last bucket takes the gradients of 45 of the 60 ms."""
    monkeypatch.setattr(import_module("ddpobs.whatif.predict"), "CAPS_MB", ())
    world = World(link=Link(45 * MS, 0.2, is_separated=True))
    result = best_caps(fitted(world.observed(2.5)))
    assert not isinstance(result, str), result
    last = np.cumsum([len(each) for each in np.split(world.sizes, _ends(world, result[0]))])
    first = np.append(0, last[:-1])
    assert (world.arrival_ns[last - 1] - world.arrival_ns[first]).max() <= 30.5 * MS


def _ends(world: World, change: Change) -> list[int]:
    """Return the number of gradients before each bucket but the first."""
    assert change.caps_mb is not None
    ends = fill(np.arange(40.0), world.sizes, change.caps_mb)[0]
    return [int(end) + 1 for end in ends[:-1]]


def test_noisy_steps_widen_the_interval() -> None:
    change = Change(caps_mb=(25,))
    quiet, noisy = (prediction(World(noise=noise).observed(2.5), change) for noise in (0.0, 0.05))
    assert noisy.error_ns > quiet.error_ns + 0.01 * quiet.step_ns


def test_an_unknown_slowdown_is_in_the_interval() -> None:
    hidden = replace(SLOWED.observed(2.5), run_delay_ns=None)
    assert not fitted(hidden).slowdown_is_known
    assert prediction(hidden, Change(caps_mb=(100,))).error_ns > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Change(caps_mb=(0.0,)), "above 0 MB"),
        (Change(strategy="powersgd:4"), "do not follow"),
        (Change(repaired_rank=5), "rank 5 is not recorded"),
        (Change(find_unused=False), "is off"),
        (Change(world_size=1), "at least 2"),
    ],
)
def test_what_the_run_does_not_show_is_refused(change: Change, reason: str) -> None:
    result = predict(fitted(PLAIN.observed(2.5)), change)
    assert isinstance(result, str)
    assert reason in result


def test_one_size_of_buckets_does_not_show_the_latency() -> None:
    model = fitted(World(parameter_bytes=1_100_000).observed(0.25))
    one = replace(model, typical=replace(model.typical, link=replace(model.typical.link, is_separated=False)))
    for change in (Change(link_factor=2.0), Change(caps_mb=(0.01,))):
        result = predict(one, change)
        assert isinstance(result, str) == (change.link_factor is not None)
    result = predict(replace(one, parameters_known=False), Change(link_gbps=1))
    assert isinstance(result, str)
    assert "one bucket size seen" in result


def test_bytes_that_moved_beside_computation_may_move_faster_alone() -> None:
    """The thread that moves them had half of the processor: a link that is slower than it does not show that."""
    change, holds = Change(caps_mb=(100.0,)), []
    for beta_ns in (3.5, 8.0):
        observed = replace(SLOWED, link=replace(SLOWED.link, beta_ns=beta_ns)).observed(0.5, 1.0)
        model = fitted(observed)
        faster = predict(replace(model, typical=model.typical.dragged(), variants=()), change)
        assert isinstance(faster, Prediction)
        holds.append(prediction(observed, change).low_ns <= faster.step_ns)
    assert holds == [True, False]


def test_too_few_steps_are_refused() -> None:
    assert "19 of the 20 steps" in str(fit(World(steps=19).observed(2.5)))
