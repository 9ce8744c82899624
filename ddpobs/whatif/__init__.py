"""What a change would give, predicted from the steps of the run itself, with an interval.

    fitted = fit(Observed(...))                     # Fitted, or a sentence that gives the reason why not
    answer = predict(fitted, Change(caps_mb=(5,)))  # Prediction, or a sentence that gives the reason why not
    best = best_caps(fitted)                        # (Change, Prediction), or a sentence

The collector makes `Observed` from stored columns, a training from its own spans. It needs per step and bucket
`ready_ns` (the latest over the ranks), `moving_ns` and `done_ns` (the least), per step `step_ns` and `exposed_ns`, and
the bytes of each bucket; to split one also `arrival_ns`, `parameter_bytes` and `parameter_bucket`. All times are
float64 in ns, on each rank's own clock. All sizes are bytes.

A `Change` names what differs: `caps_mb` (MB of 2**20 bytes; one cap, or a list from the first bucket on), `strategy`,
`batches`, `groups`, `world_size`, `link_gbps` or `link_factor`, `repaired_rank`, `repaired_phase`, `find_unused`. A
`Prediction` has `step_ns`, `low_ns`, `high_ns`, `now_ns`, `saved_ns`, `saved_ratio`, `error_ns`, and the times of the
replayed buckets.

Modules: `link` (bytes to time), `link_of_step` (its fit), `buckets` (gradients to buckets), `replay` (one backward),
`fit`, `predict`, `refusal`, `repair` (slow ranks), `strategies` (bytes and computation of `comm=`), `model` (the
types). All are pure functions over numpy arrays.
"""

from ddpobs.whatif.fit import MIN_STEPS, Observed, fit
from ddpobs.whatif.model import Change, Fitted, Prediction
from ddpobs.whatif.predict import best_caps, predict

__all__ = ["MIN_STEPS", "Change", "Fitted", "Observed", "Prediction", "best_caps", "fit", "predict"]
