"""The route that sets a run's tags and note."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from ddpobs.wire.text import MAX_TAGS, NOTE_CHARACTERS, TAG_CHARACTERS, clean_tags
from ddpobs_server.api.bodies import small_body
from ddpobs_server.api.deps import Labeller, RunDep, StoreDep
from ddpobs_server.api.fields import RunName, doc
from ddpobs_server.store import labels_of, trained_labels
from ddpobs_server.web.audit_entry import entry_of
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import ServicesDep

router = APIRouter(prefix="/api/v1", tags=["runs"])

_MAX_BYTES = 65_536
"""Maximum bytes of a body."""
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "tags": {
                        "type": "array",
                        "maxItems": MAX_TAGS,
                        "items": {"type": "string", "minLength": 1, "maxLength": TAG_CHARACTERS},
                        "description": "Tags that replace the present ones.",
                    },
                    "note": {
                        "type": "string",
                        "maxLength": NOTE_CHARACTERS,
                        "description": "Note that replaces the present one.",
                    },
                },
            }
        }
    },
}


class Labels(TypedDict):
    """Tags and a note: those that a person set, else those of the training."""

    tags: Annotated[list[str], doc("Words by which the run is found.")]
    note: Annotated[str, doc("Note about the run, for people.")]


class LabelsResponse(Labels):
    """The labels of a run after a change."""

    run: RunName


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    note: str | msgspec.UnsetType = msgspec.UNSET


@router.patch("/runs/{run}", openapi_extra={"requestBody": _BODY})
async def set_labels(
    request: Request, run: RunDep, caller: Labeller, store: StoreDep, services: ServicesDep
) -> LabelsResponse:
    """Replace a run's tags, its note, or both; a field that is left out stays. They may also be set by the training."""
    body = await small_body(request, services, caller.workspace, _MAX_BYTES)
    change = _decoded(body)
    tags = None if change.tags is msgspec.UNSET else change.tags
    note = None if change.note is msgspec.UNSET else change.note

    def write() -> tuple[list[str], str]:
        given = {"tags": tags, "note": note}
        detail = {name: value for name, value in given.items() if value is not None}
        store.set_labels(run.run, tags, note, entry_of(request, caller, "run.labels", run.name, detail))
        hello = store.hellos([run.run]).get(run.run)
        return labels_of(store.run(run.run) or run, trained_labels(hello))

    async with services.read_slots.place(caller.workspace):
        new_tags, new_note = await run_in_threadpool(write)
    return {"run": run.name, "tags": new_tags, "note": new_note}


def _decoded(body: bytes) -> _Change:
    """Return the change.

    Raises:
        Problem: 422 if it is malformed.
    """
    try:
        change = msgspec.json.decode(body, type=_Change)
        if change.tags is not msgspec.UNSET:
            change.tags = list(clean_tags(change.tags))
        if change.note is not msgspec.UNSET and (len(change.note) > NOTE_CHARACTERS or "\0" in change.note):
            raise ValueError(f"note: expected at most {NOTE_CHARACTERS} characters")
    except ValueError as error:  # msgspec's errors are ValueErrors too.
        raise Problem(422, "Malformed labels", str(error), field="$") from None
    return change
