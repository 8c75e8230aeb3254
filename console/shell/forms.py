from __future__ import annotations

from django.forms.renderers import TemplatesSetting


class Renderer(TemplatesSetting):
    """Every field looks the same: label, control, help, error, tied together for screen readers."""

    form_template_name = "forms/form.html"
    field_template_name = "forms/field.html"
