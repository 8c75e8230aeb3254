"""Prompts for engines."""

from __future__ import annotations

import random


def prompt(seed: int, tokens: int = 1000) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 512) for _ in range(tokens)]
