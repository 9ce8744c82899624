"""The build of torch that `scripts/setup.sh` installs: one line names it, and why."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import torch_index
from scripts.torch_index import choose, pinned, why_not


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a package index with the pages in `tmp_path`, which may answer late on a busy machine."""
    monkeypatch.setattr(torch_index, "_PROBE_S", 60.0)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def offer(folder: Path, version: str) -> None:
    name = f"torch-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    (folder / "torch").mkdir()
    (folder / "torch" / "index.html").write_text(f'<a href="{name}">{name}</a>')


def without_gpu(named: str = "", *, cpu_index: str) -> tuple[str, str]:
    return choose(named, lambda: False, why_not, cpu_index)


def test_a_machine_without_a_gpu_gets_the_cpu_build_of_an_index_that_offers_it(index: str, tmp_path: Path) -> None:
    offer(tmp_path, f"{pinned()}%2Bcpu")
    assert without_gpu(cpu_index=index) == (
        index,
        f"torch: the CPU build of {index}, because this machine has no NVIDIA GPU.",
    )


def test_a_machine_with_a_gpu_gets_pips_choice(index: str, tmp_path: Path) -> None:
    offer(tmp_path, pinned())
    chosen, line = choose("", lambda: True, why_not, index)
    assert chosen == ""
    assert line.endswith("because this machine has an NVIDIA GPU.")


def test_a_named_index_goes_first() -> None:
    named = "https://download.pytorch.org/whl/cu130"
    chosen, line = choose(named, lambda: True, why_not)
    assert chosen == named
    assert line.endswith("because TORCH_INDEX_URL names it.")


def test_an_index_without_the_pinned_version_is_not_used(index: str, tmp_path: Path) -> None:
    offer(tmp_path, "1.0.0")
    chosen, line = without_gpu(cpu_index=index)
    assert chosen == ""
    assert f"5 GB larger than that of {index}, which cannot be used here: it has no torch {pinned()}." in line


def test_an_index_that_refuses_or_does_not_answer_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_index, "_PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        chosen, line = without_gpu(cpu_index=address)
        assert chosen == ""
        assert f"5 GB larger than that of {address}, which cannot be used here: " in line
    assert without_gpu(cpu_index=address)[0] == ""


def test_a_build_that_is_installed_remains(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_index, "installed", lambda: f"{pinned()}+cu130")
    torch_index.main()
    printed = capsys.readouterr()
    assert printed.out == "\n"
    assert printed.err == f"torch: {pinned()}+cu130 remains, because it is installed.\n"
