"""Commands in the documents: each is run against a real collector with a real training, or has the reason why not."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from ddpobs_server.operations.commands import cli as server_commands
from typer.testing import CliRunner

import ddpobs
from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from benchmarks.rig.training import PATIENT
from ddpobs import wire
from ddpobs.cli import main as commands
from ddpobs.export.spool import Encoded, Spool
from tests.support.otlp import receiver
from tests.support.profiler_traces import trace
from tests.support.server.batches import batch, source_of, steps

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BIN = Path(sys.executable).parent
RUN, SPOOLED = "gpt-77", "spooled"

NOT_RUN = {
    r"^pip install |^python3 -m venv ": "installs packages; tests/packaging/test_packaging.py installs the wheel",
    r"^useradd ": "adds a user to the system",
    r"^docker |docker compose up": "needs Docker; tests/containers starts them",
    r"\bkubectl ": "needs a cluster; tests/deployment/test_kubernetes.py renders and checks the manifests",
    r"^DDPOBS_SERVER_INGEST_ONLY=|^nice ddpobs-server ": "tests/server/operations/test_ingest_only.py starts both",
    r"^systemctl |^cp deploy/systemd/": "changes the system; tests/deployment/test_services.py checks the unit",
    r"^sbatch ": "needs SLURM; tests/deployment/test_services.py runs the script",
    r"^kill -HUP ": "tests/server/web/test_reload.py sends the signal",
    r"^pg_dump |^pg_restore ": "tests/server/operations/test_backup.py runs both",
    r"-- accelerate launch |-- python train.py": "tests/integration/test_frameworks.py starts both",
    r"torchrun .*train_horovod.py|^DDPOBS_TELEMETRY=\S+ torchrun ": "tests/integration/test_frameworks.py starts it",
    r"^ddpobs check-hosts ": "tests/integration/test_check_hosts.py checks ranks",
    r"^openapi-python-client ": "tests/server/api/test_openapi.py generates a client and uses it",
    r"^ddpobs horovodrun ": "tests/integration/test_frameworks.py starts ranks with it",
    r"^torchrun --nnodes 2:4 ": "needs several hosts; tests/horovod/test_elastic.py restarts ranks on one",
    r"^mpiexec ": "tests/mpi/test_mpi.py starts ranks with mpiexec",
    r"-- torchrun .* examples/": "tests/examples/test_examples.py starts it",
}
CODES = {"--fail-over": {0, 4}, "--fail-on": {0, 1}}
"""Exit codes beside 0 that an option may cause: nothing is decided with so few steps."""
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def lines() -> Iterator[str]:
    """Each command in a block of shell commands."""
    for document in DOCUMENTS:
        for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield re.sub(r"\s+# .*$", "", line)


COMMANDS = list(dict.fromkeys(lines()))
IS_TRAINING = re.compile(r"^ddpobs run .*-- torchrun (?!.*examples/)")
TRAININGS = [line for line in COMMANDS if IS_TRAINING.search(line)]
SERVERS = [line for line in COMMANDS if re.match(r"ddpobs-server( --\S+ \S+)*$", line)]


@dataclass(frozen=True)
class Place:
    """A collector with the runs that the commands name, and the folder in which they run."""

    command: str
    url: str
    folder: Path
    trained: subprocess.CompletedProcess[str]

    @property
    def environ(self) -> dict[str, str]:
        return environment(self.folder) | {"DDPOBS_TELEMETRY": self.url, "RUN": RUN, "DDPOBS_TOKEN": "any"}


def environment(folder: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    return environ | {
        "PATH": f"{BIN}{os.pathsep}{environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}",
        "DDPOBS_SPOOL": str(folder / "spool"),
        "DDPOBS_SERVER_DATABASE_URL": f"sqlite:///{folder}/tokens.db",
        "DDPOBS_SERVER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "train.py").write_text(SCRIPT)
    for rank in range(2):
        packed = gzip.compress(trace(folder, f"trace_rank{rank}.json", rank).read_bytes())
        (folder / f"trace_rank{rank}.json.gz").write_bytes(packed)
    payload = zstandard.compress(wire.encode(batch(SPOOLED, steps=steps(0, 4))))
    Spool(folder / "spool", 10**6).put(Encoded(SPOOLED, source_of(0), 0, 4, payload), 0, lambda *_: None)
    start = min(SERVERS, key=len)
    with collector(folder, [str(BIN / start)]) as running:
        environ = environment(folder) | PATIENT | {"DDPOBS_RUN": RUN}
        line = max(TRAININGS, key=len).replace("http://collector:8321", running.url)
        line = re.sub(r"--nproc-per-node \d+", "--standalone --nproc-per-node 2", line)
        trained = patience.run(["bash", "-c", line], environ=environ, cwd=folder)
        place = Place(start, running.url, folder, trained)
        code, output = run_line("ddpobs-server token create first", place)
        assert code == 0, output  # It makes the database that other commands of the collector need.
        yield place


def filled(line: str, place: Place) -> str:
    """Replace the names that stand for a user's own."""
    line = re.sub(r"http://(collector|127\.0\.0\.1):8321|\bCOLLECTOR\b(?=/)", place.url, line)
    own = {"RUN": RUN, "A": RUN, "B": RUN, "DIR": str(place.folder / "spool"), "URL": place.url, "NAME": "grafana"}
    return re.sub(r"(?<![\w$])(RUN|A|B|DIR|URL|NAME)\b(?!=)", lambda match: own[match[1]], line)


def run_line(line: str, place: Place) -> tuple[int, str]:
    """Run a command; those of ddpobs in this process, which is faster."""
    program = line.split(maxsplit=1)[0]
    if program not in ("ddpobs", "ddpobs-server") or re.search(r"[|&;$<>]", line):
        done = subprocess.run(
            ["bash", "-c", line], env=place.environ, cwd=place.folder, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr
    app = commands if program == "ddpobs" else server_commands
    result = CliRunner().invoke(app, shlex.split(line)[1:], env=place.environ)
    return result.exit_code, result.output + (repr(result.exception) if result.exception else "")


def test_the_documents_mark_commands_as_such() -> None:
    start = r"(ddpobs(-server)? [a-z]|pip install|curl |torchrun |mpiexec |docker |make |python |export \\w+=)"
    for document in DOCUMENTS:
        text = document.read_text()
        assert re.findall(r"^```(?=\n(?!\n|$))", re.sub(r"^```\w+\n.*?^```\n", "", text, flags=re.M | re.S), re.M) == []
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert re.findall(rf"^ {{4,}}(?:\$ )?{start}.*", outside, re.MULTILINE) == [], document.name


def test_the_reasons_are_needed_and_name_existing_tests() -> None:
    for pattern, reason in NOT_RUN.items():
        assert any(re.search(pattern, line) for line in COMMANDS), pattern
        assert [path for path in re.findall(r"tests/[\w/]+\.py", reason) if not (ROOT / path).exists()] == []
    assert len(COMMANDS) > 30


def test_the_training_command_of_the_documents_records_a_run(place: Place) -> None:
    assert place.trained.returncode == 0, place.trained.stdout + place.trained.stderr
    assert f"ddpobs: {place.url}/runs/{RUN}" in place.trained.stderr
    summary = httpx.get(f"{place.url}/api/v1/runs/{RUN}").json()
    assert (summary["state"], summary["ranks"], summary["steps"]) == ("finished", 2, 60)
    forms = {re.sub(r" --collector \S+| --nproc-per-node \d+", "", line) for line in TRAININGS}
    assert forms == {"ddpobs run -- torchrun train.py"}


def test_the_start_commands_of_the_documents_start_a_collector(place: Place, tmp_path: Path) -> None:
    assert place.command in SERVERS  # It has started the collector of all other commands.

    def start(line: str) -> None:
        folder = tmp_path / str(SERVERS.index(line))
        folder.mkdir()
        program, *options = line.replace("/var/lib/ddpobs", str(folder)).split()
        settings: dict[str, Any] = {"token": "documented-token"} if "0.0.0.0" in line else {}
        with collector(folder, [str(BIN / program), *options], **settings) as running:
            assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert ("sqlite:////" in line) == (folder / "ddpobs.db").exists()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(start, [line for line in SERVERS if line != place.command]))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in {*TRAININGS, *SERVERS}])
def test_every_command_of_the_documents_runs(line: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(re.search(pattern, line) for pattern in NOT_RUN):
        return
    monkeypatch.chdir(place.folder)
    if re.search(r"\bID\b", line):
        code, _ = run_line(f"ddpobs-server token create by-{line.split()[2]}", place)
        assert code == 0
        _, listed = run_line("ddpobs-server token list", place)
        line = re.sub(
            r"\bID\b", next(row.split()[0] for row in listed.splitlines() if f"by-{line.split()[2]}" in row), line
        )
    code, output = run_line(filled(line, place), place)
    allowed = {0}.union(*(codes for option, codes in CODES.items() if option in line))
    assert code in allowed, output
    if line.startswith("curl") and " -o " not in line:
        assert output.startswith("{"), output
    if line.startswith("ddpobs push"):
        assert httpx.get(f"{place.url}/api/v1/runs/{SPOOLED}").json()["steps"] == 4


def test_the_python_of_the_notebook_page_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPOBS_TELEMETRY", raising=False)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "notebook.md").read_text(), re.DOTALL)
    monkeypatch.chdir(place.folder)
    known: dict[str, Any] = {"writer": None}
    with receiver() as (address, received):
        places = {"http://collector:8321": place.url, "http://localhost:4318": address, "rank=3": "rank=1"}
        for block in blocks:
            exec(re.sub("|".join(places), lambda found: places[found[0]], block), known)
    assert received
    assert known["run"].name == RUN
    assert known["steps"].rows == 60
    assert known["steps"]["own_ns"].tolist()[0] is None
    assert Path("phases.html").stat().st_size > 10**6
    assert len(blocks) == 4
    assert ddpobs.current_run() is None
