"""Archives of tokenizers, good ones and others."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Final

from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE: Final = b"{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def tokenizer_json() -> bytes:
    vocabulary = {symbol: number for number, symbol in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made.to_str().encode()


FILES: Final = {"tokenizer.json": tokenizer_json(), "chat_template.jinja": TEMPLATE}


def tarred(files: Mapping[str, bytes], *more: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, raw in files.items():
            told = tarfile.TarInfo(name)
            told.size = len(raw)
            archive.addfile(told, io.BytesIO(raw))
        for told in more:
            archive.addfile(told)
    return made.getvalue()


def gzipped(files: Mapping[str, bytes]) -> bytes:
    return gzip.compress(tarred(files))


def zipped(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in files.items():
            archive.writestr(name, raw)
    return made.getvalue()


def stored(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.mkdir("folder")
        for name, raw in files.items():
            archive.writestr(f"folder/{name}", raw)
    return made.getvalue()


def in_a_folder(files: Mapping[str, bytes]) -> bytes:
    return tarred({f"./my-model/{name}": raw for name, raw in files.items()})


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    told = tarfile.TarInfo(name)
    told.type, told.linkname = kind, target
    return told


FORMS: Final[Mapping[str, Callable[[Mapping[str, bytes]], bytes]]] = {
    "tar": tarred,
    "gzip": gzipped,
    "zip": zipped,
    "stored": stored,
    "folder": in_a_folder,
}
