"""The decoders of everything that comes from somebody else, as targets.

Not here: RESP and HTTP/1.1 are parsed by redis-py, httptools and h11, which are not ours; what comes out
of them is. WebSocket frames are parsed by websockets. Whole conversations are `tests/kvss_agent` and
`tests/hostile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec

from console.live import messages
from kvss_agent import desired as of_agents
from kvss_agent import native
from kvss_agent.data_plane import handshake, wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Breach
from kvss_agent.data_plane.wire import FrameReader, Role
from kvss_agent.documents import Invalid, decode
from kvss_agent.mover import PYTHON
from kvss_agent.process import membership
from kvss_agent.security import identity
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.tier2 import address as of_files
from kvss_agent.tier2 import column_file
from swdriver_shim import desired as of_drivers
from swdriver_shim.adapters import lmcache_frames
from swdriver_shim.adapters.claims import Claim, ClaimRefusal, ClaimVerifier, mint
from swdriver_shim.cache.reuse.preview import Traffic, preview
from swdriver_shim.cache.reuse.sample import _COUNTS, _HEAD, _REFERENCE, ALL_KEYS, Sample
from swdriver_shim.cache.reuse.sample import Kind as ReuseKind
from swdriver_shim.daemon import binary, verbs
from swdriver_shim.policy import Policy, Rules
from telemetry import decoder, records
from telemetry.cells import Cells
from telemetry.emit import transfers
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.merge import merge
from tests.fuzz.mutating import Mutate, behind_a_byte, json_of, msgpack_of, with_a_header
from tests.fuzz.target import Target, Targets
from tests.workload_manager.tokenizers import archives
from workload_manager.tokenizers import archive

SECRET: Final = bytes(range(32))
COLUMNS: Final = 100  # that a preview looks at
SLOT_BYTES: Final = slot_bytes_for(1024)


# The data plane


def frames(raw: bytes) -> None:
    """A connection's bytes, in pieces; what is a frame says the same when it is written again."""
    reader, rest = FrameReader(), memoryview(raw)
    while rest:
        place = reader.want()
        taken = min(len(place), len(rest), 1 + rest[0] % 64)
        place[:taken] = rest[:taken]
        rest = rest[taken:]
        found = reader.fed(taken)
        if found is None or isinstance(found, wire.Filled):
            continue
        if isinstance(found, wire.Evict):
            reader.expect([memoryview(bytearray(header.length)) for header in found.headers()])
        elif isinstance(found, wire.Refilled):
            lengths = [length for length in found.lengths() if length]
            if lengths:
                reader.expect([memoryview(bytearray(min(length, 4096))) for length in lengths])
        assert again(found.encode()) == found, found


def again(encoded: bytes) -> object:
    kind, flags, count, length, number = wire._HEAD.unpack_from(encoded)
    assert length == len(encoded) - wire.HEAD_BYTES
    return wire.decode(kind, flags, count, number, encoded[wire.HEAD_BYTES :])


def frames_of_all_kinds() -> list[bytes]:
    column = (b"k" * 16, b"t" * 16, 1)
    header = seal.pack(column, 64, 16, PYTHON.checksum(memoryview(bytes(16))))
    said = handshake.hello(Role.EVICT, "job7", "job7.full.0", versions=(1, 2), software="fuzz")
    challenge = handshake.challenge(said, SECRET, version=2, features=wire.FEATURES)
    every = (
        said,
        challenge,
        handshake.prove(said, challenge, SECRET),
        wire.Welcome(bytes(16), 7, 8, 4096, (4, 4)),
        wire.Evict(1, ((0, header),)),
        wire.Count(3),
        wire.Refill(1, 2, 3, (0, 1)),
        wire.Refilled(1, (header, bytes(64))),
        wire.Delete(1, 2, 3, (0,), scrub=True),
        wire.Deleted(1),
        wire.Tier(1, wire.TierVerb.SPILL, 1, 0, (wire.TierColumn(0, b"k" * 16, b"t" * 16),), SECRET),
        wire.Tiered(1, (wire.TierAnswer.DONE, seal.Miss.ABSENT), (1, 2)),
        wire.Rejected(1, seal.Miss.ABSENT),
        wire.Resized(4, (4,)),
        wire.Shrunk(4),
        wire.Goodbye(),
        wire.Error(next(iter(wire._CAUSES)), "why"),
    )
    return [one.encode() for one in every]


def sealed(raw: bytes) -> None:
    """A slot that anybody may have written, and the file of a column: both movers say the same."""
    slot = memoryview(bytearray(raw[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")))
    header = seal.read(slot[: seal.HEADER_BYTES])
    key = raw[20:36].ljust(16, b"\0")
    tag = raw[36:52].ljust(16, b"\0")
    sequence = 1 if isinstance(header, seal.Miss) else header.sequence
    expected = seal.Column(key, tag, sequence)
    if not isinstance(header, seal.Miss):
        expected = seal.Column(header.key, header.tag, header.sequence)
    found = seal.verify(slot, expected)
    if mover := native.load():
        assert mover.verify_column(slot, expected) == found
    copy = memoryview(bytearray(SLOT_BYTES))
    assert seal.copy_out(slot, expected, copy) == found
    place = of_files.Address(bytes(16), expected.tag, expected.key, "full.0")
    landing = column_file.CLEAR.incoming(slot, place, PYTHON)
    landing.parts[0][:] = raw[: seal.HEADER_BYTES].ljust(seal.HEADER_BYTES, b"\0")
    landing.accept(len(raw))


def sealed_slots() -> list[bytes]:
    slot = memoryview(bytearray(SLOT_BYTES))
    seal.write(slot, seal.Column(b"k" * 16, b"t" * 16, 3), 64, memoryview(bytes(range(256)) * 2))
    return [bytes(slot), bytes(slot[:100]), bytes(64)]


# Documents


def agent_document(raw: bytes) -> None:
    found = of_agents.parse(raw)
    assert of_agents.parse(msgspec.json.encode(found)) == found


def agent_documents() -> list[bytes]:
    peer = {"name": "job7", "secret": "c" * 44}
    shard = {"name": "s", "slot_bytes": 4096, "slots": 4, "driver": "job7", "part": "full.0"}
    tier2 = {"kind": "posix", "path": "/mnt/kv", "cap_bytes": 1 << 30, "org_caps": {"0" * 32: 1}}
    told = {"generation": 1, "shards": [shard], "peers": [peer]}
    return [msgspec.json.encode(one) for one in (told, {**told, "tier2": tier2}, {"generation": 2})]


def driver_document(raw: bytes) -> None:
    found = of_drivers.parse(raw)
    found.callers()
    assert of_drivers.parse(msgspec.json.encode(found)) == found


def driver_documents() -> list[bytes]:
    model = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [64], "window": 128}]}
    home = {"group": "full", "index": 0, "address": "unix:/run/data.sock", "shard": "s"}
    path = {
        "session": "chat",
        "tier": "rail",
        "box": "cs-1",
        "domain": 0,
        "port_leaf": "leaf-1",
        "nic_leaf": "leaf-1",
        "node": "ax-1",
        "link": "",
        "allowed": True,
    }
    policy = {"policy": {"ttl_last_use_seconds": 60, "tiers": "dram+tier2"}}
    org = {"name": "acme", "secret": "c" * 44, "policies": policy, "tokens": ["0" * 64]}
    told = {
        "generation": 1,
        "driver": "job7",
        "secret": "c" * 44,
        "model": model,
        "homes": [home],
        "orgs": [org],
    }
    far = {**home, "address": "tcp:10.0.0.1:8411", "path": path}
    return [msgspec.json.encode(one) for one in (told, {**told, "homes": [far]})]


# Telemetry


def telemetry(raw: bytes) -> None:
    """A record with the transfers beside it, and what is done with it: added to itself."""
    found = records.decode({records.FIELD: raw})
    assert records.decode({records.FIELD: found.encode()}) == found
    cells = Cells(found.cells.counters, found.cells.gauges, found.cells.histograms)
    series = [Series(kind, f"m{place}") for kind in Kind for place in range(len(cells.of(kind)))]
    if len(series) < 4096:
        added = merge([(Shape(series), cells), (Shape(series), cells)])
        assert all(math.isfinite(one) for _, part in added.parts for one in part.counters)


def told_records() -> list[bytes]:
    cells = Cells([1, 2.5], [(3, 1, 3)], [[0.5, 3, 1, 0, 2]])
    record = records.Record(
        source="agent@host/1",
        sequence=1,
        kind="agent",
        name="ax-1",
        version="1",
        host="host",
        process_id=1,
        started_at=1.0,
        at=2.0,
        shape=bytes(16),
        cells=cells,
    )
    empty = msgspec.structs.replace(record, shape=b"", cells=Cells([], [], []))
    return [record.encode(), empty.encode()]


def shapes(raw: bytes) -> None:
    found = Shape.decode(raw)
    assert Shape.decode(found.encoded).digest == found.digest


def told_shapes() -> list[bytes]:
    series = [Series(kind, f"m_{kind.name}", (("shard", "s"),)) for kind in Kind]
    return [Shape(series).encoded, Shape([]).encoded]


def slowest(raw: bytes) -> None:
    found = transfers.decode({transfers.FIELD: raw})
    assert transfers.decode({transfers.FIELD: transfers.encode(found)}) == sorted(
        found, key=lambda one: one.seconds
    )


def told_transfers() -> list[bytes]:
    one = transfers.Transfer(
        at=1.0,
        seconds=0.5,
        direction="in",
        org="acme",
        request="r",
        stream="s",
        slot_first=0,
        slot_last=1,
        columns=2,
        bytes=3,
        session="chat",
        node="ax-1",
        tier="rail",
        nic_leaf="leaf-1",
        link="",
    )
    return [transfers.encode([one, one]), transfers.encode([])]


# The one bounded decoder


def json_values(raw: bytes) -> None:
    """What it lets in is what the standard library reads there, within the limits."""
    depth_max = 8
    found = decoder.decode(raw, object, decoder.Limits(1 << 14, 512, depth_max))
    assert _depth(found) <= depth_max + 1
    text = raw.decode()
    theirs = json.loads(text)
    assert _same(theirs, found), (theirs, found)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) or isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-12) and math.isfinite(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def texts_of_json() -> list[bytes]:
    values: list[Any] = [{"a": [1, -2.5, None, True, 'x\\"\u20ac']}, [[[[[1]]]]], (1 << 63) - 1, ""]
    more = [b'{"a": 1e400}', b"[" * 40, b'"\\ud800"', b"18446744073709551616", b' {"a" :1, "a":2 } ']
    return [*map(msgspec.json.encode, values), *more]


_ANYTHING: Final = msgspec.msgpack.Decoder()


def packed_values(raw: bytes) -> None:
    found = decoder.unpack(raw, _ANYTHING, decoder.Limits(1 << 14, 512, 8))
    msgspec.msgpack.encode(found)


def packed_anything() -> list[bytes]:
    values: tuple[Any, ...] = ({"a": [1, 2.5, None, b"x"]}, [[[]]], 1 << 62, -1)
    return [msgspec.msgpack.encode(one) for one in values]


# Callers, viewers, gateways, engines


_JUDGE: Final = ClaimVerifier(SECRET, "job7")


def claims(raw: bytes) -> None:
    """Signed by nobody, and, so that what lies behind the signature is reached, signed by us."""
    import jwt

    text = raw.decode("utf-8", "surrogateescape")
    assert isinstance(_JUDGE.verify(text), Claim | ClaimRefusal)
    try:
        told = json.loads(raw)
        signed = jwt.encode(told, SECRET, algorithm="HS256")
    except (ValueError, TypeError, RecursionError, OverflowError):
        return
    assert isinstance(_JUDGE.verify(signed), Claim | ClaimRefusal)


def told_claims() -> list[bytes]:
    told = {
        "iss": "tidegate-gateway",
        "aud": "job7",
        "sub": "acme",
        "iat": 2_000_000_000,
        "exp": 4_000_000_000,
        "rules": {"no_store": True, "ttl_seconds": 5},
    }
    return [mint(SECRET, "job7", "acme", Rules(no_store=True)).encode(), json.dumps(told).encode()]


_STORE: Final = msgspec.json.Decoder(verbs.StoreBody)
_PUT: Final = msgspec.json.Decoder(verbs.PutBody)
_BODIES: Final = tuple(
    msgspec.json.Decoder(body) for body in (verbs.LoadBody, verbs.DeleteBody, verbs.FindBody)
)
_LAYOUT: Final = of_drivers.parse(driver_documents()[0]).model.shape()


def bodies(raw: bytes) -> None:
    """What engines send to a driver: a header and KV behind it, or JSON alone."""
    header, kv = binary.unpack(memoryview(raw), _STORE)
    binary.Kv(_LAYOUT, len(header.tokens), kv)


def told_bodies() -> list[bytes]:
    head = msgspec.json.encode({"tokens": [1, 2], "rules": {"priority": 5}, "first_tokens": {"full": 0}})
    length = len(head).to_bytes(4, "little")
    return [length + head + bytes(128), length + head, b"\xff\xff\xff\xff{}"]


def questions(raw: bytes) -> None:
    """JSON bodies of the verbs, one kind after the other by the first byte."""
    decode(raw[1:], _BODIES[raw[0] % len(_BODIES)] if raw else _BODIES[0])


def told_questions() -> list[bytes]:
    every: list[dict[str, Any]] = [
        {"tokens": [1, 2, 3], "seconds": 0.5, "adapter": "a"},
        {"tokens": [1], "shared": True},
        {"org": "acme", "seconds": 1},
        {"keys": ["00ff"], "seconds": 0},
    ]
    return [bytes([place]) + msgspec.json.encode(one) for place, one in enumerate(every)]


def objects(raw: bytes) -> None:
    header, kv = binary.unpack(memoryview(raw), _PUT)
    binary.cut(kv, header.lengths)


def told_objects() -> list[bytes]:
    head = msgspec.json.encode({"keys": ["00ff", "01"], "lengths": [3, 4]})
    return [len(head).to_bytes(4, "little") + head + b"abcdefg"]


def lm(raw: bytes) -> None:
    """One request of LMCache's protocol, which always has this length."""
    exact = raw[: lmcache_frames.REQUEST_BYTES].ljust(lmcache_frames.REQUEST_BYTES, b" ")
    found = lmcache_frames.parse(exact)
    lmcache_frames.answer(lmcache_frames.Code.SUCCESS, found.length, found.shape)


def told_lm() -> list[bytes]:
    key = b"vllm@llama@1@0@abc@bfloat16".ljust(lmcache_frames.KEY_BYTES)
    return [
        lmcache_frames._REQUEST.pack(command, 16, 1, 2, 0, 1, 2, 3, 4, key)
        for command in (1, 2, 3, 4, 5, 6)
    ]


def viewers(raw: bytes) -> None:
    messages.read(raw.decode("utf-8", "surrogatepass"))


def told_by_viewers() -> list[bytes]:
    return [
        b'{"type":"subscribe","topic":"org:acme","since":3}',
        b'{"type":"unsubscribe","topic":"fleet"}',
        b'{"type":"subscribe","topic":"' + b"x" * 300 + b'"}',
    ]


# What the console answers to those who join, and what drivers answer to it


def joining_answers(raw: bytes) -> None:
    """An answer of any status: it leaves the member with a time to wait and a sentence to show."""
    us = membership.JoiningProcess("nodes", "node:ax-1", "ax-1", "t" * 40, {}, {})
    member = membership.Member(
        membership.Console("http://127.0.0.1:1"), us, membership.MembershipStatus()
    )
    status = 200 if not raw or raw[0] % 2 else 409
    answer = httpx.Response(status, content=raw[1:])
    seconds = member._joined(answer) if status == 200 else member._refused(answer)
    assert membership.BEAT_SECONDS_MIN <= seconds <= membership.BEAT_SECONDS_MAX
    assert len(member.status.reason) <= 500


def told_by_consoles() -> list[bytes]:
    answers = ('{"heartbeat_seconds": 2.5}', '{"detail": "taken"}', '{"heartbeat_seconds": 1e999}')
    return [bytes([place]) + one.encode() for place, one in enumerate(answers, 1)]


_SAMPLE: Final = msgspec.json.Decoder(Sample)


def samples(raw: bytes) -> None:
    """How an org comes back, as a driver tells it: whatever is let in can be calculated with."""
    foretold(decoder.decode(raw, _SAMPLE))


def sample_logs(raw: bytes) -> None:
    """The log alone, which behind base64 a fuzzer does not find."""
    foretold(msgspec.structs.replace(a_sample(), log=raw))


def foretold(sample: Sample) -> None:
    try:
        traffic = Traffic.of(sample).smaller(COLUMNS)
    except ValueError as error:  # what comes later is nobody's to refuse
        raise decoder.Malformed(str(error)) from error
    preview([traffic], Policy(), Policy(ttl_last_use_seconds=60, dram_bytes_max=1 << 20))


def a_sample() -> Sample:
    return Sample(
        org="acme",
        now=100.0,
        complete=False,
        stride=1,
        threshold=ALL_KEYS,
        requests=4,
        requested=1024,
        columns=8,
        hit=256,
        held_bytes=1 << 20,
        room_bytes=1 << 21,
        column_bytes=4096,
        log=a_log(),
    )


def a_log() -> bytes:
    """Two prompts, the second of which goes on from the first."""
    references = b"".join(_REFERENCE.pack(bytes([place]) * 8, place) for place in range(4))
    log = b""
    for number in range(4):
        log += _HEAD.pack(ReuseKind.MATCH, 4, 10.0 * number, 4)
        log += _COUNTS.pack(min(number, 2), 256 * number, 2 * number, 64 * number) + references
        log += _HEAD.pack(ReuseKind.MORE, 1, 10.0 * number + 1, 5) + references[:10]
    return log


def told_samples() -> list[bytes]:
    return [
        msgspec.json.encode(one) for one in (a_sample(), msgspec.structs.replace(a_sample(), log=b""))
    ]


# Names that come with other things


def addresses(raw: bytes) -> None:
    found = Address.parse(raw.decode("utf-8", "surrogateescape"))
    assert Address.parse(str(found)) == found


def told_addresses() -> list[bytes]:
    return [b"unix:/run/data.sock", b"tcp:10.0.0.1:8411", b"tcp:[::1]:1", b"tcp:host:99999"]


def file_names(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    found = of_files.parse(name)
    if found is not None:
        assert of_files.parse(found.name) == found


def told_file_names() -> list[bytes]:
    return [of_files.Address(bytes(16), b"t" * 16, b"k" * 16, "full.0").name.encode()]


def certificate_requests(raw: bytes) -> None:
    key = identity.requested_key(raw.decode("utf-8", "replace"))
    identity.fingerprint(key)


def told_requests() -> list[bytes]:
    return [
        b"-----BEGIN CERTIFICATE REQUEST-----\nMIIB\n-----END CERTIFICATE REQUEST-----\n",
        b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n",
    ]


# Uploads of tokenizers


def tokenizer_archives(raw: bytes) -> None:
    """What is read is written and read again as the same."""
    files = archive.read(raw)
    assert files.keys() <= archive.BYTES_MAX.keys()
    assert archive.read(archive.written(files)) == files


def told_archives() -> list[bytes]:
    files = {"tokenizer.json": b'{"version": "1.0"}', "chat_template.jinja": b"{{ messages }}"}
    return [
        archives.zipped(files),
        archives.gzipped(files),
        archives.tarred(files),
        archives.stored(files),
    ]


def _target(
    function: Callable[[bytes], object],
    refusal: type[Exception] | tuple[type[Exception], ...],
    seeds: Callable[[], list[bytes]],
    mutate: Mutate | None = None,
) -> Target:
    return Target(function, refusal if isinstance(refusal, tuple) else (refusal,), seeds, mutate)


TARGETS: Final[Targets] = {
    "frames": _target(frames, Breach, frames_of_all_kinds),
    "sealed": _target(sealed, (), sealed_slots),
    "agent-documents": _target(agent_document, Invalid, agent_documents, json_of),
    "driver-documents": _target(driver_document, Invalid, driver_documents, json_of),
    "records": _target(telemetry, ValueError, told_records, msgpack_of),
    "shapes": _target(shapes, ValueError, told_shapes, msgpack_of),
    "transfers": _target(slowest, ValueError, told_transfers, msgpack_of),
    "json": _target(json_values, decoder.Malformed, texts_of_json, json_of),
    "msgpack": _target(packed_values, decoder.Malformed, packed_anything, msgpack_of),
    "claims": _target(claims, (), told_claims, json_of),
    "bodies": _target(bodies, Invalid, told_bodies, with_a_header),
    "questions": _target(questions, Invalid, told_questions, behind_a_byte(json_of)),
    "objects": _target(objects, Invalid, told_objects, with_a_header),
    "lm": _target(lm, lmcache_frames.Malformed, told_lm),
    "viewers": _target(viewers, (messages.NotUnderstood, UnicodeDecodeError), told_by_viewers, json_of),
    "joining": _target(joining_answers, (), told_by_consoles, behind_a_byte(json_of)),
    "samples": _target(samples, decoder.Malformed, told_samples, json_of),
    "sample-logs": _target(sample_logs, decoder.Malformed, lambda: [a_log(), b"", bytes(64)]),
    "addresses": _target(addresses, ValueError, told_addresses),
    "file-names": _target(file_names, (), told_file_names),
    "tokenizer-archives": _target(tokenizer_archives, archive.BadArchive, told_archives),
    "certificate-requests": _target(certificate_requests, identity.Unusable, told_requests),
}
