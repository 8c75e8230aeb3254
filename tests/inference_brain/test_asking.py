"""What is known of a request on its way."""

from __future__ import annotations

from inference_brain.api.requests import Completion
from inference_brain.asking import AFFINITY_COLUMNS, Asking, affinity
from inference_brain.desired import OrgSpec, ServedModel
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace

SECRET = b"s" * 32
KEYS = Keys("acme", SECRET, Namespace("m", "", "", ""))


def asking(tokens: list[int]) -> Asking:
    """For replicas without a driver."""
    request = Completion(model="m", prompt=tokens)
    org, model = OrgSpec("acme", SECRET, ()), ServedModel("m", 100_000, ())
    return Asking("a", org, model, request, 0.0, 0.0, guess=KEYS.prompt(tokens))


def test_prompts_with_the_same_first_columns_belong_together_without_drivers() -> None:
    first = [*range(AFFINITY_COLUMNS * COLUMN_TOKENS)]
    one, other = affinity(asking([*first, *[1] * 900])), affinity(asking([*first, *[2] * 900]))
    assert one == other
    assert one.startswith(KEYS.tag)
    assert affinity(asking([3, *first])) not in (b"", one)
    assert affinity(asking(first[: COLUMN_TOKENS - 1])) == b""
