"""Uploads of tokenizers: what is taken, what is refused, and where it is then."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.demo import tokenizer as demo
from inference_brain.tokens import Chat, is_uploaded, load
from tests.workload_manager.tokenizers.archives import (
    FILES,
    FORMS,
    TEMPLATE,
    gzipped,
    link,
    tarred,
    tokenizer_json,
    zipped,
)
from workload_manager.tokenizers import (
    BadArchive,
    NotStored,
    TokenizerStore,
    archive,
    families,
    family,
)

JSON = FILES["tokenizer.json"]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_an_archive_are_the_same_tokenizer(tmp_path: Path, form: str) -> None:
    store = TokenizerStore(tmp_path)
    sha256 = store.add(FORMS[form](FILES))
    assert sha256 == archive.digest(FILES)
    folder = store.folder(sha256)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert is_uploaded(folder), "a brain would tokenize in its own process"
    assert load(folder).render(Chat([{"role": "user", "content": "Hi"}])) == "<user>Hi"
    assert list(store) == [sha256]
    assert archive.read(store.archive(sha256)) == FILES
    store.remove(sha256)
    with pytest.raises(NotStored):
        store.folder(sha256)


ENDLESS = b"{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}"


def test_no_more_is_decompressed_than_a_tokenizer_may_have() -> None:
    for upload, sentence in (
        (zipped({"tokenizer.json": bytes(archive.BYTES_MAX["tokenizer.json"] + 1)}), "128 MiB"),
        (gzip.compress(bytes(archive.TOTAL_BYTES_MAX + 1), 1), "more than 147 MiB in it"),
    ):
        with pytest.raises(BadArchive, match=sentence):
            archive.read(upload)


def test_an_archive_that_has_a_file_in_many_folders_is_not_decompressed_again_and_again() -> None:
    many = {f"d{number}/tokenizer.json": bytes(1 << 20) for number in range(archive.ENTRIES_MAX)}
    damaged = bytearray(zipped(many))
    second = damaged.index(b"PK\x03\x04", 4)
    damaged[second + 60 : second + 90] = bytes(30)  # who reads it finds that out first
    with pytest.raises(BadArchive, match=r"has tokenizer\.json twice"):
        archive.read(bytes(damaged))


def test_a_zip_with_very_many_entries_is_refused_before_they_are_read() -> None:
    entry = zipped(FILES)[zipped(FILES).index(b"PK\x01\x02") :]
    with pytest.raises(BadArchive, match="more than 32 entries"):
        archive.read(b"PK\x03\x04" + entry * 1000)


def test_a_tar_with_a_long_map_of_holes_or_long_headers_is_refused_before_they_are_read() -> None:
    holes = b"100\n" + b"1\n" * 100  # of millions it takes minutes
    said = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5"}
    for headers, sentence in (
        (said, "is no plain file"),
        ({"comment": "x" * (archive.HEADER_BYTES_MAX + 1)}, "a header with more than 64 KiB"),
    ):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as opened:
            told = tarfile.TarInfo("tokenizer.json")
            told.size, told.pax_headers = len(holes), headers
            opened.addfile(told, io.BytesIO(holes))
        with pytest.raises(BadArchive, match=sentence) as refused:
            archive.read(made.getvalue())
        assert "tokenizer.json" not in str(refused.value), "its entry was made"


def test_an_upload_is_checked_also_where_somebody_else_has_uploaded_it(tmp_path: Path) -> None:
    """It takes as long as the first time: nobody learns from that what others have."""
    broken = {"tokenizer.json": b"{}"}
    folder = tmp_path / "sha256" / archive.digest(broken)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(BadArchive, match="is no tokenizer"):
        TokenizerStore(tmp_path).add(tarred(broken))


def encrypted() -> bytes:
    raw = bytearray(zipped(FILES))
    for place in (raw.index(b"PK\x03\x04") + 6, raw.index(b"PK\x01\x02") + 8):
        raw[place] |= 1
    return bytes(raw)


@pytest.mark.parametrize(
    ("upload", "sentence"),
    [
        (b"", "no tar, gzipped tar or zip"),
        (b"x" * 1000, "no tar, gzipped tar or zip"),
        (gzip.compress(b"x" * 1000), "no tar, gzipped tar or zip"),
        (gzipped(FILES)[:-30], "is cut off"),
        (tarred(FILES)[:3000], "damaged"),
        (zipped(FILES)[:-30], "damaged"),
        (encrypted(), "is encrypted"),
        (tarred({"chat_template.jinja": b""}), "has no tokenizer.json"),
        (tarred({**FILES, "model.safetensors": b""}), "has model.safetensors; it may have"),
        (tarred({**FILES, "tokenizer.py": b""}), "has tokenizer.py"),
        (zipped({**FILES, "../tokenizer_config.json": b"{}"}), "is a path out of the archive"),
        (tarred({**FILES, "/etc/tokenizer_config.json": b"{}"}), "is a path out of the archive"),
        (tarred({**FILES, "a/tokenizer_config.json": b"{}"}), "all in one folder"),
        (tarred({"a/b/tokenizer.json": JSON}), "all in one folder"),
        (tarred({**FILES, "./tokenizer.json": JSON}), "has tokenizer.json twice"),
        (tarred(FILES, link("tokenizer_config.json", tarfile.SYMTYPE, "/etc/passwd")), "is no plain"),
        (tarred(FILES, link("tokenizer_config.json", tarfile.LNKTYPE, "tokenizer.json")), "is no plain"),
        (tarred(FILES, link("tokenizer_config.json", tarfile.CHRTYPE, "")), "is no plain file"),
        (tarred(FILES, *(link(f"d{n}", tarfile.DIRTYPE, "") for n in range(40))), "more than 32"),
        (tarred({"tokenizer.json": b"{}"}), "is no tokenizer"),
        (tarred({**FILES, "tokenizer_config.json": b"[]"}), "tokenizer_config.json can't be read"),
        (tarred({**FILES, "chat_template.jinja": b"{% for"}), "is no template"),
        (tarred({**FILES, "chat_template.jinja": b"\xff"}), "is not UTF-8"),
        (
            tarred({**FILES, "chat_template.jinja": ENDLESS}),
            "takes too long",
        ),
    ],
    ids=range(24),
)
def test_what_is_no_tokenizer_is_refused_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, upload: bytes, sentence: str
) -> None:
    with pytest.raises(BadArchive) as refusal:
        TokenizerStore(tmp_path).add(upload)
    assert sentence in str(refusal.value)
    assert str(tmp_path) not in str(refusal.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_template_that_reaches_for_more_than_messages_gets_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "was-here"
    reach = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ open('{mark}', 'w') }}}}"
    files = {**FILES, "chat_template.jinja": reach.encode()}
    store = TokenizerStore(tmp_path / "store")
    sha256 = store.add(tarred(files))  # it renders nothing, which a template may
    with pytest.raises(ValueError, match=r"unsafe|undefined|not safe|can't"):
        load(store.folder(sha256)).render(Chat([{"role": "user", "content": "Hi"}]))
    assert not mark.exists()


@given(st.binary(max_size=300), st.data())
def test_any_bytes_are_files_or_a_sentence(tail: bytes, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([make(SMALL) for make in FORMS.values()])))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    for given_bytes in (bytes(raw), tail, bytes(raw) + tail):
        try:
            files = archive.read(given_bytes)
        except BadArchive:
            continue
        assert files.keys() <= archive.BYTES_MAX.keys()
        assert archive.read(archive.written(files)) == files


SMALL = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}"}


@given(
    st.dictionaries(st.sampled_from(sorted(archive.BYTES_MAX)), st.binary(max_size=50), min_size=1),
    st.dictionaries(st.sampled_from(sorted(archive.BYTES_MAX)), st.binary(max_size=50), min_size=1),
)
def test_the_hash_is_of_names_and_bytes(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (archive.digest(one) == archive.digest(other)) == (one == other)


def _add(folder: str, upload: bytes) -> str:
    return TokenizerStore(Path(folder)).add(upload)


def test_processes_that_add_the_same_at_once_all_get_it(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(3) as pool:
        found = pool.starmap(_add, [(str(tmp_path), tarred(FILES))] * 3)
    assert set(found) == {archive.digest(FILES)}
    assert [path.name for path in (tmp_path / "sha256").iterdir()] == [archive.digest(FILES)]


def test_one_that_was_changed_on_the_disk_is_not_used_and_is_mended_by_the_next_upload(
    tmp_path: Path,
) -> None:
    store = TokenizerStore(tmp_path)
    sha256 = store.add(tarred(FILES))
    template = store.folder(sha256) / "chat_template.jinja"
    template.write_bytes(TEMPLATE + b"!")
    with pytest.raises(NotStored):
        store.folder(sha256)
    assert sha256 not in store
    assert store.add(tarred(FILES)) == sha256
    assert template.read_bytes() == TEMPLATE


def test_what_a_killed_process_has_left_is_removed_an_hour_later(tmp_path: Path) -> None:
    store = TokenizerStore(tmp_path)
    old, new = (tmp_path / "sha256" / f".{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_bytes(JSON)
    long_ago = old.stat().st_mtime - 4000
    os.utime(old, (long_ago, long_ago))
    store.add(tarred(FILES))
    assert (old.exists(), new.exists()) == (False, True)
    assert list(store) == [archive.digest(FILES)]


@pytest.mark.parametrize("name", ["", "x", "../" * 3, "A" * 64, "0" * 63])
def test_what_is_no_hash_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotStored, match="64 hexadecimal digits"):
        TokenizerStore(tmp_path).folder(name)


@pytest.fixture
def served() -> Iterator[Callable[[bytes], str]]:
    """Serves these bytes, and returns where."""
    content = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if content[0] else 404)
            self.end_headers()
            self.wfile.write(content[0])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()

    def serve(raw: bytes) -> str:
        content[0] = raw
        return f"http://127.0.0.1:{server.server_address[1]}/archive"

    yield serve
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_machine_fetches_it_and_believes_its_hash_only(
    tmp_path: Path, served: Callable[[bytes], str]
) -> None:
    here, there = TokenizerStore(tmp_path / "here"), TokenizerStore(tmp_path / "there")
    sha256 = here.add(gzipped(FILES))
    with pytest.raises(NotStored, match="status 404") as refused:
        there.fetch(served(b""), sha256)
    assert "/archive" not in str(refused.value), "who knows the address may read what is there"
    with pytest.raises(NotStored, match="is not the tokenizer") as refused:
        there.fetch(served(tarred({"tokenizer.json": tokenizer_json()})), sha256)
    with pytest.raises(BadArchive):
        there.fetch(served(b"nothing"), sha256)
    with ThreadPoolExecutor(3) as threads:
        url = served(here.archive(sha256))
        found = {one.result() for one in [threads.submit(there.fetch, url, sha256) for _ in range(3)]}
    assert found == {there.folder(sha256)}
    assert there.fetch(served(b""), sha256) == there.folder(sha256), "it is there"
    assert "/archive" not in str(refused.value)
    with pytest.raises(NotStored, match="can't be reached"):
        TokenizerStore(tmp_path / "third").fetch("http://127.0.0.1:9/x", sha256)


def test_families_are_folders_with_a_tokenizer(tmp_path: Path) -> None:
    assert families(tmp_path / "nowhere") == []
    demo.write(tmp_path / "demo")
    (tmp_path / "empty").mkdir()
    assert families(tmp_path) == ["demo"]
    assert load(family(tmp_path, "demo")).has_chat
    for name in ("empty", "..", "demo/../demo", ""):
        with pytest.raises(NotStored, match="there are: demo"):
            family(tmp_path, name)


def test_a_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("tokenizer.json", JSON)
        told = zipfile.ZipInfo("tokenizer_config.json")
        told.external_attr = 0o120777 << 16
        made.writestr(told, "/etc/passwd")
    with pytest.raises(BadArchive, match="is a link"):
        archive.read(path.read_bytes())


def test_a_tokenizer_may_have_its_template_in_its_configuration(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": TEMPLATE.decode(), "eos_token": "</s>"}).encode()
    files = {"tokenizer.json": JSON, "tokenizer_config.json": config}
    store = TokenizerStore(tmp_path)
    assert load(store.folder(store.add(zipped(files)))).has_chat
