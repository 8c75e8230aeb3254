"""Names of the fleet in addresses: what can't be one is no address of ours."""

from __future__ import annotations

from django.urls.converters import StringConverter

from console.fleet.models import NAME


class ThingNameConverter(StringConverter):
    regex = NAME.strip("^$")
