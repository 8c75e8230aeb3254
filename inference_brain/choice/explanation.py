"""Why this replica, for people. Estimates and what became of a request are in its record
(`inference_brain/decisions.py`)."""

from __future__ import annotations

from inference_brain.choice.choice import Choice, Why


def sentence(choice: Choice) -> str:
    """The choice in a sentence; in two where tokens are borrowed."""
    of = choice.chosen
    if not of.sibling:
        return _why(choice)
    return f"{_why(choice)} It borrows {of.borrowed_tokens:,} tokens of the prompt from {of.sibling}."


def _why(choice: Choice) -> str:
    of, name = choice.chosen, choice.replica
    match choice.why:
        case Why.ONLY:
            return f"{name} was the only candidate."
        case Why.LEAST:
            second = next(one for one in choice.estimates if one.name != name)
            return (
                f"The first token was expected after {of.seconds:.3f} s at {name}, and after "
                f"{second.seconds:.3f} s at {second.name}, the next best."
            )
        case Why.AFFINITY:
            return (
                f"Several replicas were expected to take {of.seconds:.3f} s, within "
                f"{of.noise_seconds:.3f} s; the prefix belongs to {name}."
            )
        case Why.TRIAL:
            return f"Little is known of {name} yet, so it was tried."
        case Why.FALLBACK:
            return f"Estimates are off, so prefixes stay where they belong: here {name}."
