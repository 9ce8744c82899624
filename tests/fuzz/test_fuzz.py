"""No input makes the collector fail: every input of the corpus is replayed, and each run searches for new inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpobs import wire
from tests.fuzz import target
from tests.support.server.batches import batch, hello, layout, spans, steps

ROOT = Path(__file__).parents[2]
CORPUS = sorted(target.HERE.glob("corpus/*"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
SECONDS = 5

NUMBERS = st.sampled_from([-(2**63), -(2**62), -2, -1, 0, 1, 3, 2**31, 2**48, 2**53, 2**62, 2**63 - 1, 2**64 - 1])
TEXTS = st.sampled_from(["", "\0", "a" * 16 + "\n", "r\n", "\u2028", "'; DROP TABLE runs; --", "{{7*7}}", "n" * 1025])
ODD: st.SearchStrategy[Any] = (
    NUMBERS | TEXTS | st.sampled_from([None, True, 0.5, float("nan"), float("inf"), b"", [], {}])
)
COLUMNS = st.builds(lambda value, rows: [value] * rows, NUMBERS, st.sampled_from([0, 1, 2, 24, 48]))


def full_batch() -> dict[str, Any]:
    """Return a batch with every kind of record, as plain values."""
    step = steps(0, 2).step
    full = batch(
        "fuzzed",
        hello=hello(),
        layouts=[layout()],
        steps=steps(0, 24),
        spans=spans(0, 24),
        comms=wire.Comms(step=step, module=step * 0, kind=step, launched_ns=step, done_ns=step + 1),
        readiness=[wire.Readiness(step=0, module=0, revision=0, ready_ns=step)],
        unused=[wire.Unused(step=0, module=0, locally=["head.weight"], globally=[])],
        peers=[
            wire.Peers(
                first_collective=0,
                last_collective=1,
                steps=2,
                **dict.fromkeys(wire.Peers.__struct_fields__[3:], step),
            )
        ],
        pulse=wire.Pulse(at_ns=0, phase="data", step=1),
        events=[wire.Event(kind="sampler_without_set_epoch", at_ns=0, detail={"epoch": 1})],
    )
    plain: dict[str, Any] = msgspec.json.decode(wire.encode_json(full))
    return plain


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in nested containers. A column counts as one value."""
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = enumerate(value)
    return [path, *(deeper for key, item in inner for deeper in paths(item, (*path, key)))]


PATHS = paths(full_batch())[1:]


@settings(max_examples=EXAMPLES, derandomize="FUZZ_EXAMPLES" not in os.environ, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), ODD | COLUMNS), min_size=1, max_size=3))
def test_a_batch_with_odd_values_anywhere_is_refused_or_stored_and_read(changes: list[tuple[Any, Any]]) -> None:
    plain = full_batch()
    for (*parents, last), value in changes:
        container = plain
        try:
            for key in parents:
                container = container[key]
            container[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # An earlier change removed this path.
    target.check(bytes([target.MSGPACK]) + msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_each_input_of_the_corpus_is_refused_or_stored(path: Path) -> None:
    target.check(path.read_bytes())


def test_the_fuzzer_finds_no_new_failure_in_a_few_seconds(tmp_path: Path) -> None:
    if find_spec("atheris") is None:
        reason = "no coverage-guided fuzzing: pip install atheris"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    flags = [f"-max_total_time={SECONDS}", "-timeout=60", "-rss_limit_mb=1500", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        # A program begins with the peak memory of the process that started it, here of the test worker: hence a shell.
        [
            "sh",
            "-c",
            '"$@"; exit $?',
            "sh",
            sys.executable,
            "-m",
            "tests.fuzz.target",
            str(tmp_path / "corpus"),
            *flags,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr
