"""Create tables in migrations without rendering the models of other tables anew."""

from __future__ import annotations

from typing import Any

from django.db import migrations
from django.db.migrations.state import ProjectState


class CreateModel(migrations.CreateModel):
    """Django's `CreateModel` renders all models that are related to the new one, and those related to
    them: a third of the processor time of a first migration. A new table changes none of them.

    In a copied state, which an upgrade begins with, models look for their relations in the registry that
    they were rendered in, where the new one is not. Django's way is taken there."""

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        rendered: Any = state.__dict__.get("apps")
        if rendered is None or _is_copied(rendered):
            super().state_forwards(app_label, state)
            return
        del state.__dict__["apps"]
        super().state_forwards(app_label, state)
        state.__dict__["apps"] = rendered
        rendered.render_multiple([state.models[app_label, self.name_lower]])


def _is_copied(rendered: Any) -> bool:
    return any(model._meta.apps is not rendered for model in rendered.get_models())  # noqa: SLF001
