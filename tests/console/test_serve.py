"""`python -m console.serve`: what it refuses before anything else, and how it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from django.conf import settings
from django.db import connection
from psycopg.conninfo import conninfo_to_dict

from console import serve
from telemetry.stop import STOPS
from tests.live import SOCKET, listening, live_console
from tests.processes import start


def test_a_certificate_needs_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(["--tls-certificate", "host.pem"])
    assert ended.value.code == 2
    assert "both or not at all" in capsys.readouterr().err


def test_a_file_that_is_no_certificate_stops_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (None, "no certificate"):
        path = tmp_path / f"{text}.pem"
        if text:
            path.write_text(text)
        given = ["--tls-certificate", str(path), "--tls-key", str(path)]
        assert serve.main(given) == os.EX_CONFIG
        assert "The certificate can't be used" in capsys.readouterr().err


def test_an_address_in_use_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as other:
        assert serve.main(["--port", str(other.getsockname()[1])]) == 1
    assert "The console cannot start: [Errno 98] Address already in use." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
def test_it_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    with listening() as listener, log.open("wb") as output:
        process = start(
            *("console.serve", "--fd", str(SOCKET)),
            descriptors={1: output.fileno(), 2: output.fileno(), SOCKET: listener.fileno()},
        )
        try:
            port = listener.getsockname()[1]
            httpx.get(f"http://127.0.0.1:{port}/-/health", timeout=60).read()
            process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_it_ends_while_postgres_does_not_answer(tmp_path: Path) -> None:
    """Its threads would wait for ever."""
    with live_console(tmp_path) as served, connection.cursor() as cursor:
        name = conninfo_to_dict(served.environment["DATABASE_URL"])["dbname"]
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", [name])
        backends = [pid for (pid,) in cursor.fetchall()]
        for pid in backends:
            os.kill(pid, signal.SIGSTOP)
        cookie = {"Cookie": f"{settings.SESSION_COOKIE_NAME}={'a' * 32}"}  # which it has to look up
        try:
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{served.address}/login", headers=cookie, timeout=2)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(30) == 0
        finally:
            for pid in backends:
                os.kill(pid, signal.SIGCONT)
