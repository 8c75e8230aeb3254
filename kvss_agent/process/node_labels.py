"""What the labels of a node of Kubernetes say of its agent, as settings in a file for a shell:
`python -m kvss_agent.process.node_labels --node NAME --into FILE`.

A pod can't read the labels of its node, so an init container asks the API server, with a token that the
agent itself doesn't get.

    nic.tidegate.dev/NIC=LEAF         a NIC, and the leaf that it is plugged in at
    agent.tidegate.dev/memory=24GiB   memory for shards
"""

from __future__ import annotations

import argparse
import os
import shlex
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
import msgspec

from kvss_agent.process.options import name as checked_name
from telemetry.decoder import Limits, Malformed, decode
from telemetry.units import parse_size

NIC_PREFIX: Final = "nic.tidegate.dev/"
MEMORY: Final = "agent.tidegate.dev/memory"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NODE: Final = Limits(4 << 20)
SECONDS_MAX: Final = 10.0


class Metadata(msgspec.Struct):
    labels: dict[str, str] = {}


class Node(msgspec.Struct):
    metadata: Metadata


def settings_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Raises ValueError, with a sentence, for a label that makes no sense."""
    found: dict[str, str] = {}
    nics = []
    for label in sorted(labels):
        if label.startswith(NIC_PREFIX):
            try:
                nic, leaf = checked_name(label.removeprefix(NIC_PREFIX)), checked_name(labels[label])
            except ValueError:
                raise ValueError(f"label {label}={labels[label]} names no NIC and leaf") from None
            nics.append(f"{nic}={leaf}")
    if nics:
        found["KVSS_AGENT_NICS"] = ",".join(nics)
    if memory := labels.get(MEMORY):
        try:
            parse_size(memory)
        except ValueError as error:
            raise ValueError(f"label {MEMORY}={memory}: {error}") from None
        found["KVSS_AGENT_MEMORY"] = memory
    return found


def as_shell(settings: Mapping[str, str]) -> str:
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items())


def labels_of(node: str, environment: Mapping[str, str], account: Path) -> dict[str, str]:
    """As the API server has them. Raises httpx.HTTPError, OSError, and Malformed."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
    at = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    shown = {"Authorization": f"Bearer {(account / 'token').read_text().strip()}"}
    answer = httpx.get(
        f"{at}/api/v1/nodes/{node}", headers=shown, verify=trusted, trust_env=False, timeout=SECONDS_MAX
    )
    answer.raise_for_status()
    return decode(answer.content, Node, NODE).metadata.labels


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvss_agent.process.node_labels",
        description="Write what the labels of a node say of its agent.",
    )
    parser.add_argument("--node", required=True)
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--account",
        type=Path,
        default=ACCOUNT,
        metavar="DIR",
        help="token and ca.crt (default: %(default)s)",
    )
    options = parser.parse_args()
    try:
        settings = settings_of(labels_of(options.node, os.environ, options.account))
    except KeyError as error:
        sys.stderr.write(f"This is no pod of Kubernetes: {error.args[0]} is not set.\n")
        return 1
    except (httpx.HTTPError, OSError, Malformed, ValueError) as error:
        sys.stderr.write(f"Node {options.node}: {error}\n")
        return 1
    options.into.write_text(as_shell(settings))
    said = ", ".join(f"{key}={value}" for key, value in settings.items()) or "nothing"
    sys.stderr.write(f"Labels of node {options.node} say: {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
