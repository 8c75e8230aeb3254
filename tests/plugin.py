"""Before anything else: a private PostgreSQL and Redis for this run, real ones.

The settings want their addresses when they are imported, which is why this is a plugin and not a
fixture. Workers of a parallel run share the servers of the run, each with a database of its own in
both; two runs share nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings

from tests.embedded import embedded_servers
from tests.guard import Guard
from tests.prepared import DIRECTORY as PREPARED

STARTED = "SERVERS_OF_THE_TESTS"
# Files and folders of tests that want an environment of their own, by the marker that asks for them.
APART = {
    "models": {
        "test_transformers.py",
        "test_transformers_states.py",
        "test_transformers_templates.py",
    },
    "engines": {"engines"},
    "image": {"test_image.py"},
    "debian": {"test_debian.py"},
}
SECRET_KEY = "a-secret-of-the-tests-that-is-long-enough-for-django"
_servers = contextlib.ExitStack()
_guards: list[Guard] = []  # one, where this process has started the servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures",
        type=Path,
        metavar="DIRECTORY",
        help="save pictures of pages there, of tests that take some at decisive moments",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a shell has it for what runs in the background. What tests start would not hear Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if STARTED not in os.environ:
        _start_servers()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw-1")
    number = int(worker.removeprefix("gw")) + 1
    os.environ["REDIS_URL"] = os.environ[STARTED].replace("db=0", f"db={number}")


def _start_servers() -> None:
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        del os.environ[name]  # what a developer has set is not what is tested
    # Workers rewrite the asserts of all tests, and hundreds of processes import all of our code: once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    directory = _servers.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-"))
    os.environ[PREPARED] = directory  # also by which the guard knows the servers
    _guards.append(guard := Guard())
    guard.watch(Path(directory))
    _servers.callback(guard.end)
    servers = _servers.enter_context(embedded_servers(Path(directory)))
    os.environ["DATABASE_URL"] = servers.database_url
    os.environ[STARTED] = servers.redis_url
    os.environ["TIDEGATE_SECRET_KEY"] = SECRET_KEY
    os.environ["TIDEGATE_MODE"] = "embedded"
    os.environ["TIDEGATE_STATIC_DIR"] = str(Path(directory) / "static")


def _left_out(config: pytest.Config) -> list[str]:
    marks = config.option.markexpr
    return [what for what in APART if what not in marks.replace(f"not {what}", "")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"real {what}: left out; `make test-{what}` runs them" for what in _left_out(config)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of real models and engines need torch and more, which only environments of their own have.
    So they are not even imported unless they are asked for by their marker."""
    names = set().union(*(APART[what] for what in _left_out(config)))
    return True if collection_path.name in names else None


def pytest_configure(config: pytest.Config) -> None:
    """No property has to be quick: machines are shared, and tests with each other. Groups are handed out
    in the order of `pytest_collection_modifyitems`, and not those of many tests first."""
    config.option.loadscopereorder = False
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


def pytest_sessionstart(session: pytest.Session) -> None:
    for guard in _guards:
        guard.watch(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


def pytest_itemcollected(item: pytest.Item) -> None:
    """What tests of a module share is made once: they go to one worker, unless they say where."""
    if item.get_closest_marker("xdist_group") is None and _shares(item):
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest goes first, so that nobody waits for the last worker."""
    items.sort(key=_patience, reverse=True)
    if getattr(config.option, "loadgroup", False):
        for item in items:
            _name_group(item)


@contextlib.contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Of all workers. Where nothing is compiled yet, all would compile the same at once: one does,
    and the others find what it has written."""
    with Path(os.environ[PREPARED], "collecting").open("w") as places:
        fcntl.lockf(places, fcntl.LOCK_EX, 1, zlib.crc32(what.encode()))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Import each file in one worker after the other."""
    if not isinstance(collector, pytest.File):
        return (yield)
    with _one_at_a_time(collector.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True, specname="pytest_collection_modifyitems")
def pytest_read_constants() -> Generator[None, object, object]:
    """Hypothesis reads the constants in all of our files, and keeps them for others."""
    with _one_at_a_time("constants"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector need not look through all that is imported, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _name_group(item: pytest.Item) -> None:
    """By a suffix of names xdist tells its scheduler of groups. Its 3.8 sets it where pytest 9.2 does
    not look any more, and groups are ignored without a word (xdist issue 1386)."""
    if mark := item.get_closest_marker("xdist_group"):
        item._id = NodeId.parse(f"{item.nodeid}@{mark.args[0]}")


def _patience(item: pytest.Item) -> tuple[bool, bool, float]:
    stack, slow, timeout = (item.get_closest_marker(name) for name in ("stack", "slow", "timeout"))
    return stack is not None, slow is not None, timeout.args[0] if timeout else 0


def _shares(item: pytest.Item) -> bool:
    """Whether it asks for a fixture of ours that is made once for its module."""
    fixtures: dict[str, Any] = (
        item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    )
    return any(one.scope == "module" and one.baseid for found in fixtures.values() for one in found)


def pytest_unconfigure() -> None:
    _servers.close()
