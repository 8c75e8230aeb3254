"""What of a model's configuration decides what KV is, beside its weights and its layout: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

# By which way of telling positions they are told otherwise by an engine for longer prompts.
_BY_LENGTH: Final = frozenset({"dynamic", "longrope", "su"})
_ORIGINAL: Final = "original_max_position_embeddings"
# Where weights were found, and with which program they were stored.
_NAMES: Final = frozenset({"_name_or_path", "_commit_hash", "name_or_path", "transformers_version"})


def depend_on_length(config: object) -> bool:
    """Whether an engine that is started for longer prompts may tell all positions otherwise, so that
    keys of both are not the same. `config`: of the model, as in its config.json."""
    if isinstance(config, Mapping):
        kinds = {str(config.get("rope_type")), str(config.get("type"))}  # a stranger's: of any type
        is_by_length = config.get(_ORIGINAL) is not None or bool(kinds & _BY_LENGTH)
        return is_by_length or any(depend_on_length(each) for each in config.values())
    return isinstance(config, list | tuple) and any(depend_on_length(each) for each in config)


def deciding(config: object, besides: Collection[str] = ()) -> object:
    """The configuration without what says only where it came from, and without the fields `besides`. Its
    keys are text."""
    if isinstance(config, Mapping):
        kept = {key: each for key, each in config.items() if key not in _NAMES and key not in besides}
        return {str(key): deciding(each, besides) for key, each in kept.items()}
    if isinstance(config, list | tuple):
        return [deciding(each, besides) for each in config]
    if isinstance(config, set | frozenset):  # in another order in each process
        return sorted(str(deciding(each, besides)) for each in config)
    if config is None or isinstance(config, str | int | float):
        return config
    # A type of numbers says its name; what other objects say may be another text in each process.
    said = str(config)
    return type(config).__name__ if " at 0x" in said else said
