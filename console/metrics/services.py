"""Access to metrics by topic."""

from __future__ import annotations

from typing import Final

from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.services import get_org
from console.sessions.services import get_session
from telemetry.models import Topic
from telemetry.topics import ORG, SESSION

_OF_AN_ORG: Final = f"{ORG}:"
_OF_A_SESSION: Final = f"{SESSION}:"


def check_topic(principal: Principal, topic: str) -> None:
    """The one access function for metrics. Members see their orgs and sessions; nodes, drivers and the
    fleet, which all orgs share, need a role on the platform. Raises Http404."""
    if topic.startswith(_OF_AN_ORG) and not topic.endswith("*"):
        get_org(principal, topic.removeprefix(_OF_AN_ORG))
        return
    if topic.startswith(_OF_A_SESSION) and not topic.endswith("*"):
        get_session(principal, topic.removeprefix(_OF_A_SESSION))
        return
    if not principal.on_platform(Role.VIEWER):
        raise Http404("There is no such topic, or you may not see it.")


def check_has_data(topic: str) -> None:
    """Raises Http404 for a topic without any metrics, which may be misspelled."""
    is_one = ":" in topic and not topic.startswith(_OF_AN_ORG) and not topic.endswith("*")
    if is_one and not Topic.objects.filter(name=topic).exists():
        raise Http404("This topic has no metrics yet.")
