"""What `manage.py check` looks at beside Django's own checks. `prepare` runs all of them before it does
anything, so that no release is begun in which something can't be loaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.core.checks import CheckMessage, Tags, register

from console.api.middleware import ADDRESSES
from console.shell.view_modules import named_views


@register(Tags.urls)
def check_views(**_: Any) -> list[CheckMessage]:
    """All pages and the API can be loaded. Processes load them late, so that no start fails without one.
    Raises what the import raises: its traceback says where."""
    for view in named_views():
        view.load()
    import_module(ADDRESSES)
    return []
