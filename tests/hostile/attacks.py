"""The attacks: each is one evil peer at work until it is told to end. What they may break is a promise.

All of them run at once in a battle, each in a process of its own.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Mapping
from typing import Final

import httpx
import redis

from tests.hostile import caller, engine, moves, telemetry_writer, viewer
from tests.hostile.agent import EvilAgent, well_behaved
from tests.hostile.answers import EXHAUSTING, OBSERVED, Answer, bomb
from tests.hostile.driver import EvilDriver
from tests.hostile.ground import Attack, Ground
from tests.hostile.network import Network, Weather
from tests.hostile.scene import DRIVER, NODE, ORGS, PATIENCE_SECONDS
from tests.hostile.tenant import PROMPTS, Caller, kv_of, tokens_of
from tests.live import wait_until

PEERS: Final = 6  # evil agents, and as many evil drivers
HOARD: Final = 200  # connections that one stranger keeps
HALF_STORES: Final = 6
HALF_STORE_BYTES: Final = 128 << 20
MUTE: Final = 0.1  # of evil peers: the share that says nothing at all
FAR_PROMPT: Final = 1000  # and those behind it: not the tenant's
WEATHERS: Final = (
    Weather(delay_seconds=0.02),
    Weather(piece_bytes=97),
    Weather(cut_after_bytes=3000),
    Weather(flip=0.2),
    Weather(swap=0.2),
)


def evil_answers(ground: Ground) -> None:
    """Agents and drivers that joined, with certificates, and answer whatever they like, each second
    something else; some do not even begin TLS."""
    answers: list[Answer] = [*OBSERVED.values(), *EXHAUSTING.values(), bomb(256)]
    scene = ground.scene
    with contextlib.ExitStack() as stack:
        peers: list[EvilAgent] = []
        for made, kind in ((EvilAgent, "node"), (EvilDriver, "driver")):
            token = scene.join_token(kind, uses=PEERS)
            for number in range(PEERS):
                one = stack.enter_context(made(scene.console, f"evil-{kind}-{number}", scene.directory))
                one.peer.answer = well_behaved()
                one.enter(token)
                peers.append(one)
        while True:
            for one in peers:
                one.peer.answer = ground.chosen.choice(answers)
                one.peer.is_mute = ground.chosen.random() < MUTE
            with contextlib.suppress(httpx.HTTPError):
                ground.chosen.choice(peers).beat()
            if ground.ends.wait(1.0):
                break
        wait_until(
            "an evil peer is asked", lambda: any(one.peer.asked for one in peers), PATIENCE_SECONDS
        )
        ground.did("evil answers", sum(len(one.peer.asked) for one in peers))
    scene.remove_evil_nodes()


def evil_driver(ground: Ground) -> None:
    """A driver with a certificate, a job and a capability: it bends that capability, tries others'
    shards, and answers the console as it likes."""
    scene = ground.scene
    evil = EvilDriver(scene.console, moves.MOVER, scene.directory)
    scene.give_a_job(evil)
    wait_until("it was told a document", evil.secrets, PATIENCE_SECONDS)
    secret = base64.b64decode(evil.documents[-1]["secret"])
    other = moves.shard_of(DRIVER)
    with scene.agent_as(evil) as agent:
        if not moves.is_let_in(agent, moves.own_move(scene.capabilities, scene.data_address)):
            ground.breaks("A driver may not make its own move.")
        while True:
            for one in moves.tries(scene.capabilities, DRIVER, scene.data_address):
                if moves.is_let_in(agent, one):
                    ground.breaks(f"A driver's capability let it in for more: {one.what}.")
                ground.did("bent capabilities")
            for name in (DRIVER, moves.MOVER):
                if engine.guess_secret(scene.data_address, name, other, secret):
                    ground.breaks("A driver's secret opened another's shard.")
            evil.peer.answer = ground.chosen.choice([evil.follow, *EXHAUSTING.values()])
            with contextlib.suppress(httpx.HTTPError):
                evil.beat()
            if ground.ends.wait(1.0):
                break
    # It answers until this process ends: a purge asks all drivers that were ever told something.
    evil.peer.answer = evil.follow
    with contextlib.suppress(httpx.HTTPError):
        evil.beat()


def network(ground: Ground) -> None:
    """Between callers of an org and their driver: it listens, delays, drips, cuts and spoils."""
    scene = ground.scene
    token = scene.callers[ORGS[0]]
    port = int(scene.processes[DRIVER].address.rpartition(":")[2])
    with Network(port, seed=ground.chosen.randrange(1 << 30)) as between:
        near = f"{scene.driver_url.rpartition(':')[0]}:{between.port}"
        for number in itertools.count():
            between.weather = ground.chosen.choice(WEATHERS)
            prompt = FAR_PROMPT + number % PROMPTS
            tokens = tokens_of(prompt)
            # A connection of its own each time: it may have been cut or spoiled.
            with (
                Caller(near, token, seconds=5, **scene.tls) as caller,
                contextlib.suppress(httpx.TransportError),
            ):
                ground.did("calls over an evil network")
                caller.store(tokens, kv_of(prompt, len(tokens)))
                found, refilled = caller.load(tokens)
                if refilled != kv_of(prompt, found):
                    ground.breaks("A network changed bytes, and nobody noticed.")
            if ground.ends.wait(0.2):
                break
        said = bytes(between.recorded)
    ground.sent("recorded", len(said))
    for text in (token.encode(), b"Bearer", b"/v1/"):
        if text in said:
            ground.breaks(f"A network could read {text[:6]!r}.")


def strangers(ground: Ground) -> None:
    """Whoever reaches a port, without any credential."""
    scene = ground.scene
    ports = [
        scene.console.removeprefix("http://"),
        *(scene.processes[name].address for name in (NODE, DRIVER)),
        *(f"tls:{scene.processes[name].address}" for name in (NODE, DRIVER)),
    ]
    data = scene.data_address
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.Hoard(data, HOARD, engine.half_frame(1)))
        ground.did("connections kept", HOARD)
        for port in ports:
            if not ground.ends.is_set():
                stack.enter_context(engine.Hoard(port, HOARD // 10, engine.HALF_REQUEST))
        for number in itertools.count():
            if ground.ends.is_set():
                return
            port = ports[number % len(ports)]
            deed = ground.chosen.randrange(5)
            if deed == 0:
                ground.sent("headers", engine.endless_headers(port, 32))
            elif deed == 1:
                ground.sent("headers", engine.one_long_header(port, 32))
            elif deed == 2:
                path = ground.chosen.choice(("/v1/store", "/v1/desired", "/api/v1/tokens", "/log-in/"))
                ground.sent("bodies without a token", engine.body_without_token(port, path, 64))
            elif deed == 3:
                engine.garbage(port, number, http=True)
            else:
                engine.garbage(data, number)
            ground.did("strangers' tries")
            secret = ground.chosen.randbytes(32)
            if engine.guess_secret(data, DRIVER, f"{DRIVER}.full.0", secret):
                ground.breaks("An agent let a driver in that does not know its secret.")
            ground.ends.wait(0.05)


def org_caller(ground: Ground) -> None:
    """One org against the driver that it shares with another."""
    scene = ground.scene
    token = scene.callers[ORGS[1]]
    address = f"tls:{scene.processes[DRIVER].address}"
    with contextlib.ExitStack() as stack:
        evil = stack.enter_context(Caller(scene.driver_url, token, seconds=60, **scene.tls))
        deletes = engine.Flood(lambda: caller.delete_something(evil), threads=3)
        stack.enter_context(deletes)
        while True:
            kept = [
                caller.half_store(address, token, HALF_STORE_BYTES, HALF_STORE_BYTES // 4)
                for _ in range(HALF_STORES)
            ]
            ground.did("half stores", len(kept))
            ground.sent("half stores", sum(one.sent_bytes for one in kept))
            with contextlib.suppress(httpx.HTTPError):
                if caller.steal(evil, 4):
                    ground.breaks("A driver gave columns of one org to another.")
            for what, status in _tried(evil).items():
                if status < 400:
                    ground.breaks(f"A caller's token was let in at {what}.")
            is_over = ground.ends.wait(1.0)
            for one in kept:
                one.connection.close()
            if is_over:
                break
        ground.did("deletes", deletes.done)


def _tried(evil: Caller) -> Mapping[str, int]:
    try:
        return caller.other_verbs(evil)
    except httpx.HTTPError:
        return {}


def telemetry_writers(ground: Ground) -> None:
    """Who may tell numbers, and tells nonsense, too much of it, and something else than numbers."""
    url = ground.scene.writer_url(NODE)
    writer = telemetry_writer.Writer(url, f"evil-{ground.chosen.randrange(1 << 30)}")
    try:
        for deed in itertools.cycle((writer.many_series, writer.huge_gauges, writer.huge_counters)):
            with contextlib.suppress(redis.RedisError):
                deed()
            for spoil in writer.nonsense():
                with contextlib.suppress(redis.RedisError):
                    spoil()
                    ground.did("nonsense records")
            if ground.ends.wait(1.0):
                break
        for command in telemetry_writer.allowed(url):
            ground.breaks(f"A telemetry writer may use Redis for: {command}.")
    finally:
        ground.did("poison records", writer.sequence)
        writer.close()


def org_viewer(ground: Ground) -> None:
    """A viewer of one org reads every address that there is."""
    scene = ground.scene
    token = scene.token_of("attacker-viewer")
    names = {
        "slug": (ORGS[1], ORGS[0]),
        "name": (NODE, DRIVER, "chat", "cs-1"),
        "public_id": ("0" * 12,),
    }
    with scene.api(token) as api:
        while True:
            answers = viewer.read_everything(api, names)
            ground.did("pages read", len(answers))
            for path, told in viewer.tells_of(answers, (ORGS[0], scene.callers[ORGS[0]])).items():
                ground.breaks(f"A viewer of another org read {told[0]!r} at {path}.")
            for path, answer in answers.items():
                if answer.status_code >= 500:
                    ground.breaks(f"GET {path} answered {answer.status_code}.")
            if ground.ends.wait(2.0):
                return


ATTACKS: Final[Mapping[str, Attack]] = {
    "evil answers": evil_answers,
    "evil driver": evil_driver,
    "network": network,
    "strangers": strangers,
    "org caller": org_caller,
    "telemetry writers": telemetry_writers,
    "org viewer": org_viewer,
}
