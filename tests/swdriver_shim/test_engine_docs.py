"""What docs/engines says a stranger should type, typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from console.environment import PROJECT
from swdriver_shim.adapters.remote import RemoteObjects
from tests.kvss_agent.process import agent
from tests.live import wait_until
from tests.swdriver_shim.daemons import Daemon

DOCS = PROJECT / "docs" / "engines"


@pytest.mark.slow
def test_the_documents_that_are_written_there_make_an_agent_and_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"```python\n(.*?)```", (DOCS / "README.md").read_text(), re.DOTALL)
    assert found
    with agent(tmp_path / ".kvss") as made:
        monkeypatch.chdir(tmp_path)
        exec(found[1].replace("4 << 30", "40 << 20"), {})  # noqa: S102
        made.tell(json.loads(Path("agent.json").read_text()))
        told = json.loads(Path("driver.json").read_text())
        told["homes"][0]["address"] = f"unix:{tmp_path / '.kvss' / 'data.sock'}"
        daemon = Daemon(tmp_path / "driver")
        assert daemon.control("desired", told).status_code == 202
        wait_until("it is ready", daemon.is_ready)
        objects = RemoteObjects(str(daemon.http.base_url), Path("acme.token").read_text())
        assert objects.value_bytes_max == 1 << 20
        assert objects.put([b"key"], [memoryview(bytes(1 << 20))]) == [True]
        assert objects.exists([b"key"]) == [True]
        objects.close()
        daemon.stop()


def test_every_engine_that_is_listed_has_a_page_and_a_module_and_every_page_is_listed() -> None:
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    for page in DOCS.glob("*.md"):
        for module in re.findall(r"swdriver_shim\.adapters\.([a-z_]+)", page.read_text()):
            adapters = PROJECT / "swdriver_shim" / "adapters"
            assert (adapters / f"{module}.py").exists() or (adapters / module).is_dir(), page
