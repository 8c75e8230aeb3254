"""What the processes of the console load before they are ready: nothing that takes long and that they do
without. That is how long a start takes, and the memory of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest
from asgiref.sync import iscoroutinefunction
from django.core.management import call_command, get_commands, load_command_class
from django.core.management.base import ALL_CHECKS
from django.test import Client
from django.urls import URLPattern, get_resolver

from console.environment import PROJECT
from console.shell.management.commands import prepare
from console.shell.view_modules import View, ViewModule

pytestmark = pytest.mark.xdist_group("start")  # where each process is started once

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
FULL = "console.settings"
LEAN = "console.settings_lean"
# Registries for which modules are imported by who asks them.
FOUND_LATER = {
    "console.audit.services._undo",
    "console.search.services._far_finders",
    "console.search.services._finders",
}


# What such a process tells of itself, after its statement. To ask for undos imports them.
TELLING = """
import json, sys
modules = [*sys.modules]
registered = {
    f"{name}.{key}": len(value)
    for name in modules if name.startswith("console.")
    for key, value in vars(sys.modules[name]).items()
    if isinstance(value, dict | list | set) and not key.startswith("__")
}
undos = []
if "console.audit.models" in modules:
    from console.audit.services import _undos
    undos = [*_undos()]
print(json.dumps({"modules": modules, "registered": registered, "undos": undos}))
"""


class Started(NamedTuple):
    """A new process after a statement: what it has imported, how many things each collection of a module
    holds, and of which changes it knows how to take them back."""

    modules: list[str]
    registered: dict[str, int]
    undos: list[str]


@cache
def started(statement: str, settings: str) -> Started:
    """One process for all tests that ask about it."""
    return Started(**json.loads(told(f"{statement}\n{TELLING}", settings).splitlines()[-1]))


def told(program: str, settings: str = FULL) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": settings},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("statement", "modules", "settings"),
    [
        pytest.param(
            WEB,
            (*API, *SELDOM, *STORE, *SENDING, *OTHER_PAGES, *NUMBERS, "starlette.applications"),
            FULL,
            id="web",
        ),
        pytest.param(
            WORKER,
            (*API, *SELDOM, *STORE, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            FULL,
            id="worker",
        ),
        pytest.param(
            COMMAND,
            (*API, *SELDOM, *STORE, *SENDING, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            FULL,
            id="command",
        ),
        pytest.param(
            ORCHESTRATOR,
            (*API, *STORE, *SENDING, *PAGES, *OTHER_PAGES, *SERVER, *NUMBERS, "console.urls"),
            FULL,
            id="orchestrator",
        ),
        pytest.param(
            COMMAND, (*API, *SELDOM, "celery", "console.fleet.models", "uvicorn"), LEAN, id="ingest"
        ),
        pytest.param(BEAT, (*API, *SELDOM, "console.fleet.models", "uvicorn"), LEAN, id="beat"),
        pytest.param(
            "import console.ctl.command",
            ("click", "django", "pygments", "rich.console"),
            FULL,
            id="tidegatectl",
        ),
    ],
)
def test_what_a_process_does_without_is_not_loaded(
    statement: str, modules: tuple[str, ...], settings: str
) -> None:
    assert not {*modules} & {*started(statement, settings).modules}


def test_an_orchestrator_has_its_solvers_before_its_first_round() -> None:
    """In a plan it would hold the fleet while it loads them."""
    solvers = ("scipy.optimize", "scipy.sparse.csgraph")
    assert {*solvers} <= {*started(f"{ORCHESTRATOR}\norchestrate._load_solvers()", FULL).modules}


@pytest.mark.parametrize("statement", [WORKER, ORCHESTRATOR, COMMAND])
def test_what_modules_register_every_process_has(statement: str) -> None:
    """Such as what operations do: a worker has loaded no page, and so nothing that only pages import."""
    known, whole = started(statement, FULL).registered, started(WHOLE, FULL).registered
    assert {name for name in known.keys() & whole.keys() if known[name] != whole[name]} <= FOUND_LATER


def test_every_process_can_take_all_changes_back() -> None:
    """And says so before it has loaded the pages of what was changed."""
    assert started(WHOLE, FULL).undos
    assert {*started(COMMAND, FULL).undos} == {*started(WHOLE, FULL).undos}


def test_every_page_has_a_view_and_django_looks_for_nothing_at_it() -> None:
    """Before a view is loaded nobody sees what a decorator has left at it, such as `csrf_exempt`."""
    views = [one.callback for one in get_resolver().url_patterns if isinstance(one, URLPattern)]
    assert views
    for view in views:
        assert isinstance(view, View)
        assert vars(view.load()).keys() <= {"__wrapped__"}, view.__qualname__
        assert not iscoroutinefunction(view.load()), view.__qualname__


@pytest.mark.parametrize("module", ["console.explain.views", "console.api.urls"])
def test_what_cannot_be_loaded_stops_a_release(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process of it is started."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=module):
        call_command("check")
    assert prepare.Command.requires_system_checks == ALL_CHECKS


def test_no_other_command_checks_what_was_checked() -> None:
    """A second of a processor, and of whoever waits for the command."""
    ours = {
        name: app
        for name, app in get_commands().items()
        if str(app).startswith(("console.", "telemetry"))
    }
    checking = [
        name for name, app in ours.items() if load_command_class(app, name).requires_system_checks
    ]
    assert {"demo", "orchestrate", "ingest"} <= ours.keys()
    assert checking == ["prepare"]


def test_a_page_that_cannot_be_loaded_is_logged_and_the_others_are_loaded() -> None:
    program = """
import logging, sys
import console.asgi
sys.modules["console.explain.views"] = None
console.asgi.log.addHandler(logging.StreamHandler(sys.stdout))
console.asgi._load_the_rest()
print(*sys.modules)
"""
    assert {"ModuleNotFoundError:", "console.workloads.pages.workloads", "console.api.v1"} <= {
        *told(program).split()
    }


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
    assert {*modules} <= {*started(f"{program}\nassert not before, before", FULL).modules}


def test_the_page_of_the_api_needs_nothing_from_elsewhere() -> None:
    """Its scripts are ours, and it is told where the description is."""
    page = Client().get("/api/v1/docs").content.decode()
    assert "/static/ninja/swagger-ui-bundle" in page
    assert '"url": "/api/v1/openapi.json"' in page
    assert "https://" not in page
