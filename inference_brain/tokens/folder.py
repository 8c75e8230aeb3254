"""Reads a model's folder: its tokenizer, its special tokens and its chat templates.

Templates are in `chat_template.jinja`, with further ones in `additional_chat_templates/NAME.jinja`, or
in `tokenizer_config.json`, as one string or as a list of several with names; files go first. Special
tokens are in `tokenizer_config.json`, or in `special_tokens_map.json` of older folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from inference_brain.tokens.errors import BadTokenizer
from telemetry.decoder import Limits, Malformed, decode, excerpt

FILE_BYTES_MAX: Final = 256 << 20
TEMPLATES_MAX: Final = 64
_CONFIG: Final = Limits(64 << 20, 1 << 20, 64)
# `int(1e30)`: what transformers writes as `model_max_length` where there is none.
_UNLIMITED: Final = b"1000000000000000019884624838656"
# Also tokens of a model of its own, such as `image_token`, may be named by templates.
_SUFFIX: Final = "_token"
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What was read. `special_tokens`: by the names that templates use. `adds`: whether a completion's
    prompt gets a token at its beginning and its end; None: as the tokenizer says."""

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    splits_special_tokens: bool = False
    adds: tuple[bool, bool] | None = None


def read(folder: Path) -> ModelFolder:
    """Raises BadTokenizer."""
    raw = _bytes(folder / "tokenizer.json")
    if raw is None:
        raise BadTokenizer(f"There is no tokenizer.json in {folder}")
    config = _object(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_str(raw.decode())
    except Exception as error:  # all that the library raises is Exception itself
        raise BadTokenizer(
            f"{folder / 'tokenizer.json'} is no tokenizer: {excerpt(str(error))}"
        ) from error
    legacy = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json")
    named = {
        name: text
        for name, value in {**config, **legacy, **_extra(config)}.items()
        if name.endswith(_SUFFIX) and (text := _content(value)) is not None
    }
    _add(tokenizer, config, {**config, **legacy}, named)
    adds = None
    if "add_bos_token" in config or "add_eos_token" in config:
        adds = (bool(config.get("add_bos_token")), bool(config.get("add_eos_token")))
    return ModelFolder(
        tokenizer,
        dict(_templates(folder, config)),
        named,
        bool(config.get("split_special_tokens")),
        adds,
    )


def _add(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    lists: Mapping[str, Any],
    named: Mapping[str, str],
) -> None:
    """Tokens that the configuration has and the tokenizer lacks."""
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: dict[str, AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for _, value in sorted(decoder.items(), key=lambda item: _number(item[0])):
            if isinstance(value, Mapping) and isinstance(value.get("content"), str):
                wanted[value["content"]] = _added(value)
    for text in (*named.values(), *_listed(lists)):
        wanted.setdefault(text, AddedToken(text, special=True))
    if missing := [token for text, token in wanted.items() if text not in there]:
        tokenizer.add_tokens(missing)


def _added(value: Mapping[str, Any]) -> AddedToken:
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    flags = {name: bool(value[name]) for name in names if name in value}
    return AddedToken(value["content"], **flags)


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _LISTS:
        value = config.get(name)
        if isinstance(value, list):
            yield from (text for one in value if (text := _content(one)) is not None)


def _extra(config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get("extra_special_tokens")
    return value if isinstance(value, Mapping) else {}


def _content(value: object) -> str | None:
    """Of a token, as a string or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    raw = _bytes(folder / "chat_template.jinja")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))[:TEMPLATES_MAX]
    if raw is not None or more:
        if raw is not None:
            yield "default", _text(raw, folder / "chat_template.jinja")
        for path in more:
            yield path.stem, _text(_bytes(path) or b"", path)
        return
    written = config.get("chat_template")
    if isinstance(written, str):
        yield "default", written
    elif isinstance(written, list):
        for one in written[:TEMPLATES_MAX]:
            if not isinstance(one, Mapping) or not isinstance(one.get("template"), str):
                raise BadTokenizer(f"A chat template in {folder / 'tokenizer_config.json'} has no text")
            yield str(one.get("name")), one["template"]


def _object(path: Path) -> dict[str, Any]:
    raw = _bytes(path)
    if raw is None:
        return {}
    try:
        return decode(raw.replace(_UNLIMITED, b"null"), dict[str, Any], _CONFIG)
    except Malformed as error:
        raise BadTokenizer(f"{path} can't be read: {error}") from error


def _bytes(path: Path) -> bytes | None:
    """None if there is no such file."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadTokenizer(f"{path} has more than {FILE_BYTES_MAX} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadTokenizer(f"{path} can't be read: {error.strerror}") from error


def _text(raw: bytes, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadTokenizer(f"{path} is not UTF-8") from None


def _number(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else 0
