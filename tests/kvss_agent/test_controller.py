"""Who may give orders to an agent or a driver."""

from __future__ import annotations

from typing import NoReturn

import pytest
from starlette.requests import Request

from kvss_agent.http.api import CONTROLLER, Refused
from kvss_agent.http.controller import METRICS, controller_of

TOKEN = "t" * 40


class Asked(Request):
    """Over TLS, with the token and without a certificate."""

    def __init__(self, path: str, host: str) -> None:
        headers = [(b"host", host.encode()), (b"authorization", f"Bearer {TOKEN}".encode())]
        super().__init__(
            {
                "type": "http",
                "scheme": "https",
                "path": path,
                "query_string": b"",
                "headers": headers,
                "extensions": {"peer": None},
            }
        )

    @property
    def url(self) -> NoReturn:
        raise AssertionError("it is made of what the caller writes as Host")


@pytest.mark.parametrize("host", ["ax-1", "x/metrics?", "x/metrics#"])
def test_the_host_that_a_caller_names_is_no_certificate(host: str) -> None:
    with pytest.raises(Refused, match="certificate is needed"):
        controller_of(Asked("/v1/desired", host), TOKEN)
    assert controller_of(Asked(METRICS, host), TOKEN) == CONTROLLER
