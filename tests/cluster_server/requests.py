"""Requests to a Cluster Server, as tests make them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster_server.proto import cluster_pb2 as pb

FAKE_MANAGER = (sys.executable, "-S", str(Path(__file__).with_name("fake_manager.py")))
SECRET = "tgj_never-shown-to-anybody"


def instance(name: str, *, goal: pb.Goal = pb.RUN, grace: int = 30, **spec: Any) -> pb.Instance:
    return pb.Instance(
        name=name,
        spec=json.dumps(spec).encode(),
        secrets={"join_token": json.dumps(SECRET).encode()},
        boxes=[f"box-{name}"],
        goal=goal,
        grace_seconds=grace,
    )


def workload(name: str, generation: int, *instances: pb.Instance) -> pb.ApplyRequest:
    return pb.ApplyRequest(workload=name, generation=generation, instances=instances)


def with_goal(one: pb.Instance, goal: pb.Goal) -> pb.Instance:
    changed = pb.Instance()
    changed.CopyFrom(one)
    changed.goal = goal
    return changed


def job(name: str, *, deadline: int = 0, **spec: Any) -> pb.JobSpec:
    return pb.JobSpec(
        name=name,
        kind=pb.COMPILE,
        spec=json.dumps(spec).encode(),
        secrets={"api_key": json.dumps(SECRET).encode()},
        deadline_seconds=deadline,
    )
