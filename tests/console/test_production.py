"""Production mode, as a real process behind a proxy that ends TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import ANSWER_SECONDS_MAX, live_console

pytestmark = pytest.mark.slow

BEHIND_TLS = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.7", "Host": "console.example"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("production")
    settings = {
        "TIDEGATE_MODE": "production",
        "TIDEGATE_STATIC_DIR": str(directory / "static"),
        "TIDEGATE_ALLOWED_HOSTS": "console.example",
        "TIDEGATE_TRUSTED_PROXIES": "1",
    }
    with live_console(directory, settings, {"Host": "console.example"}) as console:
        yield console.address


def get(url: str, headers: dict[str, str]) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=ANSWER_SECONDS_MAX)


def test_plain_http_is_sent_to_tls_but_probes_are_answered(address: str) -> None:
    plain = {"Host": "console.example"}
    assert get(f"{address}/log-in/", headers=plain).headers["Location"].startswith("https://")
    assert get(f"{address}/-/health", headers=plain).status_code == 200
    assert get(f"{address}/-/health/live", headers=plain).status_code == 200


def test_browsers_are_told_to_insist_on_tls_and_cookies_never_travel_without(address: str) -> None:
    response = get(f"{address}/log-in/", headers=BEHIND_TLS)
    assert response.status_code == 200
    assert "max-age=31536000" in response.headers["Strict-Transport-Security"]
    assert "Secure" in response.headers["Set-Cookie"]
    assert "HttpOnly" in response.headers["Set-Cookie"]


def test_other_host_names_are_refused(address: str) -> None:
    response = get(f"{address}/log-in/", headers={**BEHIND_TLS, "Host": "evil.example"})
    assert response.status_code == 400


def test_static_files_are_compressed_and_kept_for_ever(address: str) -> None:
    page = get(f"{address}/log-in/", headers=BEHIND_TLS).text
    path = next(part for part in page.split('"') if "components." in part)
    response = get(f"{address}{path}", headers={**BEHIND_TLS, "Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert "immutable" in response.headers["Cache-Control"]
    assert get(f"{address}/static/nope.css", headers=BEHIND_TLS).status_code == 404


def test_no_debug_page_ever(address: str) -> None:
    response = get(f"{address}/nope", headers=BEHIND_TLS)
    assert response.status_code == 404
    assert "urlpatterns" not in response.text
    assert "Not found" in response.text
