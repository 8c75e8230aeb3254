"""docs/first-cluster.md as its reader goes through it, on the test bed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import yaml

from console.environment import PROJECT
from tests.documents import Shell, steps
from tests.kubernetes.bed import Bed
from tests.kubernetes.chart import NAME
from tests.kubernetes.control_plane import ADMIN
from tests.kubernetes.proxy import LOOPBACK, Proxy
from tests.kubernetes.release import Release, platform_token, released, values
from tests.kubernetes.servers import for_pods

pytestmark = [pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
TEXT = (PROJECT / "docs" / "first-cluster.md").read_text()


@pytest.fixture
def release(kubernetes_bed: Bed) -> Iterator[Release]:
    if kubernetes_bed.control.why_no_custom_resources:
        pytest.skip(kubernetes_bed.control.why_no_custom_resources)
    if kubernetes_bed.control.kubectl is None:
        pytest.skip("there is no kubectl")
    with released(kubernetes_bed) as made:
        yield made


def programs(folder: Path, bed: Bed) -> str:
    """A folder for PATH with the programs that the document takes for granted."""
    folder.mkdir()
    assert bed.control.kubectl
    (folder / "kubectl").symlink_to(bed.control.kubectl)
    for name, module in (("helm", "tests.kubernetes.helm_command"), ("tidegatectl", "console.ctl")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec env PYTHONPATH={PROJECT} {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def as_own(redis_url: str) -> str:
    """The address of the same server as agents, drivers and brains are given it."""
    address = urlsplit(redis_url)
    place = address.netloc.rpartition("@")[2]
    return urlunsplit(address._replace(netloc=f"own@{place}"))


@pytest.mark.timeout(1200)
def test_from_an_empty_cluster_to_a_served_token(release: Release, tmp_path: Path) -> None:
    """Services have no addresses here (nobody plays kube-proxy), so proxies stand for the Ingresses."""
    bed = release.bed
    with (
        for_pods(bed) as (database_url, redis_url),
        contextlib.closing(Proxy((LOOPBACK, 9), bed.host)) as console,  # as pods reach it
        contextlib.closing(Proxy((LOOPBACK, 9))) as reader,  # for whom plain HTTP ends at this machine
        contextlib.closing(Proxy((LOOPBACK, 9), bed.host)) as brain,
    ):
        address = f"http://{bed.host}:{console.port}"
        more = tmp_path / "more.yaml"
        here = values(address, bed) | {
            "image": {},
            "ingress": {"enabled": False},
        }
        here["brain"] |= {"ingress": {"enabled": False}}
        more.write_text(yaml.safe_dump(here))
        environment = {
            "PATH": programs(tmp_path / "bin", bed),
            "HOME": str(tmp_path),
            "KUBECONFIG": str(bed.kubeconfig(ADMIN)),
            "HELM_MORE": str(more),
        }
        instead = {
            "https://tidegate.example.org": f"http://{LOOPBACK}:{reader.port}",
            "https://models.example.org": f"http://{bed.host}:{brain.port}",
            "postgresql://…": database_url,
            "redis://own@redis.example.org:6379/0": as_own(redis_url),
            "redis://…": redis_url,
            "deploy/helm/tidegate": str(PROJECT / "deploy" / "helm" / "tidegate"),
            "rack1-host1": "node-a",
            "rack1-host2": "node-b",
        }
        with Shell(instead, environment, tmp_path) as shell:
            for step in steps(TEXT):
                if "tgw_…" in step.command:
                    (web,) = release.until_ready("web", 1)
                    console.to = reader.to = (web["status"]["podIP"], 8400)
                    instead["tgw_…"] = platform_token(address, *release.first_admin())
                if "https://models.example.org" in step.command:
                    (one,) = release.until_ready("brain", 1)
                    brain.to = (one["status"]["podIP"], 8440)
                shell.follow(step)
    assert NAME in TEXT
