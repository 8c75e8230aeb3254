from __future__ import annotations

from typing import Any

from django import forms
from django.forms.renderers import TemplatesSetting


class Renderer(TemplatesSetting):
    """Every field looks the same: label, control, help, error, tied together for screen readers."""

    form_template_name = "forms/form.html"
    field_template_name = "forms/field.html"


class LinesField(forms.CharField):
    """Text of several lines. Browsers send each line's end as two characters, and count it as one of
    `max_length` while people type."""

    widget = forms.Textarea

    def to_python(self, value: Any) -> str | None:
        text = value.replace("\r\n", "\n") if isinstance(value, str) else value
        return super().to_python(text)
