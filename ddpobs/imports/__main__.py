"""Read files within limits, and write the batches of their run: `python -m ddpobs.imports`.

The collector starts this process for files that were uploaded. It prints one JSON object: what the files show in
`lines`, or the fault of a file in `error`.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path

import msgspec

from ddpobs.errors import TraceFileError
from ddpobs.imports.files import encoded, read

_NICE = 10


def main() -> int:
    """Write each batch to the file SOURCE-SEQ in the output folder, as its client would send it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--memory-mb", type=int, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_mb * 10**6,) * 2)
    try:
        imported = read(options.files, options.run)
        for batch, body in encoded(imported):
            (options.output / f"{batch.source}-{batch.seq}").write_bytes(body)
    except TraceFileError as error:
        return _report(error=f"{Path(str(error.path)).name}: expected {error.expected}, got {error.actual}")
    except MemoryError:
        return _report(error=f"the files need more than {options.memory_mb} MB of memory")
    return _report(lines=imported.lines)


def _report(**result: object) -> int:
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
