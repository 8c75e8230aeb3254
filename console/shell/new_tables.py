"""Create tables in migrations without rendering the models of other tables anew."""

from __future__ import annotations

from typing import Any

from django.db import migrations
from django.db.migrations.state import ProjectState


class CreateModel(migrations.CreateModel):
    """Django's `CreateModel` renders all models that are related to the new one, and those related to
    them: a third of the processor time of a first migration. A new table changes none of them."""

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        rendered: Any = state.__dict__.pop("apps", None)
        super().state_forwards(app_label, state)
        if rendered is not None:
            state.__dict__["apps"] = rendered
            rendered.render_multiple([state.models[app_label, self.name_lower]])
