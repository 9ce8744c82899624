"""Descriptions of the answers' fields in the OpenAPI document, with their units.

A name means the same in every answer. The few that differ are listed with their schema. Columns, and the schemas of
batches, take their descriptions from the docstrings of `ddpobs.wire`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from ddpobs import wire

_UNITS = {"ns": "nanoseconds", "bytes": "bytes", "permille": "parts of a thousand", "mhz": "MHz"}
_OF_WIRE = "Wire"
"""Prefix of the schemas of batches, whose fields their docstrings describe."""

_BY_NAME = {
    "activity": "Last recorded activity, such as `bucket` or `data`.",
    "at_ns": "Time of the pulse on the rank's monotonic clock",
    "attempt": "Id of the attempt: 16 hexadecimal digits.",
    "attempts": "The run's attempts, oldest first.",
    "attempts_left_out": "Number of the oldest attempts that the account does not cover.",
    "available_bytes": "Memory of the host that programs can still take",
    "backend": "Backend of the process group.",
    "batches_per_s": "Most batches a second.",
    "began_ns": "Begin as Unix time",
    "bucket": "Index of the bucket in its layout.",
    "bubble": "Share of the waits for messages in the schedule's step.",
    "buckets": "The buckets, in launch order.",
    "by_rank": "The stages, by the ranks that hold them.",
    "busy_permille": "Part of the host's processor time that was in use",
    "cause": "Reason of the finding, or why it is not known; empty if the verdict is the reason.",
    "clock_ahead_ns": "Time by which the rank's wall clock is ahead of the collector's",
    "code": "Code of the finding.",
    "columns": "Columns of one length, by name. Times end in `_ns` and are in nanoseconds.",
    "comm": "Strategy of communication.",
    "comm_ns": "Mean time from a bucket's launch to its end",
    "complete": "Whether the answer has all of them.",
    "compute_ns": "Mean time from the readiness of the bucket before to this bucket's",
    "computing_ns": "Forward and backward of a step's micro-batches",
    "cost": "Cost at the price of an hour; null without a price.",
    "created_ns": "Arrival of the run's first batch, as Unix time",
    "current": "Whether the diagnosis is up to date.",
    "delay_ns": "Time by which the last rank delayed the others",
    "device": "Device of the rank's model.",
    "device_busy_permille": "Part of the device's time in which a kernel ran",
    "device_clock_mhz": "Clock of the device's processors",
    "device_memory_bytes": "Memory of the device",
    "device_most_clock_mhz": "Highest clock of the device's processors",
    "device_slowdowns": "Reasons for which the device lowers its clock.",
    "device_used_bytes": "Memory of the device that is in use",
    "diagnosis": "The last diagnosis; null before the first.",
    "displayTimeUnit": "Unit in which a viewer shows times.",
    "dropped": "Records that the ranks dropped.",
    "dtype": "Type of the gradients.",
    "duration_ns": "Time from the first to the last batch",
    "emitted": "Records that the ranks made.",
    "ended": "How the process ended; empty while it runs.",
    "ended_ns": "End as Unix time",
    "error_ratio": "Relative error of the gain.",
    "evidence": "Figures that the finding rests on, by name.",
    "excess_ns": "Own time above the median of the other ranks",
    "expected_bubble": "Bubble by the schedule's formula, for equal stages; null without a formula.",
    "exposed_ns": "Mean time of communication that backward did not hide",
    "figure": "Name of the figure.",
    "figures": "The figures, in the order of the page.",
    "findings": "The findings, the most severe first.",
    "first_rank": "Rank that failed, died, was terminated or interrupted first; null if none did.",
    "first_seen_ns": "Arrival of the attempt's first batch, as Unix time",
    "from": "First step.",
    "gain": "Predicted saving if the remedy works; null if it is not known.",
    "globally": "Names of the parameters that no rank used.",
    "goodbye": "Whether the process said that it ends.",
    "goodput": "Share of the wall time in steps that no restart repeated; null if it is not known.",
    "group": "Group of the part.",
    "height": "Height of the figure in pixels; 0 if there is nothing to draw.",
    "hello": "Facts that the lowest rank's process sent at its start; null until they arrive.",
    "host": "Name of the host.",
    "hours": "Hours of the part, in `unit`.",
    "idle_ns": "Time without progress",
    "intervals": "Steps in which the problem held.",
    "item": "The figure for BokehJS; null if there is nothing to draw.",
    "is_goodput": "Whether the part counts as goodput.",
    "keep_gb": "Most stored data, in GB (10^9 bytes).",
    "keep_runs_days": "Days after its last batch until a run is removed.",
    "last_rank": "The rank that was last in each step.",
    "last_seen_ns": "Arrival of the last batch, as Unix time",
    "last_share": "Share of the steps in which the rank was last.",
    "last_step": "Number of the rank's last step.",
    "late_share": "Share of the steps in which the rank was late.",
    "layouts": "The layouts, by module and revision.",
    "left_out": "Number that did not fit into the answer.",
    "limits": "Limits of the workspace.",
    "load_milli": "Thousand times the host's load average over one minute.",
    "locally": "Names of the parameters that the rank did not use.",
    "lost_cost": "Cost of the lost hours; null without a price.",
    "lost_hours": "Hours that are no goodput, in `unit`.",
    "machine": "State of the host and the device; null if the pulse has none.",
    "max_runs": "Most runs.",
    "max_series": "Most time series.",
    "mb_per_s": "Most MB (10^6 bytes) of batches a second.",
    "measure": "Figure of the finding, with what it is a share of.",
    "memory_bytes": "Memory of the host",
    "micro_batches": "Micro-batches of a step.",
    "missing": "Questions that could not be answered, each with the reason.",
    "module": "Number of the DDP module in its process.",
    "modules": "The DDP modules of the process.",
    "name": "Name.",
    "next": "Where the next page begins; null at the end.",
    "noise_ns": "Time by which the ranks' ends of one all-reduce differ on aligned clocks",
    "note": "Note about the run, for people.",
    "ordinal": "Number of the attempt, from 0.",
    "otherData": "Facts about the trace.",
    "outcome": "How the attempt went.",
    "own_ns": "Own time of a step: without waiting for other ranks",
    "parameters": "Names of the parameters.",
    "part": "Name of the part.",
    "parts": "Parts that add up to `rank_ns`.",
    "parts_ns": "Time by part, in nanoseconds; null if it is not known.",
    "patience_ns": "Time without progress after which the rank counts as stuck",
    "per_rank": "Lateness of each rank.",
    "phase": "Phase of the step; null if it is no single one.",
    "phases_ns": "Mean time of a step by phase, in nanoseconds; null without steps.",
    "pid": "Number of the process on its host.",
    "pipeline": "The pipeline; null without one.",
    "place": "Line of Python that the rank is at; empty if unknown.",
    "predicted_ns": "Time of the schedule's step, from the stages' computation",
    "price_per_hour": "Price of an hour of a GPU, or of a rank without one; null if it is not known.",
    "process_permille": "Processor time of the process; 1,000 is one processor",
    "processors": "Number of processors that the process may use.",
    "pulse": "Last pulse (heartbeat); null before the first.",
    "quota_permille": "Processor quota of the control group; 1,000 is one processor",
    "rank": "Number of the rank.",
    "rank_ns": "Wall time summed over the ranks",
    "ranks": "The ranks.",
    "ratio": "Share of `whole` that the remedy would save.",
    "reads": "Reads in progress.",
    "reads_per_s": "Most reads a second.",
    "reason": "The reason, in one line; null or empty without one.",
    "receive_wait_ns": "Waits for messages of other stages",
    "reduce_exposed_ns": "Wait for the all-reduce that delayed the pipeline; null if it is not known",
    "reduce_ns": "Time with a gradient all-reduce in flight; null if it is not known",
    "reduce_overlap": "Share of the all-reduce beside which this stage or an earlier one worked; null without one.",
    "reduce_wait_ns": "Wait for the all-reduce; null if it is not known",
    "refused": "Refused batches, by problem.",
    "remedy": "What to do.",
    "repeated_steps": "Steps that an earlier attempt had already done.",
    "resident_bytes": "Memory of the process",
    "revision": "Number of the layout within its module.",
    "rows": "Rows of the table.",
    "run": "Name of the run.",
    "runs": "The runs.",
    "schedule": "Class of the schedule.",
    "schedule_ns": "The schedule's step, from call to return",
    "selection": "Query parameters that select what the figure shows.",
    "send_wait_ns": "Waits until other stages took messages",
    "series": "Time series of the metrics.",
    "settings": "Settings by name.",
    "severity": "How severe the finding is; null without a finding.",
    "share": "Share of the whole.",
    "shown": "Steps, ranks and step that are drawn.",
    "size": "Number of elements.",
    "size_bytes": "Size of the bucket",
    "source": "Id of the process: 16 hexadecimal digits.",
    "stages": "Indices of the stages.",
    "stack": "Lines of Python, the innermost last; empty unless the rank is stuck.",
    "state": "State.",
    "steal_permille": "Part of the host's processor time that its hypervisor gave to other guests",
    "step": "Number of the step.",
    "step_levels": "Parts of the run with about the same step time.",
    "step_ns": "Time of a step",
    "step_times_ns": "Mean step time of at most 32 parts of the run, oldest first, in nanoseconds.",
    "steps": "Number of steps.",
    "steps_per_s": "Steps a second at the end of the run; null without steps.",
    "steps_seen": "Number of steps up to the last one that is judged.",
    "stored_bytes": "Size of the stored data",
    "stuck_ns": "Time without progress at the last pulse, 0 if the rank is not stuck",
    "summary": "The content of the figure in words, or the reason for its absence.",
    "table": "The content of the figure as text.",
    "tags": "Words by which the run is found.",
    "throttled_ns": "Time in which the quota held the process up, since its start",
    "time_shares": "Share of the run's wall time, by group.",
    "title": "The finding, the figure or the part in words.",
    "to": "Last step.",
    "traceEvents": "Events in Chrome's trace event format.",
    "under_way_bytes": "Size of the batches that are arriving",
    "unit": "Unit of the hours.",
    "until_ns": "End of the account as Unix time",
    "unused": "The sets, by rank, oldest first.",
    "usage": "Use of the workspace.",
    "verdict": "The finding as one fact of at most twelve words.",
    "versions": "Versions by name of the program.",
    "waiting_batches": "Batches that wait to be stored.",
    "waits_in": "Function in which the rank waits; empty if unknown.",
    "wall_ns": "Wall time",
    "when": "Steps and times of the finding, where the verdict does not name them.",
    "where": "Host, process, and bucket with its first parameters.",
    "whole": "The whole that `ratio` is a share of: a step, or the run's wall time.",
    "workspace": "Name of the workspace.",
    "workspaces": "The workspaces.",
    "world_size": "Number of ranks that the training has.",
    "worst": "Verdict of the worst finding; null without one.",
}
_OF_SCHEMA = {
    ("Bucket", "parameters"): "Number of parameters",
    ("FigureTable", "columns"): "Titles of the columns.",
    ("Diagnostics", "missing"): "Findings that could not be judged, each with the reason.",
    ("FindingResponse", "buckets"): "Indices of the buckets that the finding is about.",
    ("FindingResponse", "parameters"): "Names of the parameters that the finding is about.",
    ("FindingResponse", "ranks"): "Ranks that the finding is about.",
    ("FindingResponse", "steps"): "First and last step that the evidence rests on.",
    ("Gain", "text"): "The saving in words, with what it is a share of.",
    ("Gain", "step_ns"): "Time that the remedy would save in each step",
    ("LaidOutBucket", "parameters"): "The bucket's parameters.",
    ("LastDiagnosis", "findings"): "Number of findings.",
    ("LastDiagnosis", "missing"): "Number of findings that could not be judged.",
    ("Pipeline", "stages"): "Number of stages of the whole pipeline.",
    ("Stragglers", "own_ns"): "Own time by step and rank, in nanoseconds.",
    ("Stragglers", "steps"): "Numbers of the steps, of the lowest rank.",
    ("Usage", "runs"): "Number of stored runs.",
    ("WorkspaceLimits", "share"): "Share of the collector's capacity.",
    **{
        (schema, "ranks"): "Number of ranks that have reported."
        for schema in ("AttemptOutcome", "ListedRun", "RunDetails")
    },
}


_NULL = {
    "Account": "if it is not known",
    "AttemptAccount": "if it is not known",
    "AttemptOutcome": "while the attempt runs",
    "Bucket": "without a layout",
    "Interval": "if it is not known",
    "LastDiagnosis": "without a finding",
    "ListedRun": "without steps",
    "Machine": "if the system does not report it",
    "Pulse": "before the first bucket",
    "Rank": "until it is known",
    "StepLevel": "if it is not known",
    "WorkspaceLimits": "without a limit",
}
"""Condition of null in a schema's fields whose description has none."""


def describe(document: dict[str, Any]) -> None:
    """Add a description to each field that has none."""
    schemas = document["components"]["schemas"]
    for schema, definition in schemas.items():
        summary, attributes = _split_docstring(definition.get("description", ""))
        if schema.startswith(_OF_WIRE):
            texts = {name: text.replace("`UNKNOWN`", "-1") for name, text in attributes.items()}
        else:
            texts = _BY_NAME | _COLUMNS.get(schema, {})
        if summary:
            definition["description"] = summary
        for name, field in definition.get("properties", {}).items():
            if text := field.get("description") or _OF_SCHEMA.get((schema, name)) or texts.get(name):
                remark = (
                    _NULL.get(schema) if {"type": "null"} in field.get("anyOf", ()) and "null" not in text else None
                )
                field["description"] = _with_unit(name, f"{text.rstrip('.')}; null {remark}" if remark else text)


def _split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text, and the descriptions of its attributes."""
    text, _, section = inspect.cleandoc(docstring).partition("\n\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return text, {name: " ".join(entry.split()).replace("None", "null") for name, entry in entries}


def _with_unit(name: str, text: str) -> str:
    """Add the unit that the field's name ends with, before a remark on null."""
    unit = _UNITS.get(name.rpartition("_")[2])
    fact, semicolon, remark = text.rstrip(".").partition(";")
    if unit is not None and unit not in text:
        fact = f"{fact}, in {unit}"
    return f"{fact}{semicolon}{remark}."


def _columns_of(record: type) -> dict[str, str]:
    attributes = _split_docstring(record.__doc__ or "")[1]
    return {name: text.replace("`UNKNOWN`", "null") for name, text in attributes.items()}


_BINS = {
    "first": "First step of the bin; only with `points`",
    "last": "Last step of the bin; only with `points`",
    "steps": "Number of rows in the bin; only with `points`",
    "began_ns": "Begin of the bin as Unix time; only with `points`",
    "ended_ns": "End of the bin as Unix time; only with `points`",
    "ranks": "Number of ranks that the mean is over; only with `mean`",
    "wall_ns": "Wall time of the step; only with `mean`",
} | {
    f"{name}_{kind}_ns": f"{word} {time} of a step; only with `points`"
    for name, time in [("wall", "wall time"), *((phase, f"time in the phase {phase}") for phase in wire.PHASES)]
    for kind, word in {"min": "Least", "median": "Median", "max": "Most"}.items()
}
_ALIGNED = {
    f"aligned_{name}_ns": f"{text} on the lowest rank's clock"
    for name, text in {"ready": "Readiness", "launched": "Hand-over", "done": "End"}.items()
}
_COLUMNS = {"StepColumns": _BINS | _columns_of(wire.Steps), "SpanColumns": _ALIGNED | _columns_of(wire.Spans)}
