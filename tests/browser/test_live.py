"""A page that stays open: what changes is there by itself, once, whatever happens on the way."""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import redis
import websockets.sync.client as websockets
from django.conf import settings
from playwright.sync_api import Browser, Page, Route, WebSocketRoute, expect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.typing import Subprotocol

from console.live.messages import MESSAGE_BYTES_MAX
from swdriver_shim.daemon import metrics
from telemetry.emit.emitter import Emitter
from telemetry.histogram import Histogram
from telemetry.metrics import Sink
from tests.browser.chromium import chromium
from tests.browser.looking import faults, log_in
from tests.live import START_SECONDS_MAX, LiveConsole, live_console, wait_until
from tests.telemetry.ends import ingest_of

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

PATH = "/latency/?topic=org:acme&range=15m"
MS = 30_000.0
FLOOD = 300  # frames: five minutes of them at once
QUERY = "api/v1/metrics/query"
IS_DRAWN = "document.querySelector('[data-chart]').data?.[0].y.some((value) => value > 0)"

# Whether the first chart has values where it is looked at.
IS_SHOWN_NOW = """() => {
    const { data, layout } = document.querySelector("[data-chart]");
    if (!data) return false;
    const [from] = layout.xaxis.range;
    return data[0].x.some((at, place) => at > from && data[0].y[place] > 0);
}"""

HIDE = """
    window.isHidden = true;
    Object.defineProperty(document, "hidden", { get: () => isHidden });
    document.dispatchEvent(new Event("visibilitychange"));
"""
SHOW = "isHidden = false; document.dispatchEvent(new Event('visibilitychange'))"


class World:
    """A console, a driver that tells its numbers, and an org whose name changes."""

    def __init__(self, console: LiveConsole, browser: Browser) -> None:
        self.console = console
        self.browser = browser
        headers = {"Authorization": f"Bearer {console.token()}", "Idempotency-Key": "k", "If-Match": "*"}
        self.api = httpx.Client(base_url=f"{console.address}/api/v1", headers=headers, timeout=30)
        self.api.post("/orgs", json={"slug": "acme", "name": "Acme"}).raise_for_status()
        context = browser.new_context(base_url=console.address)
        log_in(context.new_page(), console)
        self.cookies = context.cookies()
        context.close()
        self.told: list[str] = []  # of all that happened, in order

    def has_numbers(self) -> bool:
        """Of a step that is over: a page is made once of those, and adds nothing without scripts."""
        cookies = {one["name"]: one["value"] for one in self.cookies}
        page = httpx.get(f"{self.console.address}{PATH}", cookies=cookies, timeout=30)
        return "As a table" in page.text

    def rename(self, name: str = "") -> str:
        name = name or f"Acme {len(self.told)}"
        self.api.patch("/orgs/acme", json={"name": name}).raise_for_status()
        self.told.append(f"Org {name} was changed.")
        return self.told[-1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    redis.Redis.from_url(settings.REDIS_URL).flushdb()  # what others have told is not of this world
    with (
        live_console(tmp_path_factory.mktemp("live")) as console,
        chromium() as browser,
        ingest_of(console, tmp_path_factory.mktemp("ingest") / "log"),
        contextlib.ExitStack() as ending,
    ):
        emitter = Emitter(
            console.environment["REDIS_URL"], "driver", "1", name="job7", collect=Traffic()
        )
        ending.callback(emitter.start().stop)
        made = World(console, browser)
        ending.callback(made.api.close)
        wait_until("numbers arrive", made.has_numbers, START_SECONDS_MAX)
        yield made


class Traffic:
    """A hundred refills a second, of four milliseconds each."""

    def __init__(self) -> None:
        self.refills = Histogram()

    def __call__(self, into: Sink) -> None:
        self.refills.record(0.004, 100)
        into.put(metrics.REFILL, [({"org": "acme"}, self.refills)])


@pytest.fixture
def open_page(world: World) -> Iterator[Callable[..., Page]]:
    """A page of somebody who is logged in; `blocked` says what becomes of its WebSockets."""
    contexts = []

    def open_page(path: str, blocked: Callable[[WebSocketRoute], object] | None = None) -> Page:
        context = world.browser.new_context(base_url=world.console.address)
        contexts.append(context)
        context.add_cookies(world.cookies)  # type: ignore[arg-type]  # as they came
        page = context.new_page()
        page.set_default_timeout(MS)
        if blocked:
            page.route_web_socket("**/ws/v1/live", blocked)
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()


def markers(page: Page) -> list[str]:
    """What the first chart shows of events."""
    found: list[str] = page.evaluate("document.querySelector('[data-chart]').data.at(-1).text")
    return found


def expect_state(page: Page, text: str) -> None:
    expect(page.locator("[data-live-state]")).to_have_text(text, timeout=MS)


def expect_told(page: Page, sentence: str) -> None:
    expect(page.locator("[hx-trigger=live]")).to_contain_text(sentence, timeout=MS)


def test_numbers_and_events_come_by_themselves_and_survive_a_restart(
    world: World, open_page: Callable[..., Page]
) -> None:
    """Promise 10 in a browser: nothing missing and nothing doubled, and the page is as the API says."""
    page = open_page(PATH)
    expect_state(page, "live")
    figure = page.locator("[data-live-figure='refill.p99']")
    expect(figure).to_have_text("3.76 ms", timeout=MS)
    expect(page.locator("[data-live-figure='evict.p99']")).to_have_text("no traffic")
    expect(page.locator("[data-live-age]")).to_have_text(re.compile(r"\d+ s ago"), timeout=MS)
    wait_until("the chart is drawn", lambda: page.evaluate(IS_DRAWN))
    expect_told(page, world.rename())
    world.console.stop()
    expect(page.locator("[data-live-state]")).not_to_have_text("live", timeout=MS)
    world.console.process = world.console.serve()
    world.rename()
    world.rename()
    expect_state(page, "live")
    last = world.rename()
    expect_told(page, last)
    wait_until("the chart has it", lambda: last in markers(page))
    shown = [html.unescape(text) for text in markers(page) if text.endswith("was changed.")]
    assert shown == world.told
    events = world.api.get("/events?topic=org:acme&kind=org.update&order=oldest").json()["items"]
    assert [event["sentence"] for event in events] == world.told


def test_where_websockets_are_blocked_pages_ask(world: World, open_page: Callable[..., Page]) -> None:
    page = open_page(PATH, lambda route: route.close(code=1011))
    expect_state(page, "polling every 5 s")
    expect(page.locator("[data-live-figure='refill.p99']")).to_have_text("3.76 ms", timeout=MS)
    expect_told(page, world.rename())


def test_however_many_frames_come_plots_are_drawn_once_a_second_and_keys_are_heard(
    world: World, open_page: Callable[..., Page]
) -> None:
    """So no plot freezes the page: how long a drawing takes is measured by benchmarks/pages.py."""
    wires: list[WebSocketRoute] = []

    def tell(kind: str, seq: int, **data: Any) -> None:
        now = datetime.now(UTC).isoformat()
        frame = {"v": 1, "seq": seq, "ts": now, "topic": "org:acme", "kind": kind}
        wires[-1].send(json.dumps({**frame, "data": {"event": 0, "read_at": now, **data}}))

    def answer(route: WebSocketRoute) -> None:
        wires.append(route)
        route.on_message(lambda _: tell("snapshot", 0, events=[], numbers={}, state={}))

    page = open_page(PATH, answer)
    page.clock.install()
    page.reload()
    expect_state(page, "live")
    page.wait_for_function(IS_DRAWN, timeout=MS)
    tell("heartbeat", 0)  # so that in these seconds it does not take us for silent
    page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=8))
    page.evaluate(
        "window.drawn = 0;"
        "document.querySelector('[data-chart]').on('plotly_afterplot', () => (drawn += 1))"
    )
    last = page.evaluate("document.querySelector('[data-chart]').data[0].x.at(-1).getTime()") // 1000
    for seq in range(1, FLOOD + 1):
        figures = {"refill.p99": seq / 1000, "refill.p50": seq / 1000}
        points = [{"at": last + 10 * seq, "figures": figures}]
        tell("delta", seq, numbers={"at": "", "seconds": 15, "figures": figures, "points": points})
    expect(page.locator("[data-live-figure='refill.p99']")).to_have_text(f"{FLOOD} ms")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.evaluate("drawn") == 0
    page.clock.run_for(1000)
    wait_until("it is drawn", lambda: page.evaluate("drawn"))
    points = page.evaluate("document.querySelector('[data-chart]').data[0].x.length")
    assert (page.evaluate("drawn"), points) == (1, 91), "of a quarter of an hour, however many came"


def with_session(route: Route) -> None:
    """The page of an org that a session serves."""
    text = route.fetch().text()
    assert '"moreTopics": []' in text
    text = text.replace('"moreTopics": []', '"moreTopics": ["session:chat"]')
    text = text.replace('org:acme" hx-trigger', 'org:acme session:chat" hx-trigger')
    route.fulfill(body=text, content_type="text/html")


def frame_of(topic: str, kind: str, seq: int, **data: Any) -> str:
    now = datetime.now(UTC).isoformat()
    return json.dumps({"v": 1, "seq": seq, "ts": now, "topic": topic, "kind": kind, "data": data})


def snapshot_of(topic: str) -> str:
    now = datetime.now(UTC).isoformat()
    return frame_of(topic, "snapshot", 0, event=0, read_at=now, events=[], changed=[])


def test_what_happens_to_a_session_of_an_org_is_marked_at_once(
    world: World, open_page: Callable[..., Page]
) -> None:
    wires: list[WebSocketRoute] = []
    asked: set[str] = set()

    def answer(route: WebSocketRoute) -> None:
        def told(message: str | bytes) -> None:
            topic = json.loads(message)["topic"]
            asked.add(topic)
            route.send(snapshot_of(topic))

        wires.append(route)
        route.on_message(told)

    page = open_page("/", answer)
    page.route("**/latency/?*", with_session)
    page.goto(PATH)
    expect_state(page, "live")
    page.wait_for_function(IS_DRAWN, timeout=MS)
    assert asked >= {"org:acme", "session:chat"}
    now = datetime.now(UTC).isoformat()
    number = 1 << 40  # none that the page has from the tests before
    event = {"id": number, "at": now, "kind": "x", "sentence": "It moved.", "data": {}}
    delta = frame_of("session:chat", "delta", 1, event=number, read_at=now, events=[event], changed=[])
    wires[-1].send(delta)
    wait_until("it is marked", lambda: "It moved." in markers(page))


ADD_OF_BOTH = """
    document.querySelector("main").insertAdjacentHTML("beforeend",
        `<p id="both" data-live-topic="org:acme session:chat"><time data-live-age>—</time></p>`);
"""


@pytest.mark.parametrize("silent", ["org:acme", "session:chat"])
def test_what_follows_several_topics_is_as_old_as_the_oldest(
    world: World, open_page: Callable[..., Page], silent: str
) -> None:
    """It was as old as the topic that came last."""
    wires: list[WebSocketRoute] = []
    heard = {"org:acme", "session:chat"}

    def answer(route: WebSocketRoute) -> None:
        def told(message: str | bytes) -> None:
            topic = json.loads(message)["topic"]
            if topic in heard:
                route.send(snapshot_of(topic))

        wires.append(route)
        route.on_message(told)

    page = open_page("/", answer)
    page.route("**/latency/?*", with_session)
    page.clock.install()
    page.goto(PATH)
    expect_state(page, "live")
    page.evaluate(ADD_OF_BOTH)
    now, earlier = "2026-11-21T03:00:30.000Z", "2026-11-21T03:00:00.000Z"
    [other] = heard - {silent}
    for topic, at in ((silent, earlier), (other, now)):
        numbers = {"at": at, "seconds": 10, "figures": {}, "points": []}
        wires[-1].send(frame_of(topic, "delta", 1, event=0, read_at=now, events=[], numbers=numbers))
        expect(page.locator("#both time")).to_have_attribute("datetime", earlier, timeout=MS)
    expect(page.locator("#both")).not_to_have_class(re.compile("stale"))
    heard.remove(silent)
    for _ in range(4):  # it connects again, and one of the two answers
        page.clock.run_for(8_000)
    expect(page.locator("#both")).to_have_class(re.compile("stale"))


@pytest.mark.parametrize(
    ("left", "state"), [({"org:acme"}, "live"), (set[str](), "access removed")], ids=["one", "none"]
)
def test_a_session_that_ends_does_not_end_what_is_told_of_its_org(
    world: World, open_page: Callable[..., Page], left: set[str], state: str
) -> None:
    wires: list[WebSocketRoute] = []
    asked: list[str] = []

    def answer(route: WebSocketRoute) -> None:
        def told(message: str | bytes) -> None:
            topic = json.loads(message)["topic"]
            asked.append(topic)
            if len(wires) == 1 or topic in left:
                route.send(snapshot_of(topic))
            else:
                route.send(frame_of(topic, "error", 0, reason="NotFound", detail="There is none."))

        wires.append(route)
        route.on_message(told)

    page = open_page("/", answer)
    page.route("**/latency/?*", with_session)
    wires.clear()
    page.goto(PATH)
    expect_state(page, "live")
    wait_until("both are asked for", lambda: page.evaluate("1") and "session:chat" in asked)
    asked.clear()
    wires[-1].close(code=4403)
    wait_until("both are asked for again", lambda: page.evaluate("1") and len(asked) == 2)
    expect_state(page, state)


def test_what_is_no_longer_theirs_to_see_says_so_and_asks_no_more(
    world: World, open_page: Callable[..., Page]
) -> None:
    tries = []

    def forbid(route: WebSocketRoute) -> None:
        tries.append(route)
        route.close(code=4403)

    page = open_page(PATH, forbid)
    expect_state(page, "access removed")
    page.wait_for_load_state("networkidle")
    assert len(tries) == 1


def test_a_page_that_may_see_none_of_its_topics_does_without(
    world: World, open_page: Callable[..., Page]
) -> None:
    said = []

    def refuse(route: WebSocketRoute) -> None:
        def answer(message: str | bytes) -> None:
            said.append(message)
            topic = json.loads(message)["topic"]
            detail = {"reason": "NotFound", "detail": "There is no such topic."}
            error = {"v": 1, "seq": 0, "ts": "", "topic": topic, "kind": "error", "data": detail}
            route.send(json.dumps(error))

        route.on_message(answer)

    page = open_page(PATH, refuse)
    wait_until("it has asked", lambda: page.evaluate("1") and said)
    expect(page.locator("[data-live-state]")).to_be_hidden()
    page.wait_for_load_state("networkidle")
    assert len(said) == 1


def test_a_topic_that_there_is_no_room_for_is_asked_for_again(
    world: World, open_page: Callable[..., Page]
) -> None:
    asked = []

    def refuse(route: WebSocketRoute) -> None:
        def answer(message: str | bytes) -> None:
            asked.append(message)
            told = {"reason": "TooManyTopics", "detail": "You are at the limit of topics."}
            error = {"v": 1, "seq": 0, "ts": "", "topic": "org:acme", "kind": "error", "data": told}
            route.send(json.dumps(error))

        route.on_message(answer)

    page = open_page(PATH, refuse)
    page.clock.install()
    page.reload()
    wait_until("it has asked", lambda: page.evaluate("1") and len(asked) > 1)
    before = len(asked)
    page.clock.run_for(20_000)
    expect(page.locator("[data-live-figure='refill.p99']")).to_have_class(re.compile("stale"))
    page.clock.run_for(20_000)
    wait_until("it has asked again", lambda: page.evaluate("1") and len(asked) > before)


def test_a_page_that_rests_says_that_it_is_not_connected(
    world: World, open_page: Callable[..., Page]
) -> None:
    wires: list[WebSocketRoute] = []

    def tell(kind: str) -> None:
        frame = {"v": 1, "seq": 0, "ts": "", "topic": "org:acme", "kind": kind}
        wires[-1].send(json.dumps({**frame, "data": {"event": 0, "numbers": {}, "state": {}}}))

    def answer(route: WebSocketRoute) -> None:
        wires.append(route)
        route.on_message(lambda _: tell("snapshot"))

    page = open_page(PATH, answer)
    page.clock.install()
    page.reload()
    expect_state(page, "live")
    page.evaluate(HIDE)
    for _ in range(4):  # it is told something all the time
        tell("heartbeat")
        page.clock.run_for(10_000)
    expect_state(page, "not connected")
    page.evaluate(SHOW)
    expect_state(page, "live")


def test_who_is_logged_out_is_asked_to_log_in(world: World, open_page: Callable[..., Page]) -> None:
    page = open_page(PATH)
    expect_state(page, "live")
    page.context.clear_cookies()
    world.console.restart()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible(timeout=MS)


def test_a_page_without_scripts_has_it_all_as_tables(world: World) -> None:
    context = world.browser.new_context(base_url=world.console.address, java_script_enabled=False)
    context.add_cookies(world.cookies)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(PATH)
    page.get_by_text("As a table").first.click()
    expect(page.get_by_role("region", name="Refill latency as a table")).to_contain_text("3.76 ms")
    page.get_by_role("link", name="1h", exact=True).click()
    expect(page.get_by_role("link", name="1h", exact=True)).to_have_attribute("aria-current", "true")
    context.close()


def test_other_programs_watch_with_a_token_and_other_sites_do_not(world: World) -> None:
    address = f"{world.console.address.replace('http', 'ws')}/ws/v1/live"
    cookie = {"Cookie": "; ".join(f"{one['name']}={one['value']}" for one in world.cookies)}
    for path, headers in (("", {"Origin": "https://evil.example"}), ("/more", {"Origin": address})):
        with pytest.raises(InvalidStatus, match="403"):
            websockets.connect(address + path, additional_headers={**cookie, **headers})
    token = world.console.token(read_only=True)
    protocols = [Subprotocol("tidegate.v1"), Subprotocol(f"bearer.{token}")]
    with websockets.connect(address, subprotocols=protocols) as wire:
        assert wire.subprotocol == "tidegate.v1"
        wire.send(json.dumps({"type": "subscribe", "topic": "fleet"}))
        assert json.loads(wire.recv(timeout=30))["kind"] == "snapshot"
        wire.send("x" * (MESSAGE_BYTES_MAX + 1))
        with pytest.raises(ConnectionClosedError) as closing:
            deque(wire, maxlen=0)  # to the end
    assert closing.value.rcvd
    assert closing.value.rcvd.code == 1009


# The middle of a cell of the heat map that has something in it, and since when that may have been over:
# what happens in a second is told, and counted, when it is over.
CELL = """() => {
    const plots = [...document.querySelectorAll("[data-chart]")];
    const plot = plots.find((one) => one.data?.[0].type === "heatmap");
    const { z, x, y } = plot.data[0];
    const row = z.findIndex((values) => values.some((value) => value !== null));
    const column = z[row].findIndex((value) => value !== null);
    const { xaxis, yaxis } = plot._fullLayout;
    const box = plot.getBoundingClientRect();
    const middle = (axis, one, other) => axis._offset + (axis.d2p(one) + axis.d2p(other)) / 2;
    return [
        box.left + middle(xaxis, x[column], x[column + 1]),
        box.top + middle(yaxis, y[row], y[row + 1]),
        new Date(x[column].getTime() - 1000).toISOString(),
    ];
}"""


def test_a_part_of_a_chart_is_chosen_by_mouse_keys_and_finger_to_zoom(
    world: World, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{PATH}&compare=day")
    page.wait_for_function(IS_DRAWN, timeout=MS)
    lines, heat = (page.locator("[data-chart] .nsewdrag").nth(place) for place in (0, 1))
    expect(heat).to_be_attached(timeout=MS)
    lines.hover()
    cursors = page.locator(".plot__cursor").filter(visible=True)
    expect(cursors).to_have_count(1, timeout=MS)
    expect(page.locator("figure").filter(has=cursors)).to_contain_text("Refill latency distribution")

    box = lines.bounding_box()
    assert box
    left, right, middle = (box["x"] + part * box["width"] for part in (0.4, 0.99, 0.5))
    page.mouse.move(left, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(right, box["y"] + 42, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=*until=*", timeout=MS)
    assert "range=" not in page.url, "it is fixed now"
    assert "compare=day" in page.url
    page.go_back()
    page.wait_for_function(IS_DRAWN, timeout=MS)
    assert "range=15m" in page.url
    expect(heat).to_be_attached(timeout=MS)

    page.locator("[data-chart]").first.focus()
    for key, times in (("ArrowLeft", 3), ("Shift+ArrowLeft", 8)):
        for _ in range(times):
            page.keyboard.press(key)
    expect(cursors).to_have_count(2)
    page.keyboard.press("Enter")
    page.wait_for_url("**from=*until=*", timeout=MS)
    start, end = (datetime.fromisoformat(_asked(page, name)) for name in ("from", "until"))
    assert end - start == timedelta(seconds=80)

    page.goto(PATH)
    page.wait_for_function(IS_DRAWN, timeout=MS)
    hand = page.context.new_cdp_session(page)
    for kind, x in (
        ("touchStart", left),
        ("touchMove", middle),
        ("touchMove", right),
        ("touchEnd", None),
    ):
        points = [] if x is None else [{"x": x, "y": box["y"] + 40}]
        hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.wait_for_url("**from=*until=*", timeout=MS)


def test_a_cell_leads_to_what_is_behind_it(world: World, open_page: Callable[..., Page]) -> None:
    page = open_page(PATH)
    page.wait_for_function(IS_DRAWN, timeout=MS)
    every = page.locator("figure").filter(has_text="Refill latency distribution")
    expect(every.locator(".heatmaplayer image")).to_be_attached(timeout=MS)
    assert faults(page) == []
    every.scroll_into_view_if_needed()
    x, y, at = page.evaluate(CELL)
    page.mouse.move(x, y)
    expect(every.locator(".hoverlayer text").first).to_be_attached()
    page.mouse.click(x, y)
    page.wait_for_url("**/slowest/**", timeout=MS)
    assert _asked(page, "from") == at
    assert float(_asked(page, "most")) == pytest.approx(0.0041, rel=0.1)
    page.go_back()
    every.get_by_text("As a table").click()
    every.locator("table a").first.click()
    expect(page.get_by_text("The slowest transfers (batches of columns)")).to_be_visible(timeout=MS)


def test_a_chart_asks_for_what_was_told_while_nobody_listened(
    world: World, open_page: Callable[..., Page]
) -> None:
    page = open_page(PATH)
    page.wait_for_function(IS_DRAWN, timeout=MS)
    with page.expect_request(lambda request: "fold=p50" in request.url, timeout=MS):
        page.evaluate("""() => document.dispatchEvent(new CustomEvent("tidegate:live", {detail: {
            topic: "org:acme",
            events: [],
            numbers: {points: [{at: Date.now() / 1000 + 60, figures: {}}]},
        }}))""")


# As if the page had been opened two days ago, and nobody had looked since.
OPENED_EARLIER = """
    const parse = JSON.parse;
    JSON.parse = (text, ...more) => {
        const data = parse(text, ...more);
        if (data && "isHeatMap" in data) for (const end of ["start", "end"]) data[end] -= 48 * 3600;
        return data;
    };
"""
# As Plotly draws this text, on a chart of its own.
DRAWN_BY_PLOTLY = """async (text) => {
    const there = document.body.appendChild(document.createElement("div"));
    await Plotly.newPlot(there, [{ x: [1], y: [1], mode: "text", text: [text] }]);
    const drawn = there.querySelector(".textpoint text");
    return { text: drawn.textContent, links: drawn.querySelectorAll("a").length };
}"""
TELL_OFTEN = """async () => {
    const numbers = { points: [{ at: Date.now() / 1000 + 60, figures: {} }] };
    for (let time = 0; time < 5; time += 1) {
        const detail = { topic: "org:acme", events: [], numbers };
        document.dispatchEvent(new CustomEvent("tidegate:live", { detail }));
        await fetch("/-/health/live");
    }
}"""


def test_a_page_that_was_hidden_for_days_asks_only_for_what_it_shows(
    world: World, open_page: Callable[..., Page]
) -> None:
    page = open_page("/search/")
    page.add_init_script(OPENED_EARLIER)
    statuses: list[int] = []
    page.on("response", lambda one: statuses.append(one.status) if QUERY in one.url else None)
    page.goto(PATH)
    expect(page.locator("[data-live-figure='refill.p99']")).to_have_text("3.76 ms", timeout=MS)
    page.wait_for_function(IS_SHOWN_NOW, timeout=MS)
    assert set(statuses) == {200}


def test_a_chart_whose_question_is_refused_says_so_and_does_not_ask_with_every_frame(
    world: World, open_page: Callable[..., Page]
) -> None:
    page = open_page("/search/")
    page.route_web_socket("**/ws/v1/live", lambda _: None)
    page.route(f"**/{QUERY}**", lambda route: route.fulfill(status=503))
    page.goto(PATH)
    page.wait_for_function(IS_DRAWN, timeout=MS)
    chart = page.locator("figure").filter(
        has=page.get_by_role("heading", name="Refill latency", exact=True)
    )
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if QUERY in one.url else None)
    page.evaluate(TELL_OFTEN)
    expect(chart.get_by_text("not up to date")).to_be_visible()
    once = [url for url in asked if "fold=p50" in url and "swdriver_refill_seconds" in url]
    assert len(once) == 1
    page.unroute(f"**/{QUERY}**")
    expect(chart.get_by_text("not up to date")).to_be_hidden(timeout=MS)


def test_what_somebody_has_named_is_no_html_in_a_chart(
    world: World, open_page: Callable[..., Page]
) -> None:
    named = "<a href='https://elsewhere.example'>&amp;"
    sentence = world.rename(named)
    page = open_page(PATH)
    page.wait_for_function(IS_DRAWN, timeout=MS)
    shown = [page.evaluate(DRAWN_BY_PLOTLY, text) for text in markers(page)]
    assert {"text": sentence, "links": 0} in shown


def _asked(page: Page, name: str) -> str:
    [found] = parse_qs(urlsplit(page.url).query)[name]
    return found
