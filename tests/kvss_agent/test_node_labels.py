"""What labels of a node say of its agent. `tests/kubernetes/test_helm.py` asks for real ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvss_agent.process.node_labels import as_shell, settings_of
from kvss_agent.settings import parse


def test_labels_become_settings_that_an_agent_understands(tmp_path: Path) -> None:
    labels = {
        "kubernetes.io/hostname": "rack7-host2",
        "nic.tidegate.dev/eth1": "leaf-2",
        "nic.tidegate.dev/eth0": "leaf-1",
        "agent.tidegate.dev/memory": "24GiB",
    }
    settings = settings_of(labels)
    assert settings == {"KVSS_AGENT_NICS": "eth0=leaf-1,eth1=leaf-2", "KVSS_AGENT_MEMORY": "24GiB"}
    read = parse([], {**settings, "KVSS_AGENT_STATE_DIR": str(tmp_path)})
    assert read.nics == (("eth0", "leaf-1"), ("eth1", "leaf-2"))
    assert read.memory_bytes == 24 << 30


def test_a_node_without_labels_says_nothing() -> None:
    assert settings_of({"kubernetes.io/os": "linux"}) == {}
    assert as_shell({}) == ""


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("nic.tidegate.dev/eth0", ""),
        ("nic.tidegate.dev/", "leaf-1"),
        ("agent.tidegate.dev/memory", "much"),
        ("agent.tidegate.dev/memory", "-1GiB"),
    ],
)
def test_a_label_that_makes_no_sense_is_named(label: str, value: str) -> None:
    with pytest.raises(ValueError, match=label):
        settings_of({label: value})


def test_a_shell_reads_what_was_written(tmp_path: Path) -> None:
    """As the command of the agent's container does it."""
    file = tmp_path / "facts"
    file.write_text(as_shell({"A": "x=y,z", "B": "it's; $(exit 1)"}))
    script = f"set -a; . {file}; exec env"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert {"A=x=y,z", "B=it's; $(exit 1)"} <= set(done.stdout.splitlines())
