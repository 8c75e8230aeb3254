"""A real vLLM under a real console: it joins, is given a job, and follows what people say there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect

from console.stack import endpoint
from swdriver_shim.policy import Rules, Tier2Rule
from tests.browser.chromium import chromium
from tests.browser.looking import WIDE, TakePicture, log_in
from tests.engines.governed import DRIVER, NODES, SESSION, Governed, Load, governed_stack
from tests.engines.prompts import prompt
from tests.engines.serving import Server, serving
from tests.engines.vllm_process import build
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

TALKS: Final = {"VLLM_LOGGING_LEVEL": "INFO"}
CACHED: Final = 960  # tokens of a prompt of `prompts.prompt`, in whole units
COLUMNS: Final = CACHED // 64
PAGE_SECONDS: Final = 60_000  # in the browser's unit


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Governed]:
    with governed_stack(tmp_path_factory.mktemp("governed")) as made:
        build("llama", made.directory / "llama")
        yield made


def engine(
    governed: Governed, log: Path, name: str = DRIVER, **told: Any
) -> contextlib.AbstractContextManager[Server]:
    """One more vLLM with the same model. It joins the console."""
    what = governed.told(name, wait_seconds=5, **told)
    return serving(governed.directory / "llama", what, log, environment=TALKS)


@pytest.fixture(scope="module")
def vllm(governed: Governed) -> Iterator[Server]:
    """The one that most tests ask. It has a job, in a session of its own size."""
    with engine(governed, governed.directory / "vllm.log") as server:
        [group] = governed.driver()["model"]["groups"]
        governed.start_session(sum(group["bytes_per_token"]))
        governed.start_job()
        yield server


@pytest.fixture(scope="module")
def page(governed: Governed) -> Iterator[Page]:
    """Of an admin who has logged in."""
    with chromium() as browser:
        context = browser.new_context(base_url=governed.console, viewport=WIDE)
        page = context.new_page()
        log_in(page, governed)
        yield page
        context.close()


def hits(vllm: Server, seed: int, claim: str, tokens: int = CACHED) -> None:
    wait_until("it hits", lambda: vllm.ask(prompt(seed), claim)[1] == tokens, 60)


def test_an_engine_with_a_job_caches_for_the_orgs_of_its_job(
    governed: Governed, vllm: Server, page: Page, take_picture: TakePicture
) -> None:
    assert governed.driver()["engine"].startswith("vllm 0.")
    acme = governed.claim("acme")
    answer, cached = vllm.ask(prompt(1), acme)
    assert cached == 0
    wait_until("it hits", lambda: vllm.ask(prompt(1), acme) == (answer, CACHED), 60)
    assert vllm.ask(prompt(1), governed.claim("globex")) == (answer, 0), "another org's"
    signed = governed.ask("POST", f"/drivers/{DRIVER}/claims", {"org": "acme"})
    assert vllm.ask(prompt(1), signed["claim"]) == (answer, CACHED)
    page.goto(f"/sessions/{SESSION}/")
    expect(page.get_by_role("link", name=DRIVER).first).to_be_visible()
    take_picture(page, "engine-job")
    page.goto(f"/fleet/drivers/{DRIVER}/")
    expect(page.get_by_text("vllm 0.").first).to_be_visible()
    take_picture(page, "engine-driver")


def test_what_an_admin_lowers_the_next_request_misses(
    governed: Governed, vllm: Server, page: Page, take_picture: TakePicture
) -> None:
    """Of an org of its own: the policy stays as it is."""
    hooli, globex = governed.claim("hooli"), governed.claim("globex")
    for claim in (hooli, globex):
        vllm.ask(prompt(2), claim)
        hits(vllm, 2, claim)
    page.goto("/orgs/hooli/policy/")
    page.get_by_label("Expire after last use").fill("1 s")
    page.get_by_label("Reason").fill("GDPR request 4711")
    page.get_by_role("button", name="Save").click()
    governed.wait_until_followed("hooli")
    # Of one, or of more beside it: those of other tests that have no job any more hear nothing.
    expect(page.locator("#reach")).to_contain_text("on 1 of", timeout=PAGE_SECONDS)
    take_picture(page, "ttl-lowered")
    time.sleep(1.5)  # longer than the TTL, and nobody asks meanwhile
    assert vllm.ask(prompt(2), hooli, request="late")[1] == 0
    assert governed.why_missed("hooli", "cmpl-late") == {"expired": CACHED}
    page.goto("/orgs/hooli/explain/?request=cmpl-late")
    expect(page.get_by_text("missed: expired").first).to_be_visible()
    take_picture(page, "ttl-expired")
    assert vllm.ask(prompt(2), globex)[1] == CACHED


def test_a_purge_counts_what_the_engine_held(
    governed: Governed, vllm: Server, page: Page, take_picture: TakePicture
) -> None:
    acme = governed.claim("acme")
    vllm.ask(prompt(3), acme)
    hits(vllm, 3, acme)
    page.goto("/orgs/acme/retention/")
    page.get_by_label("Reason").fill("asked for")
    page.get_by_label("Type the org's short name to confirm").fill("acme")
    page.get_by_role("button", name="Purge").click()
    expect(page.get_by_text("succeeded").first).to_be_visible(timeout=PAGE_SECONDS)
    take_picture(page, "purge-operation")
    [receipt, *_] = governed.ask("GET", "/orgs/acme/purges")["items"]
    assert receipt["columns"] >= COLUMNS, receipt
    page.goto("/orgs/acme/retention/")
    page.get_by_text("Signed confirmations").first.click()
    take_picture(page, "purge-receipt")
    assert vllm.ask(prompt(3), acme)[1] == 0


def test_moves_drains_and_resizes_under_load_fail_no_request(governed: Governed, vllm: Server) -> None:
    claim = governed.claim("acme")
    [stream] = governed.ask("GET", "/sessions/chat/streams")["items"]
    here, there = stream["node"], next(name for name in NODES if name != stream["node"])
    with Load(vllm, claim, range(20, 26)) as load:
        wait_until("it hits", lambda: CACHED in load.hit_tokens, 60)
        governed._run("/sessions/chat/move", {"stream": stream["name"], "node": there})
        governed._run(f"/nodes/{there}/drain", {"reason": "for a test"})
        governed.ask("PUT", f"/nodes/{there}/state", {"state": "ready"})
        governed._run("/sessions/chat/resize", {"boxes": 2, "wait_seconds": 60})
        governed._run("/sessions/chat/resize", {"boxes": 1, "wait_seconds": 60})
        before = len(load.hit_tokens)
        wait_until("it still hits", lambda: CACHED in load.hit_tokens[before:], 60)
    assert not load.wrong
    [after] = governed.ask("GET", "/sessions/chat/streams")["items"]
    assert after["node"] == here
    assert sum(map(bool, load.hit_tokens)) > len(load.hit_tokens) / 2, "moves keep what is cached"


def test_a_second_job_begins_and_ends_while_the_first_serves(
    governed: Governed, vllm: Server, tmp_path: Path, page: Page, take_picture: TakePicture
) -> None:
    second = "vllm-8"
    with engine(governed, tmp_path / "log", second) as beside:
        governed.driver(second)
        right, cached = beside.ask(prompt(40), None)
        assert cached == 0, "it serves before it has a job"
        with Load(vllm, governed.claim("acme"), range(30, 34)) as load:
            wait_until("the first hits", lambda: CACHED in load.hit_tokens, 60)
            governed.start_job(second, ["globex"])
            globex = governed.claim("globex", driver=second)
            assert beside.ask(prompt(40), globex) == (right, 0)
            wait_until("it hits", lambda: beside.ask(prompt(40), globex) == (right, CACHED), 60)
            streams = governed.ask("GET", f"/sessions/{SESSION}/streams")["items"]
            assert {one["job"] for one in streams} == {DRIVER, second}
            page.goto(f"/sessions/{SESSION}/")
            expect(page.get_by_role("link", name=second).first).to_be_visible()
            take_picture(page, "two-jobs")
            governed.end_job(second)
            wait_until("it caches no more", lambda: beside.ask(prompt(40), globex) == (right, 0), 60)
            before = len(load.hit_tokens)
            wait_until("the first still hits", lambda: CACHED in load.hit_tokens[before:], 60)
    assert not load.wrong
    assert sum(map(bool, load.hit_tokens)) > len(load.hit_tokens) / 2, "it keeps what is cached"
    [stream] = governed.ask("GET", f"/sessions/{SESSION}/streams")["items"]
    assert stream["job"] == DRIVER


def test_a_second_start_needs_neither_console_nor_token(
    governed: Governed, vllm: Server, tmp_path: Path
) -> None:
    name = "vllm-9"
    with engine(governed, tmp_path / "log", name) as first:
        governed.driver(name)
        governed.start_job(name, ["globex"])
        globex = governed.claim("globex", driver=name)
        answer, _ = first.ask(prompt(4), globex)
        wait_until("it hits", lambda: first.ask(prompt(4), globex) == (answer, CACHED), 60)
    told = {**first.told, "console": f"http://127.0.0.1:{endpoint.free_port()}", "join": None}
    model = governed.directory / "llama"
    with serving(model, told, tmp_path / "alone", environment=TALKS) as alone:
        assert "Following the stored desired document" in alone.log
        assert "away: ConnectError" in alone.log
        assert alone.ask(prompt(4), globex)[0] == answer
        wait_until("it hits", lambda: alone.ask(prompt(4), globex) == (answer, CACHED), 60)
    with engine(governed, tmp_path / "again", name):  # a job ends where its driver can say so
        governed.end_job(name)


# Rules of requests


def files_of(governed: Governed, before: set[Path], count: int) -> set[Path]:
    """Those that are new in tier 2, when there are so many."""
    found = set[Path]()

    def are_there() -> bool:
        nonlocal found
        found = governed.files() - before
        return len(found) >= count

    wait_until(f"there are {count} new files", are_there, 60)
    assert len(found) == count
    return found


def test_what_a_request_keeps_out_of_tier_2_is_in_no_file(
    governed: Governed, vllm: Server, page: Page, take_picture: TakePicture
) -> None:
    """Columns that are used again are copied, one after the other: those of the last prompt are the only
    ones of which there are files, and the others say in Explain why not."""
    governed.apply_policy("initech", tiers="dram+tier2", encrypt_tier2=False)
    before = governed.files()
    kept_out = {
        "request": Rules(tier2=Tier2Rule.NEVER),
        "not_encrypted": Rules(tier2=Tier2Rule.ENCRYPTED),
        "own_ttl": Rules(ttl_seconds=3600),
        None: Rules(),
    }
    for seed, rules in enumerate(kept_out.values(), 50):
        claim = governed.claim("initech", rules)
        vllm.ask(prompt(seed), claim)
        hits(vllm, seed, claim)
        vllm.ask(prompt(seed), claim, request=f"rules-{seed}")
    files_of(governed, before, COLUMNS)
    for seed, why in enumerate(kept_out, 50):
        told = governed.explain("initech", f"cmpl-rules-{seed}")
        assert told["result"]["hit_tokens"] == CACHED
        assert [(run["state"], run["no_spill"]) for run in told["groups"]["full"]] == [("ready", why)]
    page.goto("/orgs/initech/explain/?request=cmpl-rules-50")
    expect(page.get_by_text("only, by the request")).to_be_visible()
    take_picture(page, "rules-never")


def test_files_of_a_request_that_wants_encryption_hold_nothing_in_plain(
    governed: Governed, vllm: Server
) -> None:
    """Another org's plain files of the same prompt have the same KV: nothing of that is in these."""
    files: dict[str, set[Path]] = {}
    for org, is_encrypted in (("globex", False), ("initech", True)):
        governed.apply_policy(org, tiers="dram+tier2", encrypt_tier2=is_encrypted)
        before = governed.files()
        rules = Rules(tier2=Tier2Rule.ENCRYPTED) if is_encrypted else Rules()
        claim = governed.claim(org, rules)
        vllm.ask(prompt(60), claim)
        hits(vllm, 60, claim)
        files[org] = files_of(governed, before, COLUMNS)
    contents = {org: b"".join(path.read_bytes() for path in of) for org, of in files.items()}
    size = 64
    plain = contents["globex"]
    pieces = [plain[at : at + size] for at in range(0, len(plain) - size, 4096 + size)]
    pieces = [piece for piece in pieces if any(piece)]  # not what only fills a page
    assert len(pieces) > COLUMNS
    assert not [piece for piece in pieces if piece in contents["initech"]]


def test_a_request_that_stores_its_beginning_shares_that_and_no_more(
    governed: Governed, vllm: Server
) -> None:
    """The system prompt, whose length the gateway knows."""
    system = prompt(70)[:320]
    one, other = [*system, *prompt(71)[:300]], [*system, *prompt(72)[:300]]
    claim = governed.claim("globex", Rules(store_tokens_max=320))
    right = {tuple(asked): vllm.ask(asked, None)[0] for asked in (one, other)}
    assert vllm.ask(one, claim) == (right[tuple(one)], 0)
    wait_until("it hits", lambda: vllm.ask(one, claim) == (right[tuple(one)], 320), 60)
    assert vllm.ask(other, claim) == (right[tuple(other)], 320)
    assert vllm.ask(one, claim, request="prefix") == (right[tuple(one)], 320), "nothing was added"
    told = governed.explain("globex", "cmpl-prefix")
    assert told["result"]["missed_tokens"] == {"prefix_only": 256}
    assert [run["state"] for run in told["groups"]["full"]] == ["ready", "prefix_only"]


def test_a_shorter_ttl_of_a_request_expires_its_columns_alone(governed: Governed, vllm: Server) -> None:
    seconds = 5
    brief = governed.claim("globex", Rules(ttl_seconds=seconds))
    usual = governed.claim("globex")
    for seed, claim in ((80, brief), (81, usual)):
        vllm.ask(prompt(seed), claim)
        hits(vllm, seed, claim)
    time.sleep(seconds + 0.5)  # and nobody asks meanwhile
    assert vllm.ask(prompt(80), brief, request="over")[1] == 0
    assert governed.why_missed("globex", "cmpl-over") == {"expired": CACHED}
    assert vllm.ask(prompt(81), usual)[1] == CACHED
