"""The image of `server/Dockerfile`, built and started by a real Docker engine."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.containers import address, collector_image, container, docker, ready_s, volume
from tests.support import smoke
from tests.support.containers import need_images, shell, stand_ins, state
from tests.support.server.batches import batch, put, steps

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1800)]  # The image is built first.
BASE = "python:3.11-slim"
TOKEN = "a-token-of-sixteen-characters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--init")
PUBLISHED = ("--publish=127.0.0.1::8321", f"--env=DDPOBS_SERVER_TOKEN={TOKEN}")
NEVER_SLOWER = 25
"""Seconds in which SIGTERM ends a collector, according to `docs/operations/install.md`."""


@pytest.fixture(scope="module")
def image() -> str:
    need_images(BASE)
    return collector_image()


def status(url: str, **headers: str) -> int:
    return httpx.get(f"{url}/api/v1/runs/kept", headers=headers).status_code


def test_the_image_is_smaller_than_400_mb_and_has_no_installer(image: str) -> None:
    size_mb, base_mb = (state(name)["Size"] / 1e6 for name in (image, BASE))
    of = f"a stand-in of {base_mb:.0f} MB for {BASE}" if stand_ins(BASE) else BASE
    print(f"the image has {size_mb:.0f} MB, on {of}")  # noqa: T201
    assert base_mb < size_mb < 400
    assert "No module named pip" in docker("run", "--rm", image, "python", "-m", "pip", check=False)


def test_the_image_has_only_what_a_collector_needs(image: str) -> None:
    found = docker("run", "--rm", "--user=0", image, "sh", "-c", "ls -A / /data /home/ddpobs; find / -name .git -xdev")
    assert "src" not in found.split()
    assert ".git" not in found


def test_a_collector_runs_without_root_and_writes_to_its_volume_only(image: str) -> None:
    with volume() as data, container(image, options=(*HARDENED, *PUBLISHED, f"--volume={data}:/data")) as collector:
        ready_s(collector)
        assert put(address(collector), batch("kept", steps=steps(0, 2)), **BEARER).status_code == 201
        assert shell(collector, "id -u") == "8321"
        assert set(shell(collector, "grep -h ^Uid: /proc/[0-9]*/status").split()) == {"Uid:", "8321"}
        assert shell(collector, "grep -h ^CapEff: /proc/[0-9]*/status | sort -u").split() == ["CapEff:", "0" * 16]
        for folder in ("/", "/venv", "/home/ddpobs", "/etc"):
            assert "Read-only" in shell(collector, f"touch {folder}/file", check=False)
        assert shell(collector, "stat -c '%U %a' /data/ddpobs.db") == "ddpobs 600"
        patience.until(lambda: state(collector)["State"]["Health"]["Status"] == "healthy")


@pytest.mark.parametrize("user", ["18321:18321", "18321:0"])
def test_a_collector_runs_as_any_user_who_may_write_the_data(image: str, tmp_path: Path, user: str) -> None:
    tmp_path.chmod(0o777)
    options = (*HARDENED, *PUBLISHED, f"--user={user}", f"--volume={tmp_path}:/data")
    with container(image, options=options) as collector:
        ready_s(collector)
        assert put(address(collector), batch("kept", steps=steps(0, 2)), **BEARER).status_code == 201
        assert (tmp_path / "ddpobs.db").stat().st_uid == 18321


@pytest.mark.parametrize("init", [(), ("--init",)])
def test_runs_remain_when_a_container_is_stopped_restarted_killed_and_replaced(image: str, init: tuple[str]) -> None:
    with volume() as data:
        options = (*init, *PUBLISHED, f"--volume={data}:/data")
        with container(image, options=options) as collector:
            ready_s(collector)
            assert put(address(collector), batch("kept", steps=steps(0, 2)), **BEARER).status_code == 201
            docker("stop", f"--time={NEVER_SLOWER}", collector)
            assert state(collector)["State"]["ExitCode"] == 0
            docker("start", collector)
            ready_s(collector)
            assert put(address(collector), batch("kept", 1, steps=steps(2, 2)), **BEARER).status_code == 201
            docker("kill", collector)
            assert state(collector)["State"]["ExitCode"] == 137
        with container(image, options=options) as collector:
            ready_s(collector)
            stored = httpx.get(f"{address(collector)}/api/v1/runs/kept/steps", headers=BEARER).json()
            assert stored["columns"]["step"] == [0, 1, 2, 3]


def test_secrets_come_from_files_and_are_in_no_description_of_the_container(image: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "settings").write_text("DDPOBS_SERVER_WEBHOOK_URL=http://127.0.0.1:9/a-secret-address\n")
    names = (
        "--env=DDPOBS_SERVER_TOKEN_FILE=/run/secrets/token",
        "--env=DDPOBS_SERVER_SETTINGS_FILE=/run/secrets/settings",
    )
    options = (*HARDENED, PUBLISHED[0], *names, f"--volume={tmp_path}:/run/secrets:ro")
    tmp_path.chmod(0o755)
    with container(image, options=options) as collector:
        ready_s(collector)
        url = address(collector)
        assert put(url, batch("kept", steps=steps(0, 2)), **BEARER).status_code == 201
        assert status(url, Authorization="Bearer another") == 401
        assert status(url, **BEARER) == 200
        seen = docker("inspect", collector) + docker("logs", collector)
        assert TOKEN not in seen
        assert "a-secret-address" not in seen
        (tmp_path / "token").write_text("a-newer-token-than-before\n")
        patience.until(lambda: status(url, **BEARER) == 401)
        assert status(url, Authorization="Bearer a-newer-token-than-before") == 200


def test_a_token_is_created_in_a_running_container_and_works(image: str) -> None:
    with container(image, options=(*HARDENED, *PUBLISHED)) as collector:
        ready_s(collector)
        created = shell(collector, "ddpobs-server token create alice --workspace team")
        token = next(word for word in created.split() if word.startswith("ddpobs_"))
        url = address(collector)
        team = {"Authorization": f"Bearer {token}"}
        assert put(url, batch("kept", steps=steps(0, 2)), **team).status_code == 201
        assert (status(url, **team), status(url, **BEARER)) == (200, 404)


def test_a_collector_without_a_writable_folder_says_so_and_ends(image: str, tmp_path: Path) -> None:
    options = (*HARDENED, *PUBLISHED, f"--volume={tmp_path}:/data:ro")
    with container(image, options=options) as collector:
        assert int(docker("wait", collector)) == 1
        assert "/data" in docker("logs", collector)


def test_the_benchmark_measures_size_start_and_stop(image: str) -> None:
    output = smoke.run("container", "--image", image)
    number = r"(\d+\.\d) s \((\d+\.\d) to (\d+\.\d)\), 2 times"
    assert re.search(r"^image: \d+ MB$", output, re.MULTILINE)
    for title in ("start", "stop"):
        measured = re.search(rf"^{title}: {number}$", output, re.MULTILINE)
        assert measured, output
        assert 0 < float(measured[2]) <= float(measured[1]) <= float(measured[3])
