"""Commands under `ddpobs run` that fail before any rank joins, and every command's output, with a fake collector."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from benchmarks.rig import patience
from ddpobs import wire
from tests.support.integration.collectors import Seen, absent, acknowledge, collector
from tests.support.integration.run_command import command

MIXED = """
import os
for number in range(4000):
    os.write(1 + number % 2, bytes([number % 256]) * (1 + number * 7 % 4001) + b"\\r\\n")
"""
LEFT_BEHIND = """
import os, sys, time
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    os.close(1)
    while os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    os.write(2, b"later")
    os._exit(0)
os.wait()
os.write(2, b"first ")
os._exit(3)
"""


def arguments(*words: object, url: str, spool: Path, **environ: str) -> dict[str, Any]:
    prepared = command(*words, url=url)
    prepared["env"] |= {"DDPOBS_SPOOL": str(spool), "DDPOBS_QUIET": "1"} | environ
    return prepared


def run(*words: object, url: str, spool: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    prepared = arguments(*words, url=url, spool=spool, **environ)
    return subprocess.run(**prepared, capture_output=True, check=False, timeout=patience.HANG_S)


def only(seen: Seen) -> tuple[wire.Batch, wire.Event]:
    (batch,) = [wire.decode(zstandard.decompress(body, max_output_size=2**20)) for _, body, _ in seen.puts]
    (event,) = batch.events
    return batch, event


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        (["-c", "import nothing_here"], "failed", {"exit_status": 1}),
        (["-m", "torch.distributed.run", "--nope", "train.py"], "failed", {"exit_status": 2}),
        (["-c", "import os; os.write(2, b'nothing_here'); os.kill(os.getpid(), 11)"], "died", {"signal": "SIGSEGV"}),
        (["-c", "import os; os.write(2, b'nothing_here'); os.kill(os.getpid(), 9)"], "died", {"signal": "SIGKILL"}),
        (["-c", "import os; os.write(2, b'nothing_here'); os.kill(os.getpid(), 15)"], "terminated", {}),
    ],
    ids=["import", "argument of torchrun", "segmentation fault", "kill", "SIGTERM"],
)
def test_a_command_that_fails_is_reported_with_its_end_and_last_lines(
    words: list[str], kind: str, facts: dict[str, object], tmp_path: Path
) -> None:
    with collector(acknowledge) as seen:
        done = run(*words, url=seen.url, spool=tmp_path)
    batch, event = only(seen)
    detail = dict(event.detail)
    assert (batch.run, batch.rank, batch.world_size, event.kind, detail["stage"]) == ("r", 0, 1, kind, "command")
    assert detail.items() >= facts.items()
    last = str(detail["output"]).splitlines()[-1]
    assert last == done.stderr.splitlines()[-1]
    assert "nothing_here" in last or "--nope" in last
    assert not list(tmp_path.glob("*.batch"))


def test_a_command_that_cannot_start_is_reported_and_a_line_names_the_page(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        prepared = arguments(url=seen.url, spool=tmp_path, DDPOBS_QUIET="0")
        prepared["args"][-1:] = ["no-such-program"]
        done = subprocess.run(**prepared, capture_output=True, check=False, timeout=patience.HANG_S)
    assert (done.returncode, only(seen)[1].detail["exit_status"]) == (127, 127)
    line = f"ddpobs: the command ended with exit status 127 before any rank joined: {seen.url}/runs/r\n"
    assert done.stderr == f"ddpobs: no-such-program: No such file or directory\n{line}"


@pytest.mark.parametrize("code", ["pass", "raise KeyboardInterrupt"])
def test_a_command_that_ends_in_order_or_by_an_interrupt_is_not_reported(code: str, tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        run("-c", code, url=seen.url, spool=tmp_path)
        assert not seen.puts


def test_a_report_that_does_not_arrive_waits_in_the_spool(tmp_path: Path) -> None:
    done = run("-c", "raise SystemExit(3)", url=absent(), spool=tmp_path, DDPOBS_QUIET="0")
    assert done.returncode == 3
    assert f"`ddpobs push {tmp_path}` sends the report" in done.stderr
    assert len(list(tmp_path.glob("*.batch"))) == 1


def test_the_settings_keep_the_output_out_of_the_report(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        done = run("-c", "raise SystemExit('secret')", url=seen.url, spool=tmp_path, DDPOBS_TRACEBACK="0")
    assert done.stderr == "secret\n"
    assert set(only(seen)[1].detail) == {"stage", "wall_ns", "exit_status"}
    assert b"secret" not in seen.puts[0][1]


def test_the_last_lines_are_few_short_and_printable(tmp_path: Path) -> None:
    code = (
        "import sys; w = sys.stderr.write; [w(f'line {n} ' + 'x' * 300 + chr(10)) for n in range(100)]; "
        "w('  1 %\\r 50 %\\r100 %\\n\\x1b[31mred\\x1b[0m\\x07\\n'); sys.exit(1)"
    )
    with collector(acknowledge) as seen:
        run("-c", code, url=seen.url, spool=tmp_path)
    output = str(only(seen)[1].detail["output"])
    assert output.endswith("\n100 %\nred\\x07")
    assert "line 99 " in output
    assert len(output) <= 4000
    assert "line 80 " not in output


@pytest.mark.parametrize("streams", ["apart", "one pipe"])
def test_the_output_arrives_byte_for_byte(streams: str, tmp_path: Path) -> None:
    prepared = arguments("-c", MIXED, url=absent(), spool=tmp_path) | {"text": False}
    stderr = subprocess.STDOUT if streams == "one pipe" else subprocess.PIPE
    direct = subprocess.run([sys.executable, "-c", MIXED], stdout=subprocess.PIPE, stderr=stderr, check=True)
    done = subprocess.run(**prepared, stdout=subprocess.PIPE, stderr=stderr, check=True, timeout=patience.HANG_S)
    assert len(direct.stdout) > 3_000_000
    assert (done.stdout, done.stderr) == (direct.stdout, direct.stderr)


def test_the_output_arrives_while_the_command_runs(tmp_path: Path) -> None:
    code = "import os; os.write(2, b'now'); os.read(0, 1)"
    prepared = arguments("-c", code, url=absent(), spool=tmp_path) | {"text": False}
    with subprocess.Popen(**prepared, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        assert process.stderr.read(3) == b"now"
        assert process.poll() is None
        process.stdin.write(b"x")


def test_a_reader_that_is_gone_ends_the_command_as_in_a_shell(tmp_path: Path) -> None:
    code = "import os, signal; signal.signal(signal.SIGPIPE, 0)\nwhile True: os.write(2, b'x' * 4096)"
    prepared = arguments("-c", code, url=absent(), spool=tmp_path)
    process = subprocess.Popen(**prepared, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.read(1)
    process.stderr.close()
    assert process.wait(patience.HANG_S) == -signal.SIGPIPE


def test_what_a_process_left_behind_writes_arrives_after_the_end(tmp_path: Path) -> None:
    (gate := tmp_path / "gate").touch()
    prepared = arguments("-c", LEFT_BEHIND, gate, url=absent(), spool=tmp_path) | {"text": False}
    process = subprocess.Popen(**prepared, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.wait(patience.HANG_S) == 3
    gate.unlink()
    assert process.stderr.read() == b"first later"
    process.stderr.close()


def test_a_file_stays_the_command_s_own_and_its_last_lines_are_reported(tmp_path: Path) -> None:
    code = "import os, stat, sys; sys.stderr.write(f'file {stat.S_ISREG(os.fstat(2).st_mode)}\\n'); sys.exit(1)"
    (log := tmp_path / "log").write_text("of an earlier command\n")
    with collector(acknowledge) as seen, log.open("a") as file:
        prepared = arguments("-c", code, url=seen.url, spool=tmp_path)
        subprocess.run(**prepared, stderr=file, check=False, timeout=patience.HANG_S)
    assert only(seen)[1].detail["output"] == "file True"
    assert log.read_text() == "of an earlier command\nfile True\n"


def test_a_terminal_stays_the_command_s_own(tmp_path: Path) -> None:
    code = "import os, sys; os.write(2, f'{os.ttyname(2)}\\n'.encode()); sys.exit(1)"
    leader, terminal = pty.openpty()
    with collector(acknowledge) as seen:
        prepared = arguments("-c", code, url=seen.url, spool=tmp_path)
        subprocess.run(**prepared, stderr=terminal, check=False, timeout=patience.HANG_S)
    assert os.read(leader, 100).decode() == f"{os.ttyname(terminal)}\r\n"
    assert "output" not in only(seen)[1].detail
    os.close(leader)
    os.close(terminal)


RANK = {"RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("end", "kind", "facts"),
    [
        ("os.kill(os.getpid(), 9)", "died", {"signal": "SIGKILL"}),
        ("os.kill(os.getpid(), 11)", "died", {"signal": "SIGSEGV"}),
        ("os._exit(7)", "died", {"exit_status": 7}),
        ("sys.exit('no data')", "died", {"exit_status": 1, "output": "no data"}),
        ("os.kill(os.getpid(), 15)", "terminated", {"signal": "SIGTERM"}),
    ],
)
@pytest.mark.parametrize("names", [RANK, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}], ids=["", "mpi"])
def test_a_rank_that_ends_before_its_training_is_reported(
    end: str, kind: str, facts: dict[str, object], names: dict[str, str], tmp_path: Path
) -> None:
    with collector(acknowledge) as seen:
        run("-c", f"import os, sys; {end}", url=seen.url, spool=tmp_path, **names)
    batch, event = only(seen)
    assert (batch.rank, batch.world_size, event.kind, event.detail["stage"]) == (1, 4, kind, "start")
    assert dict(event.detail).items() >= facts.items()
    assert batch.hello is not None
    assert not list(tmp_path.rglob("*.place"))


def test_a_rank_that_ends_in_order_leaves_nothing(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        run("-c", "pass", url=seen.url, spool=tmp_path, **RANK)
        assert not seen.puts
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_torchrun_s_rank_that_a_signal_ends_is_the_first_to_fail(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "other_began = Path(__file__).with_suffix('.began')\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not other_began.exists():\n        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "other_began.touch()\n"
        "time.sleep(600)\n"
    )
    with collector(acknowledge) as seen:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
        done = run(*torchrun, url=seen.url, spool=tmp_path / "spool", DDPOBS_QUIET="0")
    batches = [wire.decode(zstandard.decompress(body, max_output_size=2**20)) for _, body, _ in seen.puts]
    assert [(batch.rank, batch.world_size) for batch in batches] == [(1, 2), (0, 2)]
    assert len({batch.attempt for batch in batches}) == 1
    assert batches[0].events[0].detail["signal"] == "SIGKILL"
    assert "ddpobs: rank 1 was killed by SIGKILL before its training began; then 1 more" in done.stderr
    assert "before any rank joined" not in done.stderr


def test_a_process_that_trains_in_the_stead_of_a_rank_takes_its_early_place_away(tmp_path: Path) -> None:
    child = (
        "import os, time; from pathlib import Path; from ddpobs.recording.place.last_place import LastPlace; "
        "from ddpobs.recording.place.place_file import PlaceIdentity; "
        "place = LastPlace(Path(os.environ['DDPOBS_PLACES']), 'a' * 16); "
        "place.identify(PlaceIdentity('r', 'b' * 16, 'a' * 16, 1, 4, 'host')); place.close()"
    )
    code = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True); "
    code += "os.kill(os.getpid(), 9)"
    with collector(acknowledge) as seen:
        assert run("-c", code, url=seen.url, spool=tmp_path, **RANK).returncode == -signal.SIGKILL
        assert not seen.puts


def test_horovodrun_with_telemetry_reports_an_early_error(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("raise ValueError('early')\n")
    with collector(acknowledge) as seen:
        prepared = arguments(url=seen.url, spool=tmp_path / "spool", DDPOBS_TELEMETRY=seen.url, DDPOBS_RUN="r")
        words = [*prepared["args"][:3], "horovodrun", "-np", "1", sys.executable, script]
        subprocess.run(**prepared | {"args": words}, capture_output=True, check=False, timeout=patience.HANG_S)
    batch, event = only(seen)
    assert (batch.run, event.kind, event.detail["message"]) == ("r", "failed", "early")


def test_horovod_s_run_reports_an_early_error(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(
        "import ddpobs.horovod as hvd\n"
        "def train():\n    raise ValueError('early')\n"
        "if __name__ == '__main__':\n    hvd.run(train, num_proc=1)\n"
    )
    with collector(acknowledge) as seen:
        prepared = arguments(url=seen.url, spool=tmp_path / "spool", DDPOBS_TELEMETRY=seen.url, DDPOBS_RUN="r")
        words = [sys.executable, script]
        subprocess.run(**prepared | {"args": words}, capture_output=True, check=False, timeout=patience.HANG_S)
    batch, event = only(seen)
    assert (batch.run, event.kind, event.detail["message"]) == ("r", "failed", "early")
