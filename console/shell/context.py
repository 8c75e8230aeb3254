"""Context for the frame around every page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from console.accounts.browser import principal_of
from console.accounts.roles import Role
from console.environment import MANAGE, STACK


@dataclass(frozen=True)
class NavigationItem:
    label: str
    route: str
    key: str  # `g` then this key goes there

    @property
    def address(self) -> str:
        return reverse(self.route)


THEMES = ("auto", "light", "dark")

HOME = NavigationItem("Overview", "home", "h")
ORGS = NavigationItem("Orgs", "orgs", "o")
SESSIONS = NavigationItem("Sessions", "sessions", "s")
WORKLOADS = NavigationItem("Workloads", "workloads", "w")
TOKENIZERS = NavigationItem("Tokenizers", "tokenizers", "k")
BUCKETS = NavigationItem("Buckets", "buckets", "b")
ALERTS = NavigationItem("Alerts", "alerts", "e")
OPERATIONS = NavigationItem("Operations", "operations", "p")
LATENCY = NavigationItem("Latency", "latency", "l")
HAND_OVER = NavigationItem("Hand-over", "hand-over", "d")
ROUTING = NavigationItem("Routing", "routing", "r")
FLEET = NavigationItem("Fleet", "fleet", "f")
POLICIES = NavigationItem("Policies", "policies", "y")
AUDIT = NavigationItem("Audit", "audit", "a")
TOKENS = NavigationItem("Tokens", "tokens", "t")
USERS = NavigationItem("Users", "users", "u")
# Pages of a section whose addresses are not below its own, where each name could be somebody's.
BESIDE: Final = {
    "new-org": "orgs",
    "new-session": "sessions",
    "new-user": "users",
    "new-workload": "workloads",
    "session-rules": "sessions",
}


def shell(request: HttpRequest) -> dict[str, Any]:
    principal = principal_of(request)
    chosen = request.COOKIES.get("tidegate_theme", "")
    theme = chosen if chosen in THEMES else "auto"
    # Where other supervisors start the processes, there are other commands for their logs.
    commands = {"manage": MANAGE, "stack": STACK if settings.EMBEDDED else ""}
    if principal is None:
        return {"principal": None, "navigation": [], "theme": theme, **commands}
    navigation = [HOME, ALERTS, WORKLOADS, TOKENIZERS, BUCKETS, SESSIONS, ROUTING, LATENCY, ORGS]
    navigation += [POLICIES, OPERATIONS, HAND_OVER, AUDIT, TOKENS]
    if principal.on_platform(Role.VIEWER):
        navigation.insert(6, FLEET)
    if principal.on_platform(Role.PLATFORM_ADMIN):
        navigation.append(USERS)
    first = request.path.strip("/").split("/")[0]
    section = BESIDE.get(first, first)
    return {
        "theme": theme,
        **commands,
        "principal": principal,
        "navigation": [(item, item.address.strip("/").split("/")[0] == section) for item in navigation],
    }
