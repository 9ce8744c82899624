"""The example of two nodes over MPI, on two hosts: network namespaces with host names of their own.

`benchmarks/two_nodes.py` starts it in the other ways. A slow link is a case of `test_communication_faults.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import links, two_nodes

pytestmark = pytest.mark.alone


def test_mpiexec_starts_a_rank_on_each_host_and_the_slow_host_is_named(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "over-mpi"
    try:
        output = two_nodes.run("mpi", folder, "--steps", "100", "--slow-host", "node1")
    except links.LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    assert "rank 0 of 2 on node0, local rank 0" in output
    assert "rank 1 of 2 on node1, local rank 0" in output
    results = two_nodes.pushed(url, folder)
    assert [rank["host"] for rank in results["ranks"]] == ["node0", "node1"]
    straggler = results["findings"]["straggler"]
    assert straggler["ranks"] == [1]
    assert straggler["evidence"]["host"] == "node1"
    assert "network-slow" not in results["findings"]  # Nor a slow link, on which both hosts would wait.
    assert results["findings"].get("comm-bound", {"evidence": {}})["evidence"].get("kind") != "bandwidth"
