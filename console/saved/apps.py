from __future__ import annotations

from django.apps import AppConfig


class SavedConfig(AppConfig):
    name = "console.saved"
