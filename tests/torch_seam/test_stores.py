"""Connections to stores whose server ends."""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from benchmarks.rig import patience
from ddpobs.torch_seam.stores import StoreConnection


def test_the_end_of_the_server_is_seen_without_a_call_that_prints_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    connection = StoreConnection(PrefixStore("outer", PrefixStore("inner", server)))
    connection.store.set("key", "value")
    del other
    assert connection.store.get("key") == b"value"
    assert not connection.is_closed()
    del server
    deadline = time.monotonic() + patience.HANG_S
    while not connection.is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert connection.is_closed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del connection
        gc.collect()
    assert capfd.readouterr().err == ""


def test_a_store_without_a_server_is_never_closed(tmp_path: Path) -> None:
    for store in (FileStore(str(tmp_path / "store"), 1), HashStore()):
        assert not StoreConnection(PrefixStore("ranks", store)).is_closed()
