"""The REST reads: what the store holds and what the reports say, as JSON."""

from __future__ import annotations

from fastapi import FastAPI

from ddpobs_server.api import diagnosis, health, runs, turns


def install(app: FastAPI) -> None:
    """Add the routes."""
    turns.install(app)
    for module in (health, runs, diagnosis):
        app.include_router(module.router)
