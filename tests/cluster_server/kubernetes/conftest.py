"""An API server in memory, and a way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster_server.kubernetes.api import Api
from tests.cluster_server.kubernetes.api_server import ApiServer, api_server, connected_to


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as made:
        yield made


@pytest.fixture
async def api(server: ApiServer, tmp_path: Path) -> AsyncIterator[Api]:
    async with connected_to(server, tmp_path) as made:
        yield made
