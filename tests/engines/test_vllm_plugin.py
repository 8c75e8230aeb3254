"""Where the wheel is installed beside vLLM, vLLM knows the connector and the tier by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.wheels import LOCK, UV, build, install, run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LOAD = """
from vllm.plugins import load_general_plugins
import vllm.plugins
for _ in range(2):  # processes that are forked load them twice
    vllm.plugins.plugins_loaded = False
    load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
config = KVTransferConfig(kv_connector="TidegateConnector", kv_role="kv_both")
for found in (
    KVConnectorFactory.get_connector_class(config),
    SecondaryTierFactory.get_tier_class({"type": "KvssTier"}),
):
    print(found.__module__, found.__name__)
import sys
import swdriver_shim
print(swdriver_shim.__file__, "django" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_vllm_knows_connector_and_tier_by_name(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install(wheel, "", "--target", packages, "--no-deps")
    done = run([sys.executable, "-P", "-c", LOAD], tmp_path, PYTHONPATH=str(packages))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "swdriver_shim.adapters.vllm.connector TidegateConnector",
        "swdriver_shim.adapters.vllm_tier KvssTier",
        f"{packages}/swdriver_shim/__init__.py False",
    ]


def test_it_changes_no_package_that_vllm_has(wheel: Path) -> None:
    command = [str(UV), "pip", "install", "--dry-run", "--offline", "--constraints", str(LOCK)]
    command += ["--python", sys.executable, f"tidegate[driver] @ {wheel.as_uri()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ ([-+~]) (\S+?)(?:==| )", done.stderr, re.MULTILINE) == [("+", "tidegate")]
