"""The import route: takes files that others recorded, and stores the run that they make as its ranks would send it.

Nothing is stored before all files were read and every batch has passed the checks of ingest.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO, NamedTuple

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from ddpobs import wire
from ddpobs.wire.text import RUN_ID
from ddpobs_server.ingest.body import PACE_S, Pace
from ddpobs_server.ingest.import_reader import read_files
from ddpobs_server.ingest.memory_budget import decoded_bytes
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.settings import Settings
from ddpobs_server.store import DeletedRunError, Outcome, UnstorableBatchError
from ddpobs_server.web.auth import needs
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import Services, ServicesDep

IMPORTS = 2
"""Imports at the same time."""
_MAX_WAITING = 8
_MAX_FILES = 1024
_CONTENT = "application/octet-stream"
"""A page of another site cannot send this type without the collector's consent, which it never gives."""
_FILE = re.compile(r"(?P<name>.{1,255}):(?P<size>[0-9]{1,15})", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_TRIES = 60
"""Times that a batch is offered to a busy writer, a second apart."""

router = APIRouter(prefix="/api/v1", tags=["ingest"])


class ImportResponse(TypedDict):
    """A run made of files."""

    run: Annotated[str, Field(description="Name of the run.")]
    lines: Annotated[list[str], Field(description="What the files show, in words.")]


class _File(NamedTuple):
    name: str
    size_bytes: int


@router.post(
    "/runs/{run}/import",
    status_code=201,
    responses={
        200: {"description": "Already stored.", "model": ImportResponse},
        201: {"description": "Stored."},
        410: {"description": "The run was deleted: import the files under another name."},
    },
    openapi_extra={
        "parameters": [
            {
                "name": "run",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": f"^{RUN_ID}$", "description": "Name of the run."},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {_CONTENT: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def import_files(
    request: Request,
    response: Response,
    services: ServicesDep,
    caller: Annotated[Caller, Depends(needs("ingest", people=False))],
    file: Annotated[
        list[str], Query(max_length=_MAX_FILES, description="NAME:BYTES of each file, in the order of the body.")
    ],
) -> ImportResponse:
    """Make a run of files that others recorded. The body has the files, one after the other."""
    run, files = _run_of(request), [_parsed(text) for text in file]
    _check_size(files, services.settings)
    await services.rates.wait_to_send(caller.workspace)
    if services.import_slots.waiting() >= _MAX_WAITING:
        raise Problem(503, "Busy", f"{_MAX_WAITING} imports wait; try again", {"Retry-After": "10"})
    async with services.import_slots.place(caller.workspace):
        with _folder() as folder:
            paths = await _receive(request, files, folder, services.settings)
            output = folder / "batches"
            output.mkdir()
            lines = await read_files(paths, run, output, services.settings)
            outcomes = await _store(services, caller, run, sorted(output.iterdir(), key=_key))
    if all(outcome is Outcome.REPEATED for outcome in outcomes):
        response.status_code = 200
    return {"run": run, "lines": lines}


def _run_of(request: Request) -> str:
    run: str = request.path_params["run"]
    if not re.fullmatch(RUN_ID, run):
        raise Problem(422, "Invalid request", f"path.run: expected {RUN_ID}, got {run[:200]!r}", field="path.run")
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != _CONTENT:
        raise Problem(415, "Unknown content type", f"expected {_CONTENT}, got {content_type[:100]!r}")
    return run


def _parsed(text: str) -> _File:
    found = _FILE.fullmatch(text)
    if found is None:
        detail = f"query.file: expected NAME:BYTES, got {text[:200]!r}"
        raise Problem(422, "Invalid request", detail, field="query.file")
    name = _NOT_IN_NAMES.sub("-", found["name"])[-100:].lstrip(".") or "file"
    return _File(name, int(found["size"]))


def _check_size(files: list[_File], settings: Settings) -> None:
    size_mb = sum(file.size_bytes for file in files) / 1e6
    if size_mb > settings.max_import_mb:
        limit = f"at most {settings.max_import_mb:g} MB (DDPOBS_SERVER_MAX_IMPORT_MB)"
        raise Problem(413, "Files too large", f"the files may have {limit}, got {size_mb:,.0f} MB")


@contextmanager
def _folder() -> Iterator[Path]:
    try:
        with TemporaryDirectory(prefix="ddpobs-import-") as folder:
            yield Path(folder)
    except OSError as error:
        reason = f"the files cannot be kept while they are read: {error.strerror}; free space in the temporary folder"
        raise Problem(507, "Storage full", reason) from None


async def _receive(request: Request, files: list[_File], folder: Path, settings: Settings) -> list[Path]:
    """Write the body's files to a folder, each into one of its own: their names may be the same.

    Raises:
        Problem: 408 if they arrive too slowly, 400 if the body ends early, 422 if it is longer than announced.
    """
    paths = [folder / str(index) / file.name for index, file in enumerate(files)]
    try:
        async with asyncio.timeout(min(PACE_S, settings.import_timeout_s)) as timer:
            body = _Body(request, Pace(timer, settings.import_timeout_s, settings.min_pace_kb_s))
            for path, file in zip(paths, files, strict=True):
                path.parent.mkdir()
                with path.open("wb") as out:
                    await body.copy(file.size_bytes, out)
            await body.check_end()
    except TimeoutError:
        limit = f"within {settings.import_timeout_s:g} s (DDPOBS_SERVER_IMPORT_TIMEOUT_S)"
        raise Problem(408, "Upload too slow", f"the files did not arrive {limit}", {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "Body cut short", "the connection was closed before the end of the body") from None
    return paths


class _Body:
    """A body of several files."""

    def __init__(self, request: Request, pace: Pace) -> None:
        self._stream, self._pace, self._rest = request.stream(), pace, b""

    async def copy(self, size_bytes: int, out: BinaryIO) -> None:
        """Write the next bytes to a file."""
        while size_bytes:
            if not (piece := self._rest or await self._next()):
                raise Problem(422, "Invalid request", "the body is shorter than its files together")
            self._rest = piece[size_bytes:]
            piece = piece[:size_bytes]
            self._pace.count(len(piece))
            await run_in_threadpool(out.write, piece)
            size_bytes -= len(piece)

    async def check_end(self) -> None:
        """Refuse further bytes."""
        if self._rest or await self._next():
            raise Problem(422, "Invalid request", "the body is longer than its files together")

    async def _next(self) -> bytes:
        """Return the next bytes; none at the end."""
        async for piece in self._stream:
            if piece:
                return piece
        return b""


def _key(path: Path) -> tuple[str, int]:
    source, _, seq = path.name.partition("-")
    return source, int(seq)


async def _store(services: Services, caller: Caller, run: str, batches: list[Path]) -> list[Outcome]:
    """Check every batch, then store them in order, as if their ranks had sent them."""
    key, received_ns = caller.key(run), time.time_ns()

    def upload(path: Path) -> Upload:
        source, seq = _key(path)
        parts = {"run": run, "source": source, "seq": str(seq)}
        return Upload(key, parts, path.read_bytes(), wire.MSGPACK, "zstd", received_ns, services.settings)

    for path in batches:
        await run_in_threadpool(lambda checked: checked.arrival, upload(path))
        await services.admission.check(caller.workspace, key, _key(path)[0])
    outcomes = []
    for path in batches:
        outcomes.append(await _submit(services, caller.workspace, upload(path)))
        services.admission.remember(key, _key(path)[0])
    return outcomes


async def _submit(services: Services, workspace: str, upload: Upload) -> Outcome:
    """Store a batch; wait while the writer is busy.

    Raises:
        Problem: 409 for another batch under the same key, 410 for a deleted run, 503 if the writer stays busy.
    """
    for tries in range(_TRIES):
        try:
            with services.memory_budget.reserve(workspace) as reservation:
                reservation.add(len(upload.body) + decoded_bytes(upload.plain_bytes))
                outcome = await services.writer.submit(upload, workspace)
        except DeletedRunError as error:
            raise Problem(410, "Run deleted", f"{error}: import the files under another name") from None
        except UnstorableBatchError as error:
            raise Problem(422, "Malformed batch", str(error)) from None
        except Problem as problem:
            if problem.status != 503 or tries + 1 == _TRIES:
                raise
            await asyncio.sleep(1)
        else:
            if outcome is Outcome.CONFLICT:
                raise Problem(409, "Conflict", f"run {upload.path['run']} has another batch of the same files")
            return outcome
    raise AssertionError("the last try raises")
