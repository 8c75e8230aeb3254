from __future__ import annotations

from django.apps import AppConfig


class AuthorityConfig(AppConfig):
    name = "console.authority"
