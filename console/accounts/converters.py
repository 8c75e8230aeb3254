"""User names in addresses: what can't be one is no address of ours."""

from __future__ import annotations

from django.urls.converters import StringConverter

from console.accounts.models import NAME


class UserNameConverter(StringConverter):
    regex = NAME.strip("^$")
