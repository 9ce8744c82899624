"""Imports of every collector, done once in the process that forks them."""

from importlib import import_module

from ddpobs_server import api

for module in (
    "ddpobs_server.app",
    *api.MODULES,
    "alembic.command",
    "anyio._backends._asyncio",
    "httptools",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
):
    import_module(module)
