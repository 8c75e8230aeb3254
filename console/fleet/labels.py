"""What may be a label of a node. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

LABELS_MAX: Final = 32
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?")
_VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?|")


class NotALabel(ValueError):
    """Why not, in a sentence."""


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises NotALabel."""
    if len(labels) > LABELS_MAX:
        raise NotALabel(f"A node has at most {LABELS_MAX} labels.")
    for name, value in labels.items():
        if not _NAME.fullmatch(name):
            raise NotALabel(f"“{name}” is no name of a label: lower-case letters, digits, . _ / -")
        if not _VALUE.fullmatch(value):
            raise NotALabel(f"“{value}” is no value of label {name}: letters, digits, . _ -")
