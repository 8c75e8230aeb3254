"""What the processes of the console load before they are ready: nothing that takes long and that they do
without. That is how long a start takes, and the memory of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.test import Client
from django.urls import URLPattern, get_resolver

from console.environment import PROJECT
from console.shell.view_modules import View, ViewModule

API = ("console.api.v1", "ninja", "pydantic")
SELDOM = ("django.test", "grpc", "jinja2", "markdown_it", "plotly")
# What stores and moves columns. Who writes documents for agents and drivers needs their limits only.
STORE = ("kvss_agent.client", "kvss_agent.data_plane.wire", "kvss_agent.tier2.store")
# What asks agents and drivers, and makes certificates.
SENDING = ("cryptography.x509", "httpx", "kvss_agent.http.exchange")
# Of web processes; and of requests to them that are not their first.
PAGES = ("console.charts.services", "console.overview.views")
OTHER_PAGES = (
    "console.fleet.pages.fleet",
    "console.workloads.pages.workloads",
    "swdriver_shim.cache.stock",
)
SERVER = ("console.guard", "uvicorn")
NUMBERS = ("numpy", "scipy")
WEB = "import console.serve, console.asgi; console.asgi._settle_down()"
WHOLE = "import console.asgi; console.asgi._load_the_rest()"
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
        pytest.param(
            WEB,
            (*API, *SELDOM, *STORE, *SENDING, *OTHER_PAGES, *NUMBERS, "starlette.applications"),
            "console.settings",
            id="web",
        ),
        pytest.param(
            WORKER,
            (*API, *SELDOM, *STORE, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            "console.settings",
            id="worker",
        ),
        pytest.param(
            COMMAND,
            (*API, *SELDOM, *STORE, *SENDING, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            "console.settings",
            id="command",
        ),
        pytest.param(
            ORCHESTRATOR,
            (*API, *STORE, *SENDING, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            "console.settings",
            id="orchestrator",
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


def test_an_orchestrator_has_its_solvers_before_its_first_round() -> None:
    """In a plan it would hold the fleet while it loads them."""
    solvers = ("scipy.optimize", "scipy.sparse.csgraph")
    assert loaded(f"{ORCHESTRATOR}\norchestrate._load_solvers()", solvers) == list(solvers)


def told(statement: str) -> set[str]:
    """The words that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", statement],
        cwd=PROJECT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "console.settings"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return set(done.stdout.split())


def test_every_process_can_do_all_operations() -> None:
    """Those of whose pages it has loaded none, too: a worker has no pages."""
    known = "from console.operations.machines import _machines; print(*_machines)"
    assert told(f"{WORKER}; {known}") == told(f"{WHOLE}; {known}")


def test_every_process_can_take_all_changes_back() -> None:
    """And says so before it has loaded the pages of what was changed."""
    known = "from console.audit.services import _undos; print(*_undos())"
    assert told(f"{COMMAND}; {known}") == told(f"{WHOLE}; {known}")


def test_every_page_has_a_view_and_django_looks_for_nothing_at_it() -> None:
    """Before a view is loaded nobody sees what a decorator has left at it, such as `csrf_exempt`."""
    views = [one.callback for one in get_resolver().url_patterns if isinstance(one, URLPattern)]
    assert views
    for view in views:
        assert isinstance(view, View)
        assert vars(view.load()).keys() <= {"__wrapped__"}, view.__qualname__


def test_a_view_that_does_not_exist_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_page"):
        ViewModule("console.shell.views").no_such_page.load()


def test_a_web_process_loads_the_api_once_it_is_ready() -> None:
    """And all pages; not with somebody's first request."""
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

before = sys.modules.keys() & {"console.api.v1", "console.fleet.pages.fleet"}
asyncio.run(live())
"""
    modules = ("console.api.v1", "console.fleet.pages.fleet")
    assert loaded(f"{program}\nassert not before, before", modules) == list(modules)


def test_the_page_of_the_api_needs_nothing_from_elsewhere() -> None:
    """Its scripts are ours, and it is told where the description is."""
    page = Client().get("/api/v1/docs").content.decode()
    assert "/static/ninja/swagger-ui-bundle" in page
    assert '"url": "/api/v1/openapi.json"' in page
    assert "https://" not in page
