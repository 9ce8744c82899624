"""The route that stores a check of hosts, and returns their earlier ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from ddpobs_server.analysis.fleet.host_shares import host_name
from ddpobs_server.api.bodies import small_body
from ddpobs_server.api.deps import Labeller, Reader, StoreDep
from ddpobs_server.api.fields import HostName, doc
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import ServicesDep

router = APIRouter(prefix="/api/v1", tags=["fleet"])

_MAX_BYTES, _MAX_HOSTS, _MAX_RANKS = 2**20, 4096, 2**20
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["device", "hosts"],
                "additionalProperties": False,
                "properties": {
                    "device": {"type": "string", "maxLength": 16, "description": "Kind of device that was measured."},
                    "hosts": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": _MAX_HOSTS,
                        "items": {
                            "type": "object",
                            "required": ["host", "ranks", "rates"],
                            "additionalProperties": False,
                            "properties": {
                                "host": {"type": "string", "maxLength": 255, "description": "Name of the host."},
                                "ranks": {"type": "integer", "minimum": 1, "maximum": _MAX_RANKS},
                                "rates": {
                                    "type": "object",
                                    "additionalProperties": {"type": "number"},
                                    "description": "Rate by measure, in operations or bytes a second.",
                                },
                            },
                        },
                    },
                },
            }
        }
    },
}


class EarlierChecks(TypedDict):
    """Earlier checks of a host with as many ranks."""

    host: HostName
    ranks: Annotated[int, doc("Number of its ranks.")]
    checks: Annotated[int, doc("Number of earlier checks, at most the latest 16.")]
    rates: Annotated[dict[str, float], doc("Median rate by measure, in operations or bytes a second.")]


class HostCheckResponse(TypedDict):
    """What is known of the hosts of a check."""

    earlier: Annotated[list[EarlierChecks], doc("Hosts that were checked before.")]


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]
    rates: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[float, msgspec.Meta(gt=0, le=1e30)]],
        msgspec.Meta(max_length=16),
    ]


class _Check(msgspec.Struct, forbid_unknown_fields=True):
    device: Annotated[str, msgspec.Meta(max_length=16, pattern="^[ -~]+$")]
    hosts: Annotated[list[_Host], msgspec.Meta(min_length=1, max_length=_MAX_HOSTS)]


@router.post("/host-checks", openapi_extra={"requestBody": _BODY})
async def add_host_check(
    request: Request, caller: Labeller, _: Reader, store: StoreDep, services: ServicesDep
) -> HostCheckResponse:
    """Store the rates of hosts that were checked, and return their earlier rates on the same kind of device."""
    body = await small_body(request, services, caller.workspace, _MAX_BYTES)
    try:
        check = msgspec.json.decode(body, type=_Check)
    except ValueError as error:
        raise Problem(422, "Malformed check", str(error), field="$") from None
    hosts = {(host_name(host.host), host.ranks): host.rates for host in check.hosts}
    async with services.read_slots.place(caller.workspace):
        earlier = await run_in_threadpool(store.add_host_check, caller.workspace, check.device, hosts, time.time_ns())
    return {
        "earlier": [
            {"host": host, "ranks": ranks, "checks": len(rates), "rates": _medians(rates)}
            for (host, ranks), rates in sorted(earlier.items())
        ]
    }


def _medians(rates: Sequence[dict[str, float]]) -> dict[str, float]:
    measures = dict.fromkeys(measure for of_check in rates for measure in of_check)
    return {
        measure: statistics.median(of_check[measure] for of_check in rates if measure in of_check)
        for measure in measures
    }
