"""The command line of a benchmark on links: its options `--json` and `--smoke`, and what it writes and prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.links import LinkError

Results = dict[str, Any]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all have; its help is the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    return parser


def measure_and_print(
    program: str,
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], Results],
    report: Callable[[Results], str],
) -> None:
    """Measure, write the results into the file of `--json`, and print the report.

    Raises:
        SystemExit: Links cannot be made here.
    """
    try:
        results = run(options)
    except LinkError as error:
        sys.exit(f"{program}: {error}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(report(results))
