"""What an attack is given, and where it says what it did and what it broke."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.hostile.scene import Scene


@dataclass
class Deeds:
    """`broken` are promises that did not hold, in sentences; `counts` and `sent_bytes` what was done, so
    that an attack that did nothing is seen."""

    broken: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


@dataclass
class Ground:
    """`ends` is set when the attack is to stop."""

    scene: Scene
    chosen: random.Random
    ends: threading.Event
    deeds: Deeds = field(default_factory=Deeds)

    def did(self, what: str, count: int = 1) -> None:
        self.deeds.counts[what] += count

    def sent(self, what: str, count: int) -> None:
        """So many bytes."""
        self.deeds.sent_bytes[what] += count

    def breaks(self, sentence: str) -> None:
        if sentence not in self.deeds.broken:
            self.deeds.broken.append(sentence)


Attack = Callable[[Ground], None]


def work(attack: Attack, scene: Scene, seed: str, ends: threading.Event) -> Deeds:
    """Attack until told to end."""
    ground = Ground(scene, random.Random(seed), ends)
    attack(ground)
    return ground.deeds
