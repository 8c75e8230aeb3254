"""The file of contexts, and addresses that a token is sent to."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from console.ctl import contexts
from console.ctl.failures import Usage


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (contexts.ADDRESS, contexts.TOKEN, contexts.CA, contexts.CONTEXT):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_file_that_others_may_read_is_refused(home: Path) -> None:
    contexts.store("a", contexts.made("https://a.example", "tgr_x", None))
    path = home / "tidegate" / "contexts.json"
    path.chmod(0o640)
    with pytest.raises(Usage, match=f"chmod 600 {path}"):
        contexts.read()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contexts": {"a": {"address": 7}}}', "{" * 100])
def test_a_broken_file_is_said_to_be_broken(home: Path, text: str) -> None:
    path = home / "tidegate" / "contexts.json"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(Usage, match="is not a file of contexts"):
        contexts.read()


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Usage, match="Log in first"):
        contexts.chosen(None)
    for name in ("a", "b"):
        contexts.store(name, contexts.made(f"https://{name}.example", "tgr_x", None))
    assert contexts.chosen(None).address == "https://b.example"
    monkeypatch.setenv(contexts.ADDRESS, "https://c.example")
    with pytest.raises(Usage, match="TIDEGATE_TOKEN is not"):
        contexts.chosen(None)
    monkeypatch.setenv(contexts.TOKEN, "tgw_y")
    assert contexts.chosen(None).address == "https://c.example"
    assert contexts.chosen("a").address == "https://a.example"
    monkeypatch.setenv(contexts.CONTEXT, "a")
    assert contexts.chosen(None).address == "https://a.example"


def test_removing_the_current_one_leaves_none_current() -> None:
    contexts.store("a", contexts.made("https://a.example", "tgr_x", None))
    contexts.remove("a")
    assert contexts.read() == contexts.Contexts()
    with pytest.raises(Usage, match="There are: none"):
        contexts.use("a")


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("https://tidegate.example", True),
        ("tidegate.example:8443", True),
        ("https://tidegate.example/behind/a/path/", True),
        ("http://127.0.0.1:8400", True),
        ("http://localhost:8400", True),
        ("http://[::1]:8400", True),
        ("http://tidegate.example", False),
        ("http://127.0.0.1.example", False),
        ("ftp://tidegate.example", False),
        ("https://", False),
        ("https://me:secret@tidegate.example", False),
        ("https://tidegate.example?q", False),
        ("https://tidegate.example:99999", False),
        ("https://tidegate..example", False),
        ("https://[::1", False),
        ("https://tidegate\u2028.example", False),
    ],
)
def test_a_token_goes_only_where_nobody_can_read_it(address: str, is_allowed: bool) -> None:  # noqa: FBT001
    if not is_allowed:
        with pytest.raises(Usage):
            contexts.made(address, "tgr_x", None)
        return
    assert "://" in contexts.made(address, "tgr_x", None).address


def test_plain_http_is_for_who_asks_for_it() -> None:
    made = contexts.made("http://tidegate.example", "tgr_x", None, plain=True)
    assert made.address == "http://tidegate.example"


@pytest.mark.parametrize(
    ("pem", "said"),
    [(b"", "no certificates in PEM"), (b"x" * (1 << 21), "larger than 1 MiB"), (b"\xff", "in PEM")],
)
def test_what_is_no_authority_is_refused(tmp_path: Path, pem: bytes, said: str) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(pem)
    with pytest.raises(Usage, match=said):
        contexts.made("https://tidegate.example", "tgr_x", str(path))


def test_a_long_list_of_authorities_is_stored_and_read(tmp_path: Path) -> None:
    made = contexts.made("https://a.example", "tgr_x", None)
    contexts.store("a", contexts.Context(made.address, made.token, "x" * 219_000))
    found = contexts.chosen("a")
    assert len(found.authorities) == 219_000
    with pytest.raises(Usage, match="are no certificates"):
        found.verify()


def test_without_tls_no_authorities_are_read_and_nobody_is_trusted() -> None:
    verify = contexts.Context("http://a.example", "tgr_x", "no certificates").verify()
    assert (verify.get_ca_certs(), verify.verify_mode) == ([], ssl.CERT_REQUIRED)


@pytest.mark.parametrize("token", ["", "two words", "tgr_\n", "tgr_\x7f", "tgr_ü"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(Usage, match="not a token"):
        contexts.made("https://tidegate.example", token, None)
