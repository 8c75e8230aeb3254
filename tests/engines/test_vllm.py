"""vLLM, the real one, answers the same with and without Tidegate, whatever happens in between."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from console.stack import endpoint
from swdriver_shim.adapters.claims import mint
from swdriver_shim.adapters.vllm.config import ApiSpec
from swdriver_shim.policy import Rules
from tests.engines.prompts import prompt
from tests.engines.running import Place, Plain, vllm
from tests.engines.vllm_process import SOUND_TOKEN, STOP_SECONDS
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.mark.parametrize("block_size", [32, 96, 128])
def test_the_same_answers_cold_and_warm_with_blocks_of_any_size(
    place: Place, plain: Plain, block_size: int
) -> None:
    place.setting = replace(place.setting, only_if_faster=True)
    with place.engine(block_size=block_size) as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached == [0]
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        unit = {32: 64, 96: 192, 128: 128}[block_size]
        assert engine.cached == [999 // unit * unit]
        longer = [*prompt(0)[:700], *prompt(1)[:300]]
        engine.answer(longer, "acme")
        assert engine.cached == [700 // unit * unit], "as far as they are the same"


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_blocks_as_those_of_a_device(place: Place, plain: Plain, model: str) -> None:
    """By way of copies, as where blocks are not in the host's memory."""
    with place.engine(model, staged=True) as engine:
        for _ in range(2):
            assert engine.answer(prompt(0), "acme") == plain[model, 0]
        assert engine.cached == [960]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_of_a_prompt_that_is_all_there_only_the_last_token_is_computed(place: Place, model: str) -> None:
    with vllm(place.models, model=model) as engine:
        alone = engine.answer(prompt(7, 512), None)
    with place.engine(model) as engine:
        for _ in range(2):
            assert engine.answer(prompt(7, 512), "acme") == alone
        assert engine.cached == [511]


def test_another_org_never_hits_and_the_same_org_does(place: Place, plain: Plain) -> None:
    with place.engine() as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.hits(prompt(0), "globex") == 0
        assert engine.hits(prompt(0), None) == 0
        assert engine.hits(prompt(0), None) == 0, "who does not say who they are is cached for nobody"
        assert engine.hits(prompt(0), "nobody-knows") == 0
        assert engine.hits(prompt(0), "acme") == engine.hits(prompt(0), "globex") == 960


def test_unsigned_requests_share_with_each_other_only_if_the_setting_says_so(place: Place) -> None:
    place.setting = replace(place.setting, unsigned_org="globex")
    with place.engine() as engine:
        engine.answer(prompt(0), "acme")
        assert engine.hits(prompt(0), None) == 0
        assert engine.hits(prompt(0), None) == 960
        assert engine.hits(prompt(0), "globex") == 0, "which nobody can claim"


def test_what_a_request_wishes_is_followed(place: Place, plain: Plain) -> None:
    with place.engine() as engine:
        assert engine.answer(prompt(0), "acme", Rules(no_store=True)) == plain["llama", 0]
        assert engine.hits(prompt(0), "acme") == 0
        assert engine.hits(prompt(0), "acme") == 960
        assert engine.answer(prompt(1), "acme", Rules(store_tokens_max=100)) == plain["llama", 1]
        assert engine.hits(prompt(1), "acme") == 64


def test_many_at_once_with_what_they_have_in_common(place: Place, plain: Plain) -> None:
    prompts = [[*prompt(0)[: 64 * (at + 1)], *prompt(at + 1)[:200]] for at in range(12)]
    with vllm(place.models) as engine:
        alone = engine.answer_all(prompts, None)
    with place.engine(max_num_batched_tokens=512) as engine:
        assert engine.answer_all(prompts, "acme") == alone
        assert engine.answer_all(prompts, "acme") == alone
        assert all(engine.cached)


def test_a_conversation_goes_on_from_its_answers(place: Place) -> None:
    with place.engine() as engine:
        first = engine.answer_all([prompt(0, 500)], "acme", tokens=200)[0]
        grown = [*prompt(0, 500), *first, *prompt(1, 50)]
        assert engine.hits(grown, "acme") == 699 // 64 * 64


def test_an_engine_in_processes_of_its_own(place: Place, plain: Plain) -> None:
    with place.engine(environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as engine:
        for _ in range(2):
            assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached == [960]


def test_beside_vllms_own_prefix_cache(place: Place, plain: Plain) -> None:
    with place.engine(enable_prefix_caching=True) as engine:
        for _ in range(2):
            assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached[0] >= 960
        shorter = [*prompt(0)[:320], *prompt(2)[:300]]
        engine.answer(shorter, "acme")
        assert engine.cached == [320]


def test_blocks_that_were_never_filled_are_not_found_in_vllms_own_cache(
    place: Place, plain: Plain
) -> None:
    """Their request is given up in the step of its load, which fails: nobody computes them anew."""
    with place.engine(enable_prefix_caching=True) as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.ask("forget_blocks")
        assert engine.setting
        claim = mint(engine.setting.claims_key, engine.setting.driver, "acme")
        assert engine.ask("give_up_in_a_load_that_fails", prompt(0), claim) == 1
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]


def test_after_a_restart_what_is_in_tier_2_comes_back(place: Place, plain: Plain) -> None:
    place.allow_tier2(wait_seconds=20)
    with place.engine() as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.hits(prompt(0), "acme") == 960
        wait_until("what was used again is copied", lambda: len(place.files) >= 15)
    with place.engine() as engine:
        goes_on = Rules(continue_id="chat-7")
        assert engine.answer(prompt(0), "acme", goes_on) == plain["llama", 0]
        assert engine.cached == [960], "it has waited for it"
        assert engine.hits(prompt(0), "globex") == 0


@pytest.mark.parametrize("processes", ["0", "1"])
def test_after_a_restart_what_is_in_memory_is_still_there(
    place: Place, plain: Plain, tmp_path: Path, processes: str
) -> None:
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    with place.engine(environment=several) as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
    with place.engine(environment=several) as engine:
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached == [960]
        assert engine.hits(prompt(0), "globex") == 0


def test_an_engine_whose_server_is_killed_ends_and_leaves_what_is_in_memory(
    place: Place, tmp_path: Path
) -> None:
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with contextlib.suppress(InterruptedError), place.engine(environment=several) as engine:
        cold = engine.answer(prompt(0), "acme")
        processes = psutil.Process(engine.process.pid).children(recursive=True)
        raise InterruptedError("its server is killed")
    assert processes
    wait_until("all have ended", lambda: not any(map(runs, processes)), STOP_SECONDS)
    with place.engine(environment=several) as engine:
        assert engine.answer(prompt(0), "acme") == cold
        assert engine.cached == [960]


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_an_agent_that_is_killed_while_it_is_used_fails_no_request(place: Place, plain: Plain) -> None:
    prompts = [prompt(seed) for seed in range(4)]
    expected = [plain["llama", seed] for seed in range(4)]
    with place.engine() as engine:
        assert engine.answer_all(prompts, "acme") == expected
        assert engine.answer_all(prompts, "acme") == expected
        assert engine.cached == [960] * 4
        place.agent.process.kill()
        place.agent.process.wait()
        assert engine.answer_all(prompts, "acme") == expected
        assert engine.answer_all(prompts, "acme") == expected
        assert engine.cached == [0] * 4


def test_a_purge_over_the_api_is_a_miss_with_its_reason(place: Place, plain: Plain) -> None:
    import httpx

    caller, port = "a caller's token of acme", endpoint.free_port()
    from swdriver_shim.desired import token_hash

    acme, globex = place.setting.orgs
    place.setting = replace(
        place.setting,
        orgs=(replace(acme, tokens=(token_hash(caller),)), globex),
        api=ApiSpec(host="127.0.0.1", port=port, token="the token of a controller"),
    )
    headers = {"authorization": f"Bearer {caller}"}
    with (
        place.engine() as engine,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as api,
    ):
        engine.answer(prompt(0), "acme")
        engine.answer(prompt(0), "globex")
        told = api.post("/v1/query", json={"tokens": prompt(0)}).json()
        assert told == {"tokens": 960, "asked": 1000}
        receipt = api.post("/v1/purge", json={}).raise_for_status().json()
        assert (receipt["done"], receipt["columns"]) == (True, 15)
        assert set(receipt["confirmed"]) == {"full.0"}
        why = api.post("/v1/explain", json={"tokens": prompt(0)}).json()["full"]
        assert {column["state"] for column in why[:15]} == {"purged"}
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached == [0]
        assert engine.hits(prompt(0), "globex") == 960
        refused = api.post("/v1/load", json={"tokens": prompt(0)})
        assert refused.status_code == 409
        assert "engine" in refused.text


def test_no_byte_is_moved_for_another_org(place: Place) -> None:
    import httpx

    token, port = "the token of a controller", endpoint.free_port()
    place.setting = replace(place.setting, api=ApiSpec(host="127.0.0.1", port=port, token=token))
    with place.engine() as engine:
        for org in ("acme", "globex", "acme"):
            engine.answer(prompt(0), org)
        page = httpx.get(
            f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {token}"}
        ).raise_for_status()
    moved = dict(re.findall(r"^swdriver_bytes_total\{(\S+)\} (\d+)$", page.text, re.MULTILINE))
    out = int(moved['org="acme",direction="out"'])
    assert out > 0
    assert int(moved['org="acme",direction="in"']) == out
    assert int(moved['org="globex",direction="out"']) == out, "it computed and stored its own"
    assert moved['org="globex",direction="in"'] == "0"


def test_a_reset_leaves_nothing_and_says_how_much_it_was(place: Place, plain: Plain) -> None:
    with place.engine() as engine:
        engine.answer(prompt(0), "acme")
        engine.answer(prompt(1), "globex")
        assert engine.ask("reset") is True
        assert engine.hits(prompt(0), "acme") == engine.hits(prompt(1), "globex") == 0
        assert engine.answer(prompt(0), "acme") == plain["llama", 0]
        assert engine.cached == [960]


def test_an_engine_that_would_fail_requests_for_missing_columns_does_not_start(place: Place) -> None:
    with pytest.raises(AssertionError, match="fails its request"), place.engine(on_failure="fail"):
        raise RuntimeError("it began")


@pytest.mark.parametrize("model", ["gemma3", "mistral"])
def test_layers_with_a_window_alone_and_beside_others(place: Place, plain: Plain, model: str) -> None:
    with place.engine(model, max_num_batched_tokens=256) as engine:
        for seed in range(3):
            assert engine.answer(prompt(seed), "acme") == plain[model, seed]
            assert engine.cached == [0]
        for seed in range(3):
            assert engine.answer(prompt(seed), "acme") == plain[model, seed]
            assert engine.cached == [960]
        assert engine.answer_all([prompt(seed) for seed in range(3)], "acme") == [
            plain[model, seed] for seed in range(3)
        ]
        assert engine.cached == [960] * 3
        assert engine.hits(prompt(0), "globex") == 0
        place.agent.process.kill()
        place.agent.process.wait()
        assert engine.answer(prompt(0), "acme") == plain[model, 0]


def test_preempted_requests_go_on_from_what_they_had(place: Place) -> None:
    prompts = [prompt(seed, 300) for seed in range(6)]
    with vllm(place.models) as engine:
        expected = engine.answer_all(prompts, None, tokens=260)
    # Room for about three of the six when they are done.
    with place.engine(num_gpu_blocks_override=56, max_model_len=1024) as engine:
        assert engine.answer_all(prompts, "acme", tokens=260) == expected
        assert engine.ask("preemptions") > 0
        assert engine.answer_all(prompts, "acme", tokens=260) == expected


def test_two_workers_each_with_a_shard(place: Place, plain: Plain) -> None:
    apart = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # two workers on one node of memory
    with place.engine(tensor_parallel_size=2, environment=apart) as engine:
        cold = engine.answer(prompt(0), "acme")
        assert engine.cached == [0]
        assert engine.answer(prompt(0), "acme") == cold
        assert engine.cached == [960]
        assert {shard["name"] for shard in place.agent.observed()["shards"]} == {
            "job7.full.0",
            "job7.full.1",
        }
        place.agent.process.kill()
        place.agent.process.wait()
        assert engine.answer(prompt(0), "acme") == cold


def test_an_agent_that_is_killed_in_the_middle_of_loads_fails_no_request(
    place: Place, plain: Plain
) -> None:
    """Over TCP, where columns are on their way when it happens."""
    prompts = [prompt(seed % 4) for seed in range(12)]
    expected = [plain["llama", seed % 4] for seed in range(12)]
    place.agent.stop()
    place.agent.http.close()
    place.agent.options = ("--plain-tcp", "yes", "--tcp", "127.0.0.1:0")
    place.agent.start()
    home = place.setting.agent
    assert home
    url = str(place.agent.http.base_url).rstrip("/")
    address = f"tcp:127.0.0.1:{place.agent.tcp}"
    place.setting = replace(place.setting, agent=replace(home, url=url, address=address))
    place.agent.options = ("--plain-tcp", "yes", "--tcp", f"127.0.0.1:{place.agent.tcp}")
    with place.engine() as engine:
        for delay in (0.005, 0.02, 0.05, 0.1):

            def is_warm() -> bool:
                assert engine.answer_all(prompts, "acme") == expected
                return bool(engine.cached == [960] * 12)

            wait_until("all of it is there", is_warm, 60)
            killer = threading.Timer(delay, place.agent.process.kill)
            killer.start()
            assert engine.answer_all(prompts, "acme") == expected
            killer.join()
            place.agent.kill()
            place.agent.start()


def test_what_it_does_is_counted_where_vllm_counts(place: Place) -> None:
    with place.engine() as engine:
        for org in ("acme", "acme", None):
            engine.answer(prompt(0), org)

        def counted() -> bool:
            engine.answer(prompt(3, 20), None)  # vLLM carries numbers along with outputs
            found = engine.ask("metrics")
            return bool(
                found.get("vllm:tidegate_tokens hit_dram") == 960
                and found.get("vllm:tidegate_tokens missed_never_stored") == 960
                and found.get("vllm:tidegate_bytes loaded") == found.get("vllm:tidegate_bytes saved")
                and found.get("vllm:tidegate_requests unsigned", 0) >= 2
            )

        wait_until("all of it is counted", counted)


def test_events_of_blocks_go_vllms_own_way(place: Place) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with place.engine(kv_events_config=events) as engine:
        engine.answer(prompt(0), "acme")
        wait_until("it is told", lambda: len(engine.ask("events")["stored"]) == 15)
        engine.ask("reset")
        engine.answer(prompt(3, 20), None)
        told = engine.ask("events")
        assert sorted(told["removed"]) == sorted(told["stored"])


@pytest.mark.skipif(
    "avx512" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM keeps FP8 on a CPU with AVX-512 only",
)
def test_engines_that_understand_bytes_in_another_way_share_nothing(
    place: Place, tmp_path: Path
) -> None:
    """Both keep a byte for each number: of which bits are the exponent is not in the shape."""
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    kinds = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3")
    hits = []
    for kind in kinds:
        with place.engine(kv_cache_dtype=kind, dtype="bfloat16") as engine:
            hits.append(engine.hits(prompt(0), "acme"))
            assert engine.hits(prompt(0), "acme") == 960
    assert hits == [0, 0, 0]


def test_engines_that_tell_positions_in_another_way_share_nothing(place: Place, tmp_path: Path) -> None:
    """An engine for prompts that are longer than those of its model's training rotates all keys
    otherwise, with the same weights, shapes and types."""
    place.setting = replace(place.setting, state_dir=str(tmp_path / "state"))
    hits = []
    for longest in (1500, 1500, 3000):
        with place.engine("phi3", max_model_len=longest) as engine:
            hits.append(engine.hits(prompt(0), "acme"))
    assert hits == [0, 960, 0]


AUDIO: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 1}}


def test_two_sounds_of_as_many_tokens_never_meet(place: Place) -> None:
    """The engine hears them: answers differ. What is before a sound is shared, and nothing behind it."""
    words = [max(token, 6) for token in prompt(0, 300)]
    asked = [*words[:200], SOUND_TOKEN, *words[200:]]
    with vllm(place.models, model="qwen2_audio", **AUDIO) as engine:
        plain = [engine.answer_all([asked], None, media={"audio": [seed]})[0] for seed in (1, 2)]
        assert plain[0] != plain[1]
    with place.engine("qwen2_audio", **AUDIO) as engine:
        for seed, cached in [(1, 0), (2, 192), (1, 448), (2, 448)]:
            assert engine.answer_all([asked], "acme", media={"audio": [seed]}) == [plain[seed - 1]]
            assert engine.cached == [cached], seed
        assert engine.answer_all([asked], "globex", media={"audio": [1]}) == [plain[0]]
        assert engine.cached == [0]
        both = engine.answer_all([asked, asked], "acme", media={"audio": [2, 1]})
        assert both == [plain[1], plain[0]]
        assert engine.cached == [448, 448]


IMAGES: dict[str, Any] = {**AUDIO, "limit_mm_per_prompt": {"image": 1}}


def test_two_images_of_as_many_tokens_never_meet(place: Place) -> None:
    asked = [max(token, 6) for token in prompt(0, 100)]  # behind an image of a hundred
    with vllm(place.models, model="blip2", **IMAGES) as engine:
        plain = [engine.answer_all([asked], None, media={"image": [seed]})[0] for seed in (1, 2)]
        assert plain[0] != plain[1]
    with place.engine("blip2", **IMAGES) as engine:
        for seed, cached in [(1, 0), (2, 0), (1, 192), (2, 192)]:
            assert engine.answer_all([asked], "acme", media={"image": [seed]}) == [plain[seed - 1]]
            assert engine.cached == [cached], seed


def test_images_that_vllm_only_numbers_are_not_cached(place: Place) -> None:
    """With neither of its own caches it does not look at what is in them."""
    asked = [max(token, 6) for token in prompt(0, 100)]
    numbered = {**IMAGES, "mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    with vllm(place.models, model="blip2", **numbered) as engine:
        plain = [engine.answer_all([asked], None, media={"image": [seed]})[0] for seed in (1, 2)]
    for seed in (1, 2):  # the first of each process has the same number
        with place.engine("blip2", **numbered) as engine:
            for _ in range(2):
                assert engine.answer_all([asked], "acme", media={"image": [seed]}) == [plain[seed - 1]]
                assert engine.cached == [0]


LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def test_adapters_never_meet_each_other_or_the_model_alone(place: Place) -> None:
    adapters = ["", "sql", "law"]
    with vllm(place.models, **LORA) as engine:
        plain = {one: engine.answer_all([prompt(0)], None, adapter=one) for one in adapters}
        assert len({str(answer) for answer in plain.values()}) == len(adapters), "they do something"
    with place.engine(**LORA) as engine:
        for cached in (0, 960):
            for one in adapters:
                assert engine.answer_all([prompt(0)], "acme", adapter=one) == plain[one]
                assert engine.cached == [cached], one
