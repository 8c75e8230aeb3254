"""Changes in sentences, as their events tell them. Pure."""

from __future__ import annotations

import re
from typing import Final

# By action, with the name of the object. Where more is to be said, `record` is given the sentence.
SENTENCES: Final = {
    "alert.acknowledge": "Alert {} was acknowledged.",
    "alert.assign": "The assignee of alert {} was changed.",
    "alert.comment": "Alert {} has a new comment.",
    "alert.unacknowledge": "Alert {} is no longer acknowledged.",
    "alerts.thresholds": "Thresholds of {} were changed.",
    "bucket.add": "Credentials for {} were added.",
    "bucket.delete": "Credentials for {} were deleted.",
    "bucket.replace": "Credentials for {} were replaced.",
    "channel.create": "Channel {} was created.",
    "channel.delete": "Channel {} was deleted.",
    "channel.test": "A test notification was sent to channel {}.",
    "channel.update": "Channel {} was changed.",
    "handover.note": "A hand-over note was written: {}",
    "join_token.create": "Join token {} was created.",
    "join_token.revoke": "Join token {} was revoked.",
    "limits.set": "Limits of {} were changed.",
    "model.add": "Model {} was added.",
    "model.remove": "Model {} was removed.",
    "model.update": "Model {} was changed.",
    "node.drain_store": "A former store of {} is being emptied.",
    "org.create": "Org {} was created.",
    "org.delete": "Org {} was deleted.",
    "org.purge": "A purge of {} was started.",
    "org.update": "Org {} was changed.",
    "policy.caller_add": "API key {} was created.",
    "policy.caller_remove": "API key {} was removed.",
    "policy.cluster": "{} of policies were changed.",
    "policy.schedule": "A policy of {} was scheduled.",
    "policy.set": "Policy of {} was changed.",
    "policy.unschedule": "A scheduled policy of {} was cancelled.",
    "replica.add": "Replica {} was added.",
    "replica.remove": "Replica {} was removed.",
    "replica.update": "Replica {} was changed.",
    "silence.create": "Silence {} was created.",
    "silence.end": "Silence {} was ended.",
    "tokenizer.delete": "Tokenizer {} was deleted.",
    "tokenizer.upload": "Tokenizer {} was uploaded.",
}


_OTHER_WORDS: Final = {
    "handover.note": "Hand-over: note",
    "policy.caller_add": "API key: create",
    "policy.caller_remove": "API key: remove",
    "policy.cluster": "Policy: default and limits",
}


def words_of(action: str) -> str:
    """What pages call an action: `user.change_password` is *User: change password*."""
    kind, _, done = action.replace("_", " ").replace("-", " ").partition(".")
    words = f"{kind.capitalize()}: {done.replace('.', ' ')}" if done else kind.capitalize()
    return _OTHER_WORDS.get(action, words)


def pattern_of(words: str) -> str:
    """A regular expression of the actions that pages call so; their letters may be of any size."""
    for action, other in _OTHER_WORDS.items():
        if other.lower() == words.lower():
            return f"^{re.escape(action)}$"
    kind, _, done = words.lower().partition(": ")
    parts = [re.escape(one).replace(r"\ ", "[-_.]") for one in (kind, done) if one]
    return "^" + r"\.".join(parts) + "$"


def sentence_of(action: str, name: str) -> str:
    """Raises KeyError for an action without one."""
    return SENTENCES[action].format(name)
