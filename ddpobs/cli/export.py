"""`ddpobs export`: a run's steps or spans as a Parquet file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ddpobs.cli.app import FAILED, SAVE, CollectorOption, RunArgument, ask, chosen_run, fail, main, settings
from ddpobs.cli.progress import progress
from ddpobs.client.client import Run
from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError
from ddpobs.imports.exported import METADATA, ExportedFacts


class Kind(StrEnum):
    """Rows of the file."""

    STEPS = "steps"
    SPANS = "spans"


@main.command(rich_help_panel=SAVE, short_help="Save steps or bucket spans as a Parquet file.")
def export(
    run_id: RunArgument = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="File; by default RUN-steps.parquet or RUN-spans.parquet in this folder.")
    ] = None,
    kind: Annotated[Kind, typer.Option("--rows", help="Steps, or bucket spans.")] = Kind.STEPS,
    collector: CollectorOption = None,
) -> None:
    r"""Save a run's steps or bucket spans as a Parquet file, with the columns run and attempt.

    Needs pyarrow: pip install 'ddpobs\[export]'.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        fail("pyarrow is not installed: pip install 'ddpobs[export]'", FAILED)
    config = settings(collector)
    name = chosen_run(config, run_id)
    summary = ask(config, f"/runs/{name}").document
    file = output or Path(f"{name}-{kind.value}.parquet")
    try:
        rows = _write(Run(config, name), summary, _facts(config, name, summary), kind, file)
    except CollectorError as error:
        fail(str(error), FAILED)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", FAILED)
    typer.echo(f"{file}: {rows} {kind.value}", err=True)


def _facts(config: TelemetryConfig, run: str, summary: dict[str, Any]) -> bytes:
    """What `ddpobs import` needs beside the columns."""
    (*_, latest) = ask(config, f"/runs/{run}/attempts").document["attempts"]
    facts = {"world_size": summary["world_size"], "began_ns": latest["began_ns"] or summary["created_ns"]}
    for path, name in (("ranks", "ranks"), ("layout", "layouts"), ("pipeline", "pipeline")):
        facts[name] = ask(config, f"/runs/{run}/{path}").document[name]
    hello = summary["hello"] or {"settings": {}}
    facts["not_compared"] = hello["settings"].get("not_compared", "")
    return msgspec.json.encode(msgspec.convert(facts, ExportedFacts))


def _write(run: Run, summary: dict[str, Any], facts: bytes, kind: Kind, file: Path) -> int:
    """Write page by page, so that a run may be larger than memory; returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    constants = {"run": run.name, "attempt": summary["attempt"]}
    rows, last, writer = 0, 0.0, None
    partial = file.with_name(f"{file.name}.partial")
    try:
        with progress("exporting", summary["steps"]) as advance:
            for page in run.pages(kind.value):
                columns = {key: pa.repeat(value, page.rows).dictionary_encode() for key, value in constants.items()}
                table = pa.table(columns | dict(page)).replace_schema_metadata({METADATA: facts})
                writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                writer.write_table(table)
                if page.rows:
                    advance(float(page["step"][-1]) - last)
                    rows, last = rows + page.rows, float(page["step"][-1])
        if writer is not None:
            writer.close()
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return rows
