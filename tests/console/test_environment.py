"""Settings that are wrong stop the start, by name, with what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from console import environment
from console.environment import (
    PROJECT,
    ConfigurationError,
    Environment,
    Mode,
    remove_data,
    settings_table,
)

GOOD = {
    "DATABASE_URL": "postgresql://u:p@localhost/tidegate",
    "REDIS_URL": "redis://localhost/0",
    "TIDEGATE_SECRET_KEY": "k" * 60,
    "TIDEGATE_ALLOWED_HOSTS": "console.example.org",
}


def problems(**changed: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        Environment.read({**GOOD, **changed})
    return caught.value.problems


def test_production_is_the_default_and_debug_is_off() -> None:
    environment = Environment.read(GOOD)
    assert environment.mode is Mode.PRODUCTION
    assert environment.debug is False


def test_a_misspelt_name_is_refused_with_the_right_one() -> None:
    [problem] = problems(TIDEGATE_ALOWED_HOSTS="x")
    assert "TIDEGATE_ALOWED_HOSTS" in problem
    assert "Did you mean TIDEGATE_ALLOWED_HOSTS?" in problem


def test_the_token_of_the_api_examples_may_be_exported_where_the_console_starts() -> None:
    assert Environment.read({**GOOD, "TIDEGATE_TOKEN": "tgw_x"}) == Environment.read(GOOD)


def test_what_kubernetes_sets_for_a_service_is_refused_with_how_to_turn_it_off() -> None:
    found = problems(TIDEGATE_SERVICE_HOST="10.0.0.11", TIDEGATE_PORT="tcp://10.0.0.11:8400")
    assert len(found) == 2
    assert all("enableServiceLinks: false" in problem for problem in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIDEGATE_PORT", "http"),
        ("TIDEGATE_PORT", "0"),
        ("TIDEGATE_PORT", "65536"),
        ("TIDEGATE_DEBUG", "yes please"),
        ("TIDEGATE_MODE", "prod"),
        ("TIDEGATE_LOG_LEVEL", "loud"),
        ("TIDEGATE_ALLOWED_HOSTS", "a b"),
        ("DATABASE_URL", "mysql://localhost/x"),
        ("DATABASE_URL", "postgresql://"),
        ("DATABASE_URL", "postgresql://localhost:port/x"),
        ("REDIS_URL", "localhost:6379"),
        ("TIDEGATE_JWT_ALGORITHM", "none"),
    ],
)
def test_nonsense_is_refused_with_name_and_what_is_allowed(name: str, value: str) -> None:
    found = problems(**{name: value})
    about = next(a for a in Environment.attributes().values() if a.name == name)
    assert any(name in problem and about.kind.allowed in problem for problem in found)


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(TIDEGATE_PORT="x", TIDEGATE_DEBUG="x", TIDEGATE_TYPO="x")) == 3


def test_the_value_of_a_secret_is_never_told() -> None:
    [problem] = problems(TIDEGATE_SECRET_KEY="too-short-s3cret")
    assert "too-short-s3cret" not in problem


def test_what_is_required_is_asked_for() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Environment.read({})
    said = str(caught.value)
    assert all(name in said for name in ("DATABASE_URL", "REDIS_URL", "TIDEGATE_SECRET_KEY"))


def test_contradictions_are_refused() -> None:
    assert "TIDEGATE_DEBUG" in problems(TIDEGATE_DEBUG="true")[0]
    assert "TIDEGATE_ALLOWED_HOSTS" in problems(TIDEGATE_ALLOWED_HOSTS="")[0]
    assert "TIDEGATE_JWT_KEY" in problems(TIDEGATE_JWT_ALGORITHM="RS256")[0]


def test_the_documented_table_is_the_one_in_the_code() -> None:
    assert settings_table() in (PROJECT / "docs" / "settings.md").read_text()


def test_a_bad_setting_ends_the_start_with_a_sentence_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=PROJECT,
        env={**GOOD, "TIDEGATE_PORT": "many", "PATH": "", "TIDEGATE_STATE_DIR": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert "TIDEGATE_PORT is 'many', but must be a whole number" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_production_passes_djangos_own_deployment_checks() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=PROJECT,
        env={
            **GOOD,
            "TIDEGATE_SECRET_KEY": "8f2c61d0a9e74b35b1fd9c0e7a2d4466aa01c3f5e9b87d12x7",
            "TIDEGATE_STATE_DIR": "/nonexistent",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_where_there_is_no_makefile_nobody_is_told_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remove_data({}) == "remove the data with `make clean DATA=1`"
    elsewhere = "delete the directory /srv/tidegate, which has all data"
    assert remove_data({"TIDEGATE_STATE_DIR": "/srv/tidegate"}) == elsewhere, "`make clean` leaves it"
    monkeypatch.setattr(environment, "IS_CHECKOUT", False)
    monkeypatch.setattr(environment, "HOME", Path("/home/ada"))
    assert remove_data({}) == "delete the directory /home/ada/.tidegate, which has all data"
    assert environment.command("up") == "tidegate up"
