"""Prompts as tokens: tokenizers, chat templates, and what is kept of conversations.

tokenizer = load(folder)                                   # once for each model
texts = TokenService()                                     # one in a brain
tokens = await texts.chat(tokenizer, org, Chat(messages))  # None: it has images
tokens.ids, tokens.prompt(keys)                            # for engines; for maps
"""

from __future__ import annotations

from inference_brain.tokens.errors import (
    BadMessages,
    BadTemplate,
    BadTokenizer,
    TemplateRefused,
    TokenizerStopped,
    TokensError,
    TooLong,
)
from inference_brain.tokens.messages import Chat
from inference_brain.tokens.service import TokenService
from inference_brain.tokens.tokenizer import PromptTokenizer, load
from inference_brain.tokens.uploaded import UploadedTokenizer, is_uploaded

__all__ = [
    "BadMessages",
    "BadTemplate",
    "BadTokenizer",
    "Chat",
    "PromptTokenizer",
    "TemplateRefused",
    "TokenService",
    "TokenizerStopped",
    "TokensError",
    "TooLong",
    "UploadedTokenizer",
    "is_uploaded",
    "load",
]
