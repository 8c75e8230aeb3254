"""What can be wrong with a model's folder, its template or a prompt: a sentence each."""

from __future__ import annotations

from typing import Final

FAR: Final = 2  # times as many tokens as a model takes: how many more they are is not counted
HALF_A_CHARACTER = "The prompt has half a character, which is no text"


class TokensError(ValueError):
    """Why there are no tokens, in a sentence that callers may be shown."""


class BadTokenizer(TokensError):
    """The model's folder can't be used."""


class BadTemplate(TokensError):
    """The model has no chat template, or not this one, or it is no template."""


class TemplateRefused(TokensError):
    """The template does not accept these messages."""


class TemplateTooCostly(TokensError):
    """Rendering took more time or made more text than is allowed."""


class BadMessages(TokensError):
    """The messages are none that a template could be given."""


class TooLong(TokensError):
    """The prompt has more text than any prompt of this model."""


def far_too_long(tokens_max: int) -> TooLong:
    return TooLong(
        f"This model's maximum context length is {tokens_max} tokens, and the prompt has far more"
    )


class TokenizerStopped(TokensError):
    """The process of an uploaded tokenizer took too much time or memory, and was ended."""


class TokenizerBusy(TokensError):
    """The process of an uploaded tokenizer has too much to do for others."""
