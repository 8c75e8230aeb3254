"""The file that an engine names: made, read, refused in sentences, and followed."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis
from django.conf import settings as django
from msgspec.structs import replace

from kvss_agent.documents import Invalid
from swdriver_shim.adapters.claims import Claim, ClaimVerifier, mint
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.model_config import deciding as deciding_facts
from swdriver_shim.adapters.model_config import depend_on_length
from swdriver_shim.adapters.vllm.__main__ import main
from swdriver_shim.adapters.vllm.blocks import Blocks, Layer, Unsupported
from swdriver_shim.adapters.vllm.config import AgentSpec, ApiSpec, EngineConfig, file_of, fresh, read
from swdriver_shim.adapters.vllm.engine_driver import EngineDriver, GroupFacts, WorkerFacts, model_spec
from swdriver_shim.adapters.vllm.lora import TICK_NS
from swdriver_shim.adapters.vllm.worker import Worker
from swdriver_shim.data_plane.grants import NotGranted
from swdriver_shim.data_plane.worker.protocol import WorkerAddress
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.policy import Rules, Tier2Rule
from telemetry.emit import transfers
from telemetry.records import STREAM, decode
from tests.kvss_agent.process import agent, document, spec
from tests.live import wait_until


def setting(**more: Any) -> EngineConfig:
    home = AgentSpec(
        url="http://127.0.0.1:1", token="t" * 20, address="unix:/nowhere", memory_bytes=1 << 20
    )
    return replace(fresh(NameSpec(name="tiny"), "job7", ["acme", "strangers"], home), **more)


def facts(place: WorkerAddress | None = None, block_tokens: int = 32, each: int = 16) -> WorkerFacts:
    group = GroupFacts("full", block_tokens, None, each, 64)
    return WorkerFacts(place or WorkerAddress("", ""), [group], "vllm.1:abc", "float32")


def written(directory: Path, raw: bytes) -> Path:
    file = directory / "job7.json"
    file.write_bytes(raw)
    return file


def test_a_file_is_made_and_its_claims_are_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job7.json"
    made = ["prepare", str(file), "--model", "llama", "--agent", str(tmp_path), "--memory", "2GiB"]
    assert main(made) == 1
    assert "start the agent with --state-dir" in capsys.readouterr().err
    (tmp_path / "token").write_text("the token of the agent\n")
    assert main([*made, "--agent-url", "127.0.0.1:8410"]) == 1
    assert "Expected `str` matching regex '^https?://'" in capsys.readouterr().err
    assert not file.exists(), "what is not valid is not written"
    assert main([*made, "--org", "acme", "--tier2", str(tmp_path / "disk")]) == 0
    assert file.stat().st_mode & 0o077 == 0, "there are secrets in it"
    found = read(file)
    assert found.agent
    assert (found.driver, found.agent.memory_bytes) == ("job7", 2 << 30)
    assert found.agent.tier2 == {"kind": "posix", "path": f"{tmp_path}/disk", "cap_bytes": 10 << 30}
    assert main(made) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["claim", str(file), "--org", "acme", "--no-store", "--ttl", "60"]) == 0
    token = capsys.readouterr().out.strip()
    judge = ClaimVerifier(found.claims_key, "job7")
    assert judge.verify(token) == Claim("acme", Rules(no_store=True, ttl_seconds=60))
    assert main(["claim", str(file), "--org", "acme", "--store-tokens", "64", "--tier2", "never"]) == 0
    token = capsys.readouterr().out.strip()
    strict = Rules(store_tokens_max=64, tier2=Tier2Rule.NEVER)
    assert judge.verify(token) == Claim("acme", strict)
    assert main(["claim", str(file), "--org", "globex"]) == 1
    assert "has no org globex" in capsys.readouterr().err
    assert main(["claim", str(file), "--org", "acme", "--priority", "101"]) == 1


def test_what_is_wrong_with_a_file_is_said_in_a_sentence(tmp_path: Path) -> None:
    good = setting()
    for raw, why in [
        (b"{", "job7.json"),
        (msgspec.json.encode(replace(good, agent=None)), "set either `agent`"),
        (msgspec.json.encode(replace(good, unsigned_org="nobody")), "`unsigned_org` is nobody"),
        (msgspec.json.encode({**msgspec.to_builtins(good), "modle": 1}), "modle"),
    ]:
        with pytest.raises(Invalid, match=why):
            read(written(tmp_path, raw))
    with pytest.raises(Invalid, match="can't be read"):
        read(tmp_path / "none.json")
    wrong = msgspec.json.encode(replace(good, agent=replace(good.agent, address="nowhere")))  # type: ignore[type-var]
    with pytest.raises(Invalid, match="the agent's address"):
        read(written(tmp_path, wrong))


def test_engines_beside_each_other_have_a_file_each() -> None:
    assert file_of("/etc/job7.json", 0, 1) == Path("/etc/job7.json")
    assert file_of("/etc/job7-{rank}.json", 0, 1) == Path("/etc/job7-0.json")
    assert file_of("/etc/job7-{rank}.json", 3, 4) == Path("/etc/job7-3.json")
    for rank, engines in [(0, 2), (1, 2), (1, 1)]:  # vLLM tells engines of dense models of no others
        with pytest.raises(Unsupported, match=r"\{rank\}"):
            file_of("/etc/job7.json", rank, engines)


def test_a_model_is_what_its_workers_say() -> None:
    model = model_spec(NameSpec(name="tiny"), [facts(each=16), facts(each=8)])
    assert model.groups[0].bytes_per_token == (16, 8)
    assert (model.unit_tokens, model.kv_dtype) == (64, "float32")
    other = model_spec(NameSpec(name="tiny"), [facts(each=16)])
    assert other.namespace() != model.namespace(), "each shard has another part of the heads then"
    with pytest.raises(Unsupported, match="differ in their kinds"):
        model_spec(NameSpec(name="tiny"), [facts(), facts(block_tokens=64)])


@pytest.mark.parametrize("theirs", ["theirs", "job77.full.0", "job7.b.full.0", "job7.full"])
def test_an_agent_of_somebody_else_is_left_alone(tmp_path: Path, theirs: str) -> None:
    with agent(tmp_path / "agent") as one:
        one.tell(document(1, spec(theirs)))
        with pytest.raises(NotGranted, match=f"has the shard {theirs}, which is not of job7"):
            EngineDriver(at(one, tmp_path), [facts()])
        assert [shard["name"] for shard in one.observed()["shards"]] == [theirs]


def test_an_agent_that_is_not_there_is_said_in_a_sentence() -> None:
    with pytest.raises(NotGranted, match="does not answer"):
        EngineDriver(setting(), [facts()])
    with pytest.raises(Invalid, match="less than one column"):
        EngineDriver(setting(), [facts(each=1 << 20)])


def at(one: Any, directory: Path, **more: Any) -> EngineConfig:
    home = AgentSpec(
        url=str(one.http.base_url).rstrip("/"),
        token=(directory / "agent" / "token").read_text().strip(),
        address=f"unix:{directory}/agent/data.sock",
        memory_bytes=1 << 20,
    )
    return setting(agent=home, **more)


@contextlib.contextmanager
def deciding_at(
    directory: Path, *, has_media_hashes: bool = True, **more: Any
) -> Iterator[tuple[EngineDriver, EngineConfig, Worker]]:
    with agent(directory / "agent") as one:
        told = at(one, directory, **more)
        half = WorkerServer()
        layer = Layer("0", memoryview(bytearray(512 * 30)), 0, 512, 512)
        worker = Worker(["full"], [Blocks([layer], 32, 64)], half)
        deciding = EngineDriver(told, [facts(half.address)], has_media_hashes=has_media_hashes)
        try:
            yield deciding, told, worker
        finally:
            deciding.close()
            worker.close()


def test_a_start_that_fails_leaves_no_connection_to_a_worker(tmp_path: Path) -> None:
    """Its scheduler may be gone on with, or tried again, while the workers live."""

    def all_ended(workers: list[WorkerServer]) -> bool:
        return all(worker._connection is None for worker in workers)

    halves = [WorkerServer(), WorkerServer()]
    with agent(tmp_path / "agent") as one, socket.create_server(("127.0.0.1", 0)) as taken:
        api = ApiSpec(host="127.0.0.1", port=taken.getsockname()[1], token="t" * 20)
        nobody = WorkerAddress(str(tmp_path / "nobody"), "")
        for places, more in [
            ([half.address for half in halves], {"api": api}),
            ([halves[0].address, nobody], {}),
        ]:
            with pytest.raises(OSError):  # noqa: PT011 - of the system, in its words
                EngineDriver(at(one, tmp_path, **more), [facts(place) for place in places])
            wait_until("no connection is left", lambda: all_ended(halves))
    for half in halves:
        half.close()


def test_the_log_names_the_model_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), deciding_at(tmp_path):
        assert 'model: {"name":"tiny"' in caplog.text


def test_an_api_that_others_can_reach_is_warned_of_as_that_of_a_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents with the secrets of orgs come over it, and a file of an engine has no certificates."""
    for host, is_warned in (("127.0.0.1", False), ("0.0.0.0", True)):  # noqa: S104
        with socket.create_server((host, 0)) as free:
            api = ApiSpec(host=host, port=free.getsockname()[1], token="t" * 20)
        (tmp_path / host).mkdir()
        with deciding_at(tmp_path / host, api=api):
            assert ("control API is plain HTTP on 0.0.0.0" in caplog.text) == is_warned


def asking(token: object = None, **more: Any) -> Any:
    plain: dict[str, Any] = {
        "mm_features": [],
        "prompt_embeds": None,
        "pooling_params": None,
        "lora_request": None,
        "resumable": False,
        "kv_transfer_params": {"tidegate": token} if token else None,
    }
    return SimpleNamespace(**{**plain, **more})


@pytest.mark.parametrize("unsigned", [None, "strangers"])
def test_a_request_is_asked_in_the_name_of_its_claim_or_nobodys(
    tmp_path: Path, unsigned: str | None
) -> None:
    with deciding_at(tmp_path, unsigned_org=unsigned) as (deciding, told, _):
        assert deciding.shim.is_ready

        def org(request: Any) -> str | None:
            asker = deciding.who(request)
            return asker.keys.org if asker else None

        good = mint(told.claims_key, "job7", "acme")
        assert org(asking(good)) == "acme"
        lent = deciding.who(asking(mint(told.claims_key, "job7", "acme", sibling="job8")))
        assert lent is not None
        assert lent.sibling == "job8"
        assert org(asking()) == unsigned
        assert org(asking(good[:-5] + "aaaaa")) == unsigned
        assert org(asking(kv_transfer_params=["tidegate"])) == unsigned
        assert org(asking(mint(told.claims_key, "job7", "globex"))) is None
        assert deciding.refused["unknown_org"] == 1
        image = SimpleNamespace(mm_position=SimpleNamespace(offset=3, length=5), identifier="a1b2")
        assert org(asking(good, mm_features=[image])) == "acme"
        assert org(asking(good, prompt_embeds=object())) is None, "nobody can tell what they are"
        assert org(asking(good, resumable=True)) is None
        claimed = mint(told.claims_key, "job7", "strangers")
        assert org(asking(claimed)) == (None if unsigned else "strangers")
        assert deciding.reset()


def test_an_adapter_is_its_weights_and_not_its_path(tmp_path: Path) -> None:
    """vLLM may load it anew at any time: after a change nobody knows with which ones it computes."""
    weights = tmp_path / "poems" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    lora = SimpleNamespace(lora_name="poems", lora_path=str(weights.parent))

    def name(home: str, asked: Any = lora) -> str | None:
        (tmp_path / home).mkdir()
        last = weights.stat().st_ctime_ns
        wait_until("the engine is started after the change", lambda: time.time_ns() - TICK_NS > last)
        with deciding_at(tmp_path / home) as (deciding, told, _):
            claim = mint(told.claims_key, "job7", "acme")
            found = deciding.who(asking(claim, lora_request=asked))
            if home == "first":
                assert found
                assert deciding.who(asking(claim, lora_request=asked)) == found
                weights.write_bytes(b"another")
                assert deciding.who(asking(claim, lora_request=asked)) is None
                assert deciding.refused["adapter_changed"] == 1
                assert deciding.who(asking(claim))
            return found.keys.namespace.adapter if found else None

    first, second = name("first"), name("second")
    assert first
    assert first.startswith("poems ")
    assert second
    assert second != first, "of other weights at the same path"
    assert name("third", SimpleNamespace(lora_name="poems", lora_path="org/of-a-hub")) is None


def test_images_that_the_engine_only_numbers_are_not_cached(tmp_path: Path) -> None:
    """Where it numbers them, the first image of each process has one name."""
    image = SimpleNamespace(
        mm_position=SimpleNamespace(offset=3, length=5), identifier="renderer0-mm-1-image-0"
    )
    with deciding_at(tmp_path, has_media_hashes=False) as (deciding, told, _):
        claim = mint(told.claims_key, "job7", "acme")
        assert deciding.who(asking(claim, mm_features=[image])) is None
        assert deciding.refused["media_without_hash"] == 1
        assert deciding.who(asking(claim))


@pytest.mark.parametrize(
    ("config", "depend"),
    [
        ({"rope_theta": 1e6}, False),
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4}}, False),
        ({"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}, True),
        ({"text_config": {"rope_scaling": {"type": "su"}}}, True),
        ({"rope_parameters": {"full": {"rope_type": "dynamic"}, "local": {}}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, True),
    ],
)
def test_which_models_tell_positions_by_the_longest_prompt(
    config: dict[str, Any], *, depend: bool
) -> None:
    assert depend_on_length(config) is depend


def test_a_configuration_is_the_same_wherever_it_was_found() -> None:
    def said(**more: Any) -> str:
        config = {"rope_theta": 1e6, "id2label": {0: "a", 1: "b"}, "text_config": {"heads": 8}, **more}
        return json.dumps(deciding_facts(config), sort_keys=True)

    assert said(_name_or_path="/a", other=object()) == said(_name_or_path="/b", other=object())
    assert said(text_config={"heads": 4}) != said()
    assert deciding_facts({"kinds": {"c", "a", "b"}}) == {"kinds": ["a", "b", "c"]}


class Running:
    """A request of vLLM's that has computed what it was asked."""

    def __init__(self, token: str, tokens: int) -> None:
        self.__dict__.update(vars(asking(token)))
        self.request_id = "running"
        self.all_token_ids = list(range(tokens))
        self.num_tokens = tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.skip_reading_prefix_cache = False


@pytest.mark.parametrize("change", ["out", "secret"])
def test_of_an_org_that_is_taken_out_nothing_more_is_kept(tmp_path: Path, change: str) -> None:
    """Its requests that are under way go on, for nobody."""
    with deciding_at(tmp_path) as (deciding, setting, _):
        told = deciding.shim.desired
        assert told
        request = Running(mint(setting.claims_key, "job7", "acme"), 640)
        table = [list(range(1, 30))]
        assert deciding.scheduling.matched(request, 0) == (0, False)
        deciding.scheduling.allocated(request, table, 0)
        [stored] = deciding.scheduling.step({"running": 128}, lambda _: table, []).stores
        assert len(stored.columns[0]) == 2
        request.num_computed_tokens = 128
        acme, *others = told.orgs
        kept = [replace(acme, secret=b"another secret of the same org's")] if change == "secret" else []
        after = replace(told, generation=2, orgs=(*kept, *others))
        deciding.shim.set_desired(msgspec.json.encode(after))
        assert deciding.scheduling.step({"running": 512}, lambda _: table, []).stores == []


def test_its_numbers_and_slowest_transfers_are_told(tmp_path: Path) -> None:
    client: Any = redis.Redis.from_url(django.REDIS_URL)
    seen = client.xrevrange(STREAM, count=1)
    after = seen[0][0] if seen else b"0"
    with deciding_at(tmp_path, telemetry=django.REDIS_URL) as (deciding, setting, worker):
        request = Running(mint(setting.claims_key, "job7", "acme"), 129)
        table = [list(range(1, 30))]
        deciding.scheduling.matched(request, 0)
        deciding.scheduling.allocated(request, table, 0)
        step = deciding.scheduling.step({"running": 129}, lambda _: table, [])
        worker.load(step)
        worker.computed(step)
        wait_until("it is saved", deciding.scheduling.is_quiet)
    told = [fields for _, fields in client.xrange(STREAM, min=b"(" + after)]
    told = [fields for fields in told if decode(fields).name == "job7"]
    assert told
    [slow] = [one for fields in told for one in transfers.decode(fields)]
    assert (slow.org, slow.request, slow.stream) == ("acme", "running", "full.0")
    assert (slow.direction, slow.columns) == ("out", 2)


def test_a_stream_that_is_none_is_refused_in_a_sentence(tmp_path: Path) -> None:
    raw = msgspec.json.encode(setting(telemetry="localhost"))
    with pytest.raises(Invalid, match=r"`telemetry` has to be .*redis://"):
        read(written(tmp_path, raw))
