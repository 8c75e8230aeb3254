"""What the processes of the console load before they are ready: nothing that takes long and that they do
without. That is how long a start takes, and the memory of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.test import Client

from console.environment import PROJECT

API = ("console.api.v1", "ninja", "pydantic")
SELDOM = ("django.test", "grpc", "jinja2", "markdown_it", "plotly")
# What stores and moves columns. Who writes documents for agents and drivers needs their limits only.
STORE = ("kvss_agent.client", "kvss_agent.data_plane.wire", "kvss_agent.tier2.store")
# Of web processes.
PAGES = ("console.charts.services", "console.guard", "swdriver_shim.cache.stock", "uvicorn")
WEB = "import console.serve, console.asgi; console.asgi._settle_down()"
WORKER = "from console.celery import app; app.loader.import_default_modules()"
BEAT = f"{WORKER}; import console.beat"
COMMAND = "import console.manage, django; django.setup()"
ORCHESTRATOR = f"{COMMAND}; from console.workloads.management.commands import orchestrate"
LEAN = "console.settings_lean"


def loaded(statement: str, modules: tuple[str, ...], settings: str = "console.settings") -> list[str]:
    """Which of the modules a new process has, after a statement."""
    program = (
        f"{statement}\nimport json, sys\nprint(json.dumps([m for m in {modules!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": settings},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("statement", "modules", "settings"),
    [
        pytest.param(WEB, (*API, *SELDOM, *STORE), "console.settings", id="web"),
        pytest.param(
            WORKER, (*API, *SELDOM, *STORE, *PAGES, "console.urls"), "console.settings", id="worker"
        ),
        pytest.param(
            COMMAND, (*API, *SELDOM, *STORE, *PAGES, "console.urls"), "console.settings", id="command"
        ),
        pytest.param(
            ORCHESTRATOR, (*API, *STORE, *PAGES, "console.urls"), "console.settings", id="orchestrator"
        ),
        pytest.param(
            COMMAND, (*API, *SELDOM, "celery", "console.fleet.models", "uvicorn"), LEAN, id="ingest"
        ),
        pytest.param(BEAT, (*API, *SELDOM, "console.fleet.models", "uvicorn"), LEAN, id="beat"),
    ],
)
def test_what_a_process_does_without_is_not_loaded(
    statement: str, modules: tuple[str, ...], settings: str
) -> None:
    assert loaded(statement, modules, settings) == []


def test_a_web_process_loads_the_api_once_it_is_ready() -> None:
    """And not with somebody's first request."""
    program = """
import asyncio, sys, time
import console.asgi

async def live() -> None:
    asked, said = asyncio.Queue(), asyncio.Queue()
    asked.put_nowait({"type": "lifespan.startup"})
    running = asyncio.create_task(console.asgi.lifespan({}, asked.get, said.put))
    assert (await said.get())["type"] == "lifespan.startup.complete"
    asked.put_nowait({"type": "lifespan.shutdown"})
    await running

before = "console.api.v1" in sys.modules
asyncio.run(live())
after = "console.api.v1" in sys.modules
"""
    assert loaded(f"{program}\nassert not before", ("console.api.v1",)) == ["console.api.v1"]


def test_the_page_of_the_api_needs_nothing_from_elsewhere() -> None:
    """Its scripts are ours, and it is told where the description is."""
    page = Client().get("/api/v1/docs").content.decode()
    assert "/static/ninja/swagger-ui-bundle" in page
    assert '"url": "/api/v1/openapi.json"' in page
    assert "https://" not in page
