"""Refuses query parameters that a route does not know: a misspelt `form=10` must not select every step."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from ddpobs_server.web.problems import Problem

_MAX_NAMED = 5
_names_by_route: dict[int, frozenset[str]] = {}
"""Names by the id of the route, which lives as long as its application."""


def refuse_unknown(request: Request) -> None:
    """Check the query's names, as a dependency of every route. Pages are exempt: links to them may carry more.

    Raises:
        Problem: 422; the detail has the unknown names and the known ones.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute) or not route.include_in_schema:
        return
    accepted = _names_by_route.get(id(route))
    if accepted is None:
        accepted = _names_by_route.setdefault(id(route), frozenset(_names(route.dependant)))
    unknown = sorted(set(request.query_params) - accepted)
    if unknown:
        names = ", ".join(name[:64] for name in unknown[:_MAX_NAMED])
        expected = f"expected one of {', '.join(sorted(accepted))}" if accepted else "expected none"
        detail = f"query: {expected}, got {names}"
        raise Problem(422, "Unknown parameter", detail, field=f"query.{unknown[0][:64]}")


def _names(dependant: Dependant) -> set[str]:
    """Return the query parameters of a route or dependency, and of its dependencies."""
    names = {parameter.alias for parameter in dependant.query_params}
    return names.union(*map(_names, dependant.dependencies))
