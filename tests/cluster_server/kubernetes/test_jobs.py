"""Jobs that were submitted, beside those that were made by hand."""

from __future__ import annotations

import pytest

from cluster_server.backend import NotFound
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import Document
from cluster_server.kubernetes.jobs import Jobs
from tests.cluster_server.kubernetes.unconnected import SETTINGS, cluster, stored
from tests.cluster_server.requests import job


def by_hand(name: str, says: str = "") -> Document:
    annotations = {names.NAME: says} if says else {}
    metadata = {"name": name, "annotations": annotations}
    return {"metadata": metadata, "spec": {"kind": "Execute", "configMap": "inputs"}}


def known(*documents: Document) -> Jobs:
    made = Jobs(cluster(), at_once=1, kept=5, on_end=lambda: None)
    for number, one in enumerate(documents):
        made._mirror.take(stored(one, uid=f"u{number}"))
    return made


def submitted(name: str) -> Document:
    return objects.wsjob_document(job(name), 2e9, SETTINGS)


async def test_a_wsjob_that_was_made_by_hand_does_not_pass_for_another() -> None:
    name = "compile-w-r1-17-0"
    jobs = known(submitted(name), by_hand("evil", says=name), by_hand("compile-w-r2-17-0"))
    assert jobs.job(name).submitted_at == 2e9
    assert jobs.job("wsjob/evil").name == "wsjob/evil"
    with pytest.raises(NotFound):
        jobs.job("compile-w-r2-17-0")
    # What somebody has changed of it is not what was submitted any more.
    changed = submitted(name)
    changed["spec"]["configMap"] = "another"
    jobs._mirror.take(stored(changed, uid="u0", version=8))
    with pytest.raises(NotFound):
        jobs.job(name)


async def test_those_that_were_made_by_hand_take_no_turns_of_others() -> None:
    jobs = known(*(by_hand(f"long-{number}") for number in range(3)), submitted("compile-w-r1-17-0"))
    in_turn = {one.name for one in jobs._workers.values() if jobs._may_start(one)}
    assert in_turn == {"compile-w-r1-17-0", "wsjob/long-0"}
