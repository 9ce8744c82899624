"""The files of tests that start first."""

FIRST = (
    "tests/integration/test_hangs.py",
    "tests/integration/test_frameworks.py",
    "tests/integration/test_crashes.py",
    "tests/server/page/test_page.py",
    "tests/export/test_delivery.py",
    "tests/server/ingest/test_cost_of_numbers.py",
    "tests/server/web/test_connections.py",
    "tests/examples/test_examples.py",
    "tests/server/page/test_run_page.py",
    "tests/server/page/test_page_requests.py",
    "tests/reducer/test_equal_to_torch.py",
    "tests/torch_suite/test_torch_suite.py",
    "tests/attachment/test_attach.py",
    "tests/comm/test_strategies.py",
)
"""The longest files of `make test`, which start first if files run in parallel.

Files that mostly wait are between those that need both cores.
"""
