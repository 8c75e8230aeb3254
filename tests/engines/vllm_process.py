"""A real vLLM in a process of its own, on a small model with seeded random weights.

    python -m tests.engines.vllm_process DIRECTORY OPTIONS

It builds the model that OPTIONS name, if it is not in DIRECTORY, starts the engine, and answers each
line of JSON with one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from swdriver_shim.keys import COLUMN_TOKENS

QUIET: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # sums are split up by threads, and processes beside each other share cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as managers start it
}
STOP_SECONDS: Final = 60.0  # vLLM's own 5 are too few on a busy machine: who is killed leaves no notes
SETTLE_SECONDS: Final = 30.0
VOCABULARY: Final = 512
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # with the usual 0.02 a small model hardly looks at what came before
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


SOUND_TOKEN: Final = 3  # where a sound is
SOUND_SECONDS: Final = 6
SOUND_HERTZ: Final = 16_000
IMAGE_PIXELS: Final = 56
IMAGE_TOKENS: Final = 100  # before the prompt
LORA_RANK: Final = 8
DRAFT_LAYERS: Final = 2
STATEFUL: Final = {  # by the names of their configs
    "falcon_h1": "falcon_h1",
    "granite": "granitemoehybrid",
    "mamba2": "mamba2",
}


def build(kind: str, directory: Path) -> None:
    """A model of this kind: `llama` looks at everything, `mistral` at a window, `gemma3` at both,
    `qwen2_audio` hears, `blip2` sees, `phi3` tells positions by the longest prompt. `draft` guesses what
    `llama` says, often wrong. So do `eagle` and `eagle3`, by its hidden states. `mimo` guesses what it
    says itself, by one more layer. Those of `STATEFUL` have layers that keep a state."""
    import torch

    if kind in STATEFUL:
        build_stateful(kind, directory)
        return
    others = {
        "qwen2_audio": build_audio,
        "blip2": build_images,
        "draft": build_draft,
        "eagle": build_eagle,
        "eagle3": build_eagle3,
        "mimo": build_mimo,
        "phi3": build_phi3,
    }
    if build_other := others.get(kind):
        build_other(directory)
        return
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(7)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SHAPE))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(num_hidden_layers=3, sliding_window=256, **SHAPE))
    else:
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            num_hidden_layers=len(layers), sliding_window=256, layer_types=layers, **SHAPE
        )
        model = Gemma3ForCausalLM(config)
    model.save_pretrained(directory)


def build_phi3(directory: Path) -> None:
    """Trained for 2,048 tokens; for longer prompts it is told all positions otherwise."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(7)
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    pairs = SHAPE["head_dim"] // 2
    rope = {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    config = Phi3Config(
        num_hidden_layers=3, original_max_position_embeddings=2048, rope_scaling=rope, **shape
    )
    Phi3ForCausalLM(config).save_pretrained(directory)


def build_stateful(kind: str, directory: Path) -> None:
    """With attention and Mamba 2 in each layer, or in turns; with nothing but Mamba 2."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(STATEFUL[kind], **stateful_shape(kind))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def stateful_shape(kind: str) -> dict[str, Any]:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    without_head = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    if kind == "falcon_h1":
        return {"num_hidden_layers": 2, "mamba_d_ssm": 256, **mamba, **SHAPE}
    if kind == "granite":
        layers = ["mamba", "attention"] * 2
        more = {"shared_intermediate_size": 64, "num_local_experts": 0, "mamba_expand": 2}
        return {"num_hidden_layers": 4, "layer_types": layers, **mamba, **more, **without_head}
    few = ("vocab_size", "hidden_size", "initializer_range", "bos_token_id", "eos_token_id")
    shape = {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1, "expand": 2}
    return {"num_hidden_layers": 3, **shape, **{name: SHAPE[name] for name in few}}


def build_draft(directory: Path) -> None:
    """Smaller than `llama`, and what it says is like that now and then: it has its first layers."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(directory.parent / "llama")
    llama.model.layers = llama.model.layers[:DRAFT_LAYERS]
    llama.config.num_hidden_layers = DRAFT_LAYERS
    llama.save_pretrained(directory)


def build_eagle(directory: Path) -> None:
    """One layer with random weights, under the names of EAGLE's checkpoints."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"], **SHAPE)
    config.save_pretrained(directory)
    hidden = SHAPE["hidden_size"]
    weights = {
        name.removeprefix("model."): each
        for name, each in LlamaForCausalLM(config).state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * SHAPE["initializer_range"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def build_eagle3(directory: Path) -> None:
    """As `eagle`, but its layer sees the embedding beside hidden states of three layers of `llama`."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"], **SHAPE)
    config.draft_vocab_size = SHAPE["vocab_size"]
    config.save_pretrained(directory)
    hidden, spread = SHAPE["hidden_size"], SHAPE["initializer_range"]
    known = LlamaForCausalLM(config).state_dict()
    weights = {
        name.replace("model.layers.0", "midlayer").removeprefix("model."): each
        for name, each in known.items()
        if "embed_tokens" not in name
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        at = f"midlayer.self_attn.{name}.weight"
        weights[at] = torch.randn(len(weights[at]), 2 * hidden) * spread
    weights["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = torch.randn(hidden, 3 * hidden) * spread
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def build_mimo(directory: Path) -> None:
    """A Qwen 2 with a layer for multi-token prediction (MTP), as MiMo's checkpoints have it."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(10)
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    config = Qwen2Config(num_hidden_layers=3, **shape)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    config.architectures = ["MiMoForCausalLM"]
    config.num_nextn_predict_layers = 1
    config.save_pretrained(directory)
    file = directory / "model.safetensors"
    weights, hidden = load_file(file), SHAPE["hidden_size"]
    more = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, **shape)).state_dict()
    of_layer = "model.layers.0."
    at = "model.mtp_layers.0."
    weights |= {
        at + name.removeprefix(of_layer): each
        for name, each in more.items()
        if name.startswith(of_layer)
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{at}{name}.weight"] = torch.ones(hidden)
    weights[f"{at}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * SHAPE["initializer_range"]
    save_file(weights, file, metadata={"format": "pt"})


def build_audio(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(7)
    mel_bins = 32
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = Qwen2AudioConfig(
        text_config=Qwen2Config(num_hidden_layers=3, **shape),
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=mel_bins,
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=64,
            initializer_range=SHAPE["initializer_range"],
        ),
        audio_token_index=SOUND_TOKEN,
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(directory)
    weights = directory / "model.safetensors"  # vLLM knows the names of published checkpoints
    named = {
        name.replace("language_model.model.model.", "language_model.model."): each
        for name, each in load_file(weights).items()
    }
    save_file(named, weights, metadata={"format": "pt"})
    fast = tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    hears = WhisperFeatureExtractor(feature_size=mel_bins)
    Qwen2AudioProcessor(feature_extractor=hears, tokenizer=fast).save_pretrained(directory)


def build_images(directory: Path) -> None:
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    torch.manual_seed(7)
    std = SHAPE["initializer_range"]
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    tower |= {"num_hidden_layers": 2, "initializer_range": std}
    text = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        word_embed_proj_dim=128,
        num_hidden_layers=3,
        ffn_dim=256,
        num_attention_heads=4,
        init_std=std,
    )
    seen = Blip2VisionConfig(image_size=IMAGE_PIXELS, patch_size=14, **tower)
    queries = Blip2QFormerConfig(
        vocab_size=VOCABULARY, encoder_hidden_size=32, cross_attention_frequency=1, **tower
    )
    config = Blip2Config(
        vision_config=seen.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=3,
    )
    model = Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens, std=0.5)
    model.save_pretrained(directory)
    sees = BlipImageProcessor(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
    Blip2Processor(
        image_processor=sees, tokenizer=tokenizer(["<image>"]), num_query_tokens=IMAGE_TOKENS
    ).save_pretrained(directory)


def tokenizer(special: list[str]) -> Any:
    """One of single words, these first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *special]
    words += [f"word{number}" for number in range(len(words), VOCABULARY)]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
    )


def build_adapter(name: str, directory: Path) -> None:
    """A LoRA adapter of `llama` with weights by its name, in the files that peft writes."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(sum(name.encode()))
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    weights = {}
    for layer in range(3):
        at = f"base_model.model.model.layers.{layer}.self_attn"
        weights[f"{at}.q_proj.lora_A.weight"] = torch.randn(LORA_RANK, hidden)
        weights[f"{at}.q_proj.lora_B.weight"] = torch.randn(heads, LORA_RANK)
        weights[f"{at}.o_proj.lora_A.weight"] = torch.randn(LORA_RANK, heads)
        weights[f"{at}.o_proj.lora_B.weight"] = torch.randn(hidden, LORA_RANK)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA_RANK, "lora_alpha": LORA_RANK}
    told |= {"target_modules": ["q_proj", "o_proj"], "bias": "none", "lora_dropout": 0.0}
    (directory / "adapter_config.json").write_text(json.dumps(told))


class Engine:
    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        kind, setting = options.pop("model"), options.pop("setting", None)
        staged = options.pop("staged", False)
        guesses = options.get("speculative_config") or {}
        if draft := guesses.get("model"):
            guesses["model"] = str(directory / draft)
        if events := options.get("kv_events_config"):
            options["kv_events_config"] = KVEventsConfig(**events)
        model = directory / kind
        for needed in (kind, *([draft] if draft else [])):
            if not (directory / needed).exists():
                build(needed, directory / needed)
        connector = KVTransferConfig(
            kv_connector="TidegateConnector",
            kv_connector_module_path="swdriver_shim.adapters.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=options.pop("on_failure", "recompute"),
            kv_connector_extra_config={"tidegate": setting, "staged": staged},
        )
        usual = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "block_size": 32,
            "seed": 0,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        self.told: dict[str, list[str]] = {"stored": [], "removed": []}
        self.llm = LLM(
            model=str(model),
            kv_transfer_config=connector if setting else None,
            **{**usual, **options},
        )
        self._directory = directory
        self._adapters: list[str] = []
        if events:
            self._listen()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown(timeout=STOP_SECONDS)

    def generate(
        self,
        prompts: list[list[int]],
        claims: list[str | None],
        tokens: int,
        media: dict[str, list[int]] | None = None,
        adapter: str | None = None,
    ) -> list[dict[str, Any]]:
        """`media`: the seed of the one `audio` or `image` of each prompt."""
        asked: list[Any] = [{"prompt_token_ids": one} for one in prompts]
        for kind, seeds in (media or {}).items():
            for one, seed in zip(asked, seeds, strict=True):
                one["multi_modal_data"] = {kind: sound(seed) if kind == "audio" else image(seed)}
        done = self.llm.generate(
            asked,
            [sampling(claim, tokens) for claim in claims],
            use_tqdm=False,
            lora_request=self._adapter(adapter) if adapter else None,
        )
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "cached": one.num_cached_tokens,
                "reason": one.outputs[0].finish_reason,
            }
            for one in done
        ]

    def _adapter(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        directory = self._directory / f"adapter-{name}"
        if not directory.exists():
            build_adapter(name, directory)
        if name not in self._adapters:
            self._adapters.append(name)
        return LoRARequest(name, self._adapters.index(name) + 1, str(directory))

    def give_up_in_a_load_that_fails(self, prompt: list[int], claim: str) -> int:
        """How many requests that was."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.request import RequestStatus

        from kvss_agent.client import Miss

        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        worker = get_kv_transfer_group()._worker
        shard, computed = worker.shard(0), worker.computed
        given_up: list[str] = []

        def computing(step: Any) -> None:
            computed(step)
            if step.loads:
                given_up.extend(scheduler.requests)
                scheduler.finish_requests(set(given_up), RequestStatus.FINISHED_ABORTED)

        worker.computed, shard.view = (
            computing,
            lambda looks, _: nullcontext([Miss.CORRUPT] * len(looks)),
        )
        try:
            engine.add_request("given up", {"prompt_token_ids": prompt}, sampling(claim, 12))
            while scheduler.has_requests():
                engine.step()
        finally:
            del worker.computed, shard.view
        engine.abort_request(["given up"])
        return len(given_up)

    def fail_loads(self, *, of_states: bool = False) -> None:
        """From here on: whatever column, or whatever state, is to be loaded, it is damaged."""
        from kvss_agent.client import Miss

        for shard in self._shards(of_states=of_states):
            shard.view = lambda looks, _: nullcontext([Miss.CORRUPT] * len(looks))

    def fail_loads_of_states(self) -> None:
        self.fail_loads(of_states=True)

    def exchange_states(self) -> None:
        """From here on: whatever state is to be loaded, another one comes, and nobody says so."""
        from kvss_agent.client import Miss

        def exchanging(view: Any) -> Any:
            @contextmanager
            def other(looks: Any, transfer: Any) -> Iterator[list[Any]]:
                with view(looks, transfer) as columns:
                    yield [
                        one if isinstance(one, Miss) else memoryview(bytes(len(one))) for one in columns
                    ]

            return other

        for shard in self._shards(of_states=True):
            shard.view = exchanging(shard.view)

    def _shards(self, *, of_states: bool) -> list[Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        groups = range(len(worker.groups))
        return [worker.shard(at) for at in groups if worker.groups[at].shape.is_state or not of_states]

    def states(self) -> list[int]:
        """After how many tokens there are states, of all prompts."""
        ends = [(column.depth + 1) * COLUMN_TOKENS for column in self._states()]
        return sorted(ends)

    def lose_states(self, end: int) -> int:
        """Those after so many tokens. How many those are."""
        from kvss_agent.client import Miss

        lost = [column for column in self._states() if (column.depth + 1) * COLUMN_TOKENS == end]
        self._driver.refuse(dict.fromkeys(lost, Miss.STALE))
        return len(lost)

    def _states(self) -> list[Any]:
        driver = self._driver
        groups = [at for at, group in enumerate(driver.layout.groups) if group.is_state]
        accounts = driver.ledger.accounts.values()
        return [one for account in accounts for at in groups for one in account.columns(at)]

    @property
    def _driver(self) -> Any:
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        return connector._deciding.shim.driver

    def settle(self) -> bool:
        """Wait until what was computed is stored. Whether it is, as far as can be seen from here."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is None or core.scheduler.connector is None:
            return True  # the engine is in a process of its own, or stores nothing
        connector = core.scheduler.connector
        until = time.monotonic() + SETTLE_SECONDS
        while (stores := connector._deciding.scheduling._stores) and time.monotonic() < until:
            time.sleep(0.01)
        return not stores

    def guesses(self) -> tuple[int, int]:
        """Of a draft: how many, and how many of them were right."""
        found = {one.name: one for one in self.llm.get_metrics()}
        of = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
        made, right = (int(found[name].value) for name in of)
        return made, right

    def forget_blocks(self) -> bool:
        """Of vLLM's own cache."""
        return bool(self.llm.llm_engine.reset_prefix_cache())

    def reset(self) -> bool:
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_connector=True))

    def events(self) -> dict[str, list[str]]:
        """Of the connector, so far: the blocks of each, by their hashes."""
        list(self.connector.take_events())
        return self.told

    def _listen(self) -> None:
        """To what the connector gives to vLLM's scheduler."""
        self.connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        take = self.connector.take_events

        def taking() -> list[Any]:
            taken = list(take())
            for one in taken:
                kind = "stored" if type(one).__name__ == "BlockStored" else "removed"
                self.told[kind].append(repr(one.block_hashes))
            return taken

        self.connector.take_events = taking

    def steps_overlap(self) -> bool:
        return bool(self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def preemptions(self) -> int:
        found = [one for one in self.llm.get_metrics() if one.name == "vllm:num_preemptions"]
        return int(found[0].value)

    def metrics(self) -> dict[str, float]:
        """Of the connector's, in vLLM's own registry."""
        return {
            f"{one.name} {one.labels['kind']}": one.value
            for one in self.llm.get_metrics()
            if "tidegate" in one.name and hasattr(one, "value")
        }


def sound(seed: int) -> Any:
    import numpy as np

    noise = np.random.default_rng(seed).standard_normal(SOUND_SECONDS * SOUND_HERTZ)
    return noise.astype("float32"), SOUND_HERTZ


def image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3))
    return Image.fromarray(pixels.astype("uint8"))


def sampling(claim: str | None, tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"tidegate": claim}} if claim else None,
    )


def main() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    engine = Engine(Path(sys.argv[1]), json.loads(sys.argv[2]))
    said = os.fdopen(int(sys.argv[3]), "w", buffering=1)
    said.write('"ready"\n')
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        answer = getattr(engine, asked["verb"])(*asked["arguments"])
        said.write(json.dumps({"answer": answer, "seconds": time.perf_counter() - began}) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
