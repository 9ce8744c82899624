"""The files of tests that start first."""

FIRST = (
    "tests/integration/test_faults.py",
    "tests/integration/test_hangs.py",
    "tests/integration/test_crashes.py",
    "tests/benchmarks/test_training.py",
    "tests/integration/test_hang_log.py",
    "tests/benchmarks/test_collector.py",
    "tests/integration/test_apart.py",
    "tests/comm/test_life.py",
    "tests/export/test_delivery.py",
    "tests/server/web/test_connections.py",
    "tests/integration/test_frameworks.py",
    "tests/server/page/test_page.py",
    "tests/integration/test_run_command.py",
    "tests/server/page/test_page_requests.py",
    "tests/reducer/test_equal_to_torch.py",
    "tests/attachment/test_attach.py",
    "tests/comm/test_strategies.py",
)
"""The longest files, which start first if files run in parallel.

Files that mostly wait are between those that need both cores.
"""
