"""How sessions' pages say things."""

from __future__ import annotations

from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from console.fleet.models import Driver, Node
from console.placement.topology import Tier
from console.sessions import redundancy
from console.sessions.budgets import Budgets
from console.sessions.driver_orgs import ALL_WARNING, leaving_of, orgs_of
from console.sessions.pages.forms import UpgradeForm
from console.sessions.rules import effective_rules
from console.sessions.siblings import Siblings
from console.shell.templatetags.console import bar, status

register = template.Library()

LOOKS = {"rail": "ok", "leaf": "warn", "spine": "bad"}
NO_PATH = {"": "no node", "unknown": "path not told"}


@register.simple_tag
def upgrade_form() -> UpgradeForm:
    """For the page of a node, which is the fleet's."""
    return UpgradeForm(auto_id="upgrade_%s")


@register.simple_tag
def driver_orgs(driver: Driver) -> dict[str, Any]:
    """For the page of a driver, which is the fleet's: the orgs that it may serve; None for all."""
    return {"orgs": orgs_of(driver), "leaving": leaving_of(driver), "warning": ALL_WARNING}


@register.simple_tag
def driver_siblings(driver: Driver) -> dict[str, Any]:
    """For the same page: the drivers that it borrows from, or in a sentence why there is none."""
    found = Siblings()
    its = found.of(driver.name)
    return {"siblings": its, "why": "" if its else found.why_none(driver.name)}


@register.simple_tag
def driver_redundancy(driver: Driver) -> list[redundancy.Row]:
    """For the same page: its streams, with who stores their fragments."""
    return redundancy.of_driver(driver)


@register.simple_tag
def tier2_writes(node: Node) -> int | None:
    """For the page of a node: what it may write to its store, in bytes per second; None: any rate."""
    return Budgets().of_writes(node.name, effective_rules(None).moves_percent)


@register.simple_tag
def part_of(count: int, total: int) -> SafeString:
    """A part as a length, and in percent."""
    part = min(1.0, count / total) if total else 0.0
    return format_html("{}{} %", bar(part), f"{100 * part:.1f}")


@register.simple_tag
def path(tier: int | str | None) -> SafeString:
    """A path by shape, colour and word."""
    name = Tier(tier).name.lower() if isinstance(tier, int) else tier or ""
    return status(LOOKS.get(name, "off"), NO_PATH.get(name, name))
