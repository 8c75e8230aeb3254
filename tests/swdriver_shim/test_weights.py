"""Names of weights and of adapters: other ones never have an equal name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.lora import TICK_NS, AdapterNames
from swdriver_shim.adapters.weights import PIECE_BYTES, READS_MAX, process_began, weights_of
from tests.live import wait_until

WHOLE_BYTES = READS_MAX * PIECE_BYTES  # larger files are sampled


def adapter(folder: Path, content: bytes) -> Any:
    """With the times that files have in images that are built reproducibly."""
    folder.mkdir(exist_ok=True)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))
    return SimpleNamespace(lora_name="poems", lora_path=str(folder))


def names_from_now(folder: Path) -> AdapterNames:
    """Of an engine that starts when these files are there."""
    last = max(file.stat().st_ctime_ns for file in folder.iterdir())
    wait_until("a change from now on has a later time", lambda: time.time_ns() - TICK_NS > last)
    return AdapterNames()


def test_an_adapter_that_comes_later_has_a_name_where_files_are_never_changed(tmp_path: Path) -> None:
    names = AdapterNames(are_fixed=True)
    one = adapter(tmp_path / "a", b"one")
    name = names.name(one)
    assert name
    assert AdapterNames().name(adapter(tmp_path / "b", b"two")) is None
    adapter(tmp_path / "a", b"two")
    assert names.name(one) is None, "it was said otherwise, and is seen"


def test_weights_that_are_changed_in_place_are_others(tmp_path: Path) -> None:
    directory = tmp_path / "llama"
    directory.mkdir()
    file = directory / "model.safetensors"
    file.write_bytes(b"old weights")
    before = weights_of(str(directory), None, None)
    assert before == weights_of(str(directory), None, None), "the next start finds what is there"
    assert before.name == "llama"
    file.write_bytes(b"new weights")  # as many bytes
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert weights_of(str(directory), None, None) != before
    assert weights_of("org/llama", None, "c0ffee") == NameSpec(name="org/llama", revision="c0ffee")
    assert weights_of("org/llama", "v1", None) == NameSpec(name="org/llama", revision="v1")


@pytest.mark.parametrize(
    "changed", ["llama-00001-of-00002.gguf", "llama-00002-of-00002.gguf", "mmproj-llama.gguf"]
)
def test_weights_in_a_file_that_is_replaced_are_others(tmp_path: Path, changed: str) -> None:
    file = tmp_path / "llama-00001-of-00002.gguf"
    for one in (file.name, "llama-00002-of-00002.gguf", "mmproj-llama.gguf", "qwen.gguf"):
        (tmp_path / one).write_bytes(b"old weights")
    before = weights_of(str(file), None, None)
    assert before.name == file.name
    assert before == weights_of(str(file), None, "c0ffee"), "a commit is of the configuration only"
    (tmp_path / "qwen.gguf").write_bytes(b"another model")
    assert before == weights_of(str(file), None, None)
    (tmp_path / changed).write_bytes(b"new weights")  # as many bytes
    os.utime(tmp_path / changed, ns=(0, file.stat().st_mtime_ns + 1))
    assert weights_of(str(file), None, None) != before


def test_a_link_to_another_file_is_to_other_weights(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    found = set[NameSpec]()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights of " + name[:1].encode())
        os.utime(tmp_path / name, ns=(0, 0))  # as in images that are built reproducibly
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        found.add(weights_of(str(link), None, None))
    assert len(found) == 2


@pytest.mark.parametrize("size", [1000, WHOLE_BYTES + 100_000])
def test_files_of_equal_sizes_and_times_are_told_apart_by_what_is_in_them(
    tmp_path: Path, size: int
) -> None:
    found = set[NameSpec]()
    for version in (1, 2):
        directory = tmp_path / f"v{version}" / "llama"
        directory.mkdir(parents=True)
        file = directory / "model.safetensors"
        file.write_bytes(b"head" * 100 + bytes([version]) * size)
        os.utime(file, ns=(0, 0))  # as in images that are built reproducibly
        found |= {weights_of(str(directory), None, None), weights_of(str(directory), None, None)}
    assert len(found) == 2


@pytest.mark.parametrize("what", ["file", "link"])
def test_weights_that_have_changed_since_the_engine_was_started_are_nobody_elses(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have loaded what was there before."""
    directory = tmp_path / "v1"
    directory.mkdir()
    file = directory / "model.safetensors"
    file.write_bytes(b"weights")
    path = tmp_path / "current"
    changed = file.stat().st_ctime_ns
    if what == "link":
        wait_until("a change from now on has a later time", lambda: time.time_ns() - TICK_NS > changed)
        path.symlink_to("v1")
        changed = path.lstat().st_ctime_ns
    else:
        path = directory
    usual = weights_of(str(path), None, None, loaded_after=changed + 1)
    assert not caplog.records
    assert usual == weights_of(str(path), None, None)
    other = weights_of(str(path), None, None, loaded_after=changed)
    assert other != usual
    assert "changed since this engine was started" in caplog.text
    shutil.copy2(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)  # nothing but its inode and that time tell it
    assert weights_of(str(path), None, None) == usual
    assert weights_of(str(path), None, None, loaded_after=changed) not in (usual, other)


NAMES: Final = """
import sys
from swdriver_shim.adapters.weights import weights_of
print(weights_of(sys.argv[1], None, None, loaded_after=1).revision)
"""


@pytest.mark.parametrize("is_same", [True, False])
def test_weights_that_have_changed_have_one_name_in_all_processes_of_an_engine(
    tmp_path: Path, *, is_same: bool
) -> None:
    """One looks up what another has stored. Another engine may have loaded others from these files."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = subprocess.run(
        [sys.executable, "-c", NAMES, str(tmp_path)],
        start_new_session=not is_same,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert (found == weights_of(str(tmp_path), None, None, loaded_after=1).revision) is is_same


def test_a_process_knows_when_it_was_started(tmp_path: Path) -> None:
    (tmp_path / "later").touch()
    assert 0 < process_began() < (tmp_path / "later").stat().st_ctime_ns


def test_adapters_of_equal_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    found = set[str | None]()
    for version in (1, 2):
        asked = adapter(tmp_path / f"v{version}", bytes([version]) * 5000)
        names = names_from_now(tmp_path / f"v{version}")
        found |= {names.name(asked), names.name(asked)}
    assert len(found) == 2
    assert None not in found


def test_an_adapter_that_is_changed_with_its_times_kept_has_no_name(tmp_path: Path) -> None:
    asked = adapter(tmp_path / "poems", b"one")
    names = names_from_now(tmp_path / "poems")
    assert names.name(asked)
    adapter(tmp_path / "poems", b"two")
    assert names.name(asked) is None


def test_an_adapter_in_whose_place_a_link_is_put_has_no_name(tmp_path: Path) -> None:
    asked = adapter(tmp_path / "poems", b"one")
    adapter(tmp_path / "other", b"two")
    names = names_from_now(tmp_path / "poems")
    assert names.name(asked)
    (tmp_path / "poems").rename(tmp_path / "old")
    (tmp_path / "poems").symlink_to("other")
    assert names.name(asked) is None
    (tmp_path / "poems").unlink()
    (tmp_path / "old").rename(tmp_path / "poems")
    assert names.name(asked), "it is the one that was loaded"


def test_an_adapter_behind_a_link_that_is_changed_has_no_name(tmp_path: Path) -> None:
    asked = adapter(tmp_path / "v1", b"one")
    (tmp_path / "poems").symlink_to("v1")
    asked.lora_path = str(tmp_path / "poems")
    changed = (tmp_path / "poems").lstat().st_ctime_ns
    wait_until("a change from now on has a later time", lambda: time.time_ns() - TICK_NS > changed)
    names = AdapterNames()
    assert names.name(asked)
    (tmp_path / "new").symlink_to("v1")
    (tmp_path / "new").replace(tmp_path / "poems")
    assert names.name(asked) is None


def test_an_adapter_that_was_changed_before_its_first_request_has_no_name(tmp_path: Path) -> None:
    """vLLM has loaded it at its start."""
    asked = adapter(tmp_path / "poems", b"one")
    names = names_from_now(tmp_path / "poems")
    adapter(tmp_path / "poems", b"two")
    assert names.name(asked) is None
    assert names_from_now(tmp_path / "poems").name(asked), "the next start loads what is there"
