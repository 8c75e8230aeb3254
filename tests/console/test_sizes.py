from __future__ import annotations

import pytest

from console.sizes import size


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_572_864, "1.5 MiB"),
        (1023 << 20, "1023 MiB"),
        (45_300_000_000, "42.2 GiB"),
        (-(3 << 40), "-3 TiB"),
        (0.5, "0.5 B"),
    ],
)
def test_bytes_have_three_digits_and_powers_of_1024(count: float, words: str) -> None:
    assert size(count) == words
