"""The wheel has all that runs, extras bring what their roles import, commands say what is missing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.environment import PROJECT
from kvss_agent.native import Unavailable, builder
from tests.packaging.wheels import Installed, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACKAGES = (
    "cluster_server",
    "console",
    "inference_brain",
    "kvss_agent",
    "swdriver_shim",
    "telemetry",
    "workload_manager",
)
LEFT_OUT = ("console/stack/bootstrap.py", "console/supply/", "console/write_docs.py")
# The extras, and what can be imported with each.
ROLES = {
    "": ["kvss_agent.client", "kvss_agent.native", "kvss_agent.security", "kvss_agent.shard"],
    "ctl": ["console.ctl"],
    "agent": ["kvss_agent"],
    "driver": ["kvss_agent", "swdriver_shim"],
    "console": ["kvss_agent", "swdriver_shim", "telemetry", "console"],
}
# Modules for whom something else is installed as well: another extra, or an engine, which brings it.
OF_OTHERS = {
    "kvss_agent.tier2.s3": "obstore",
    "telemetry.emit.otlp": "opentelemetry",
    "swdriver_shim.adapters.lmcache": "torch",
    "swdriver_shim.adapters.sglang": "torch",
    "swdriver_shim.adapters.transformers": "torch",
    "swdriver_shim.adapters.transformers_states": "torch",
    "swdriver_shim.adapters.ucm": "torch",
    "swdriver_shim.adapters.vllm.connector": "torch",
    "swdriver_shim.adapters.vllm.device": "torch",
    "swdriver_shim.adapters.vllm_tier": "vllm",
}
# Which extra each command needs, and others that have enough for it.
SCRIPTS = {
    "cluster-server": ("cluster", "console"),
    "kvss-agent": ("agent", "driver", "console"),
    "swdriver": ("driver", "console", "agent"),
    "tidegate": ("console",),
    "tidegatectl": ("ctl", "console"),
}
# What has to be asked of a command to see that its extra is missing. Others need it for their help.
NEEDS_EXTRA = {"swdriver": "serve", "tidegate": "up"}
SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "console.settings",
    "TIDEGATE_MODE": "embedded",
    "TIDEGATE_SECRET_KEY": "a-secret-of-the-tests-that-is-long-enough-for-django",
    "DATABASE_URL": "postgres://nobody@127.0.0.1:1/none",
    "REDIS_URL": "redis://127.0.0.1:1/0",
}
IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
if importlib.util.find_spec("django"):
    import django
    django.setup()
names, missing = [], {}
for package in sys.argv[1:]:
    path = importlib.import_module(package).__path__
    names += [package, *(module.name for module in pkgutil.walk_packages(path, package + "."))]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name.partition(".")[0]
print(json.dumps({"names": names, "missing": missing, "django": "django" in sys.modules}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=ROLES, ids=lambda extra: extra or "bare")
def role(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Installed]:
    return request.param, Installed(tmp_path_factory.mktemp("installed"), wheel, request.param)


def files(folder: str, pattern: str = "*") -> Iterator[str]:
    for path in (PROJECT / folder).rglob(pattern):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(PROJECT))


def test_it_has_all_that_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        path for package in PACKAGES for path in files(package) if not path.startswith(LEFT_OUT)
    } | {
        f"console/bundled/{path}" for folder in ("templates", "docs/runbooks") for path in files(folder)
    }
    assert {name for name in found if not name.endswith(".so")} == wanted


@pytest.mark.parametrize("role", [""], indirect=True)
def test_it_has_the_compiled_mover_which_is_used_where_there_is_no_compiler(
    wheel: Path, role: tuple[str, Installed]
) -> None:
    _, installed = role
    try:
        builder._toolchain()
    except Unavailable as reason:
        pytest.skip(f"the native mover cannot be built here: {reason}")
    assert not wheel.name.endswith("-any.whl")
    done = installed.run("python", "-P", "-m", "kvss_agent.native", CC="/nonexistent")
    path = Path(done.stdout.strip().rpartition(": ")[2])
    assert done.stdout.startswith("Compiled mover for "), done.stderr
    assert path.parent.name == "native"
    assert path.is_relative_to(installed.directory / "lib")
    assert (
        installed.evaluate("from kvss_agent import native; print(native.current().name)") == "compiled"
    )


def test_without_a_compiler_it_is_for_all_platforms(tmp_path: Path) -> None:
    wheel = build(tmp_path, CC="/nonexistent")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_an_extra_brings_what_its_role_imports(role: tuple[str, Installed]) -> None:
    extra, installed = role
    done = installed.run("python", "-P", "-c", IMPORT_ALL, *ROLES[extra], **SETTINGS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["missing"] == {name: OF_OTHERS[name] for name in told["names"] if name in OF_OTHERS}
    assert told["django"] == (extra == "console")


def test_a_command_helps_or_says_which_extra_it_needs(role: tuple[str, Installed]) -> None:
    extra, installed = role
    for script, needed in SCRIPTS.items():
        is_there = extra in needed
        done = installed.run(script, "--help" if is_there else NEEDS_EXTRA.get(script, "--help"))
        if is_there:
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith(f"usage: {script} ")
        else:
            assert done.returncode == 69
            assert f"pip install 'tidegate[{needed[0]}]'" in done.stderr
            assert "Traceback" not in done.stderr
    assert installed.run("swdriver", "--help").stdout.startswith("usage: swdriver ")


@pytest.mark.parametrize("role", [""], indirect=True)
def test_vllm_finds_the_plugin_which_imports_next_to_nothing(role: tuple[str, Installed]) -> None:
    _, installed = role
    code = """
import sys
from importlib.metadata import entry_points
before = set(sys.modules)
[plugin] = entry_points(group="vllm.general_plugins")
assert callable(plugin.load())
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""
    assert installed.evaluate(code) == "swdriver_shim"


@pytest.mark.parametrize("role", ["console"], indirect=True)
def test_the_console_finds_its_pages_runbooks_and_static_files(role: tuple[str, Installed]) -> None:
    _, installed = role
    done = installed.run("tidegate", "manage", "check", **SETTINGS)
    assert done.stdout == "System check identified no issues (0 silenced).\n", done.stderr
    code = """
import django
django.setup()
from django.conf import settings
from django.contrib.staticfiles import finders
from django.template.loader import get_template
from console.alerts.rules.runbooks import rendered
get_template("base.html")
assert finders.find("tidegate/live.js")
assert rendered("leaf-down.md")
print(settings.VERSION, settings.STATE_DIR)
"""
    state = installed.directory / ".tidegate"  # below the directory that it runs in
    assert installed.evaluate(code, **SETTINGS) == f"0.1.0 {state}"
