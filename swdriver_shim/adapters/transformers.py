"""transformers: prefixes of prompts are refilled into a model's `DynamicCache` instead of computed.

    spec = model_spec(model.config, model.dtype, "llama", revision="r1")
    driver = Driver(spec.shape(), spec.name, shards)
    cache = PrefixCache(model, LocalPrefixes(driver, Keys("acme", org_secret, spec.namespace())))

    done = cache.prefill(tokens)          # done.logits of the last token; done.refilled tokens

    past = cache.refill(tokens)           # or let the model go on from there as it likes,
    answer = model.generate(ids, past_key_values=past)
    cache.store(answer, past)             # and keep what it has verified

In a console's fleet the driver joins, and is told its agents, orgs and policies:

    joined = JoinedDriver(JoinConfig(console="https://…", join="/run/secrets/join", name="job7"), spec,
                          "transformers")
    cache = PrefixCache(model, joined.prefixes("acme"))

A column of a group is 64 tokens, or fewer for a tail, each with what the group's layers keep of it: key
and value, layer by layer. Layers of Mamba and linear attention are a state group: `prefill` stores their
state at the end of each chunk, at the last column border before the prompt's end, and at its end.
Prompts come one at a time. Needs the extra `transformers`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from swdriver_shim.adapters import transformers_states
from swdriver_shim.adapters.model_config import deciding
from swdriver_shim.adapters.transformers_states import cached, check_continues, state_group
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.driver import Stored
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import AS_USUAL, Rules

if TYPE_CHECKING:
    from swdriver_shim.adapters.remote import Prefixes

CHUNK_TOKENS: Final = 512
FORMAT: Final = "transformers.2"  # of what is in a column
# Told beside the configuration, set when weights are loaded or by who asks a model; KV is the same.
NOT_DECIDING: Final = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    }
)
ROPE_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})

Tokens: TypeAlias = Sequence[int] | torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that keep the same tokens: all, or those of a window. `heads` are of each layer, and
    how many numbers one of its keys or values has."""

    name: str
    window: int | None
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]

    @property
    def widths(self) -> list[int]:
        """Numbers per token: of the first layer's keys, of its values, of the next one's keys …"""
        return [count * size for count, size in self.heads for _ in ("keys", "values")]


def layer_groups(config: PretrainedConfig) -> list[LayerGroup]:
    """The layers with KV, as the model's own cache keeps them. Raises ValueError for what has neither
    columns of tokens nor a state."""
    decoder = config.get_text_config(decoder=True)
    if kinds := _rope_kinds(decoder) & ROPE_BY_LENGTH:
        raise ValueError(f"with {min(kinds)} RoPE, KV depends on how long the whole prompt is")
    if getattr(decoder, "use_bidirectional_attention", None):
        raise ValueError("with bidirectional attention, KV depends on what follows")
    found: dict[int | None, list[int]] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
            found.setdefault(None, []).append(index)
        elif type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
            found.setdefault(layer.sliding_window, []).append(index)
        # A dummy looks at another layer's, and keeps nothing.
        elif type(layer) not in (DummyLayer, LinearAttentionLayer):
            raise ValueError(f"layer {index} keeps a {layer}, which has no columns of tokens")
    return [
        LayerGroup(
            "full" if window is None else f"window{window}",
            window,
            tuple(layers),
            tuple(_heads(decoder.per_layer_config[index]) for index in layers),
        )
        for window, layers in sorted(found.items(), key=lambda one: one[0] or 0)
    ]


def model_spec(
    config: PretrainedConfig,
    dtype: torch.dtype,
    name: str,
    revision: str,
    *,
    tokens_per_state: int = CHUNK_TOKENS,
) -> ModelSpec:
    """What a driver has to know of a model: the shape of its KV, and what makes it different.

    `name` and `revision` stand for the weights: KV is shared by all that say the same ones, and have the
    same configuration, which decides how positions are told. Of a window
    there is one token more than its layers keep, so that a prompt that is wholly there can be taken back
    by its last token, whose logits have to be computed. `tokens_per_state`: of so many tokens one slot
    for a state is granted. Raises ValueError.
    """
    groups, states = layer_groups(config), state_group(config, dtype)
    facts = json.dumps(deciding(config.to_dict(), NOT_DECIDING), sort_keys=True)
    shape = repr([facts, *((group.window, group.layers, group.heads) for group in groups)])
    more: tuple[GroupSpec, ...] = ()
    if states:
        shape += repr(states.tensors)
        more = (
            GroupSpec(
                name=transformers_states.NAME,
                bytes_per_state=(states.bytes,),
                tokens_per_state=tokens_per_state,
            ),
        )
    return ModelSpec(
        name=name,
        revision=revision,
        kv_dtype=str(dtype).removeprefix("torch."),
        layout=f"{FORMAT}:{hashlib.sha256(shape.encode()).hexdigest()[:32]}",
        groups=tuple(
            GroupSpec(
                name=group.name,
                bytes_per_token=(sum(group.widths) * dtype.itemsize,),
                window=group.window,
            )
            for group in groups
        )
        + more,
    )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt to go on from: `past` holds all of it, `logits` are those of its last token."""

    logits: torch.Tensor
    past: DynamicCache
    tokens: int
    refilled: int
    stored: Stored
    refill_seconds: float
    compute_seconds: float
    store_seconds: float

    @property
    def seconds(self) -> float:
        return self.refill_seconds + self.compute_seconds + self.store_seconds


class PrefixCache:
    """One model, and the stored prefixes of one org."""

    def __init__(
        self, model: PreTrainedModel, prefixes: Prefixes, *, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """`chunk_tokens`: so many at once are computed, and then stored. Raises ValueError if these
        prefixes are another model's, and for a model that can't be continued from a state."""
        if chunk_tokens < 1 or chunk_tokens % COLUMN_TOKENS:
            raise ValueError(f"a chunk is a number of columns, of {COLUMN_TOKENS} tokens each")
        if model.training:
            raise ValueError("a model that is trained makes other KV each time: model.eval()")
        theirs = prefixes.namespace
        apart = next((one.tokens_per_state for one in prefixes.layout.groups if one.is_state), 64)
        spec = model_spec(
            model.config, model.dtype, theirs.model, theirs.revision, tokens_per_state=apart
        )
        if (prefixes.layout, theirs) != (spec.shape(), spec.namespace(theirs.adapter)):
            raise ValueError("these prefixes are of another dtype or layout than the model's KV")
        self._model = model
        self._prefixes = prefixes
        self._groups = layer_groups(model.config)
        self._states = state_group(model.config, model.dtype)
        if self._states:
            check_continues(model)
        self._chunk_tokens = chunk_tokens

    def prefill(self, tokens: Tokens, rules: Rules = AS_USUAL) -> Prefilled:
        """Refill the longest prefix that is stored, compute the rest, store it chunk by chunk."""
        ids = _numbers(tokens)
        began = time.perf_counter()
        past, refilled = self._refill(ids)
        at = refilled
        refill_seconds = time.perf_counter() - began
        compute_seconds = store_seconds = 0.0
        stored = Stored(0, 0, 0)
        while True:
            # Chunks end at the same places whatever was refilled. Windows keep what they have gone past
            # until it is stored, and then no longer.
            end = self._end(len(ids), at)
            if at > refilled:
                _forget_passed(past)
            began = time.perf_counter()
            logits = self._compute(ids[at:end], past)
            computed = time.perf_counter()
            stored += self._store(ids, past, end, end, rules, at)
            self._prefixes.computed(end - at, computed - began)
            compute_seconds += computed - began
            store_seconds += time.perf_counter() - computed
            if end == len(ids):
                break
            at = end
        return Prefilled(
            logits, past, len(ids), refilled, stored, refill_seconds, compute_seconds, store_seconds
        )

    def _end(self, tokens: int, at: int) -> int:
        """Where the chunk ends that begins here. States are also wanted where the same prompt can be
        continued from next time: at the last column border before its last token."""
        end = min(tokens, at - at % self._chunk_tokens + self._chunk_tokens)
        last = (tokens - 1) // COLUMN_TOKENS * COLUMN_TOKENS
        return last if self._states and at < last < end else end

    def refill(self, tokens: Tokens) -> DynamicCache:
        """The KV of the longest prefix that is stored, without the last token, which is for the model
        to compute. Windows in it keep what they go past until it is cropped; states can't be taken
        back."""
        return self._refill(_numbers(tokens))[0]

    def _refill(self, ids: Sequence[int]) -> tuple[DynamicCache, int]:
        """And how many tokens it holds."""
        # From KV of the whole prompt the last token's is left out. A state can't be taken back by one.
        asked = ids[:-1] if self._states else ids
        rows = [
            torch.empty((len(ids), sum(group.widths)), dtype=self._model.dtype) for group in self._groups
        ]
        memory = [_bytes_of(one) for one in rows]
        state = memoryview(bytearray(self._states.bytes if self._states else 0))

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:  # noqa: ARG001 - one
            if group == len(memory):
                return state
            each = len(memory[group]) // len(ids)
            start = depth * COLUMN_TOKENS
            return memory[group][start * each : (start + tokens) * each]

        loaded = self._prefixes.load(asked, into).tokens if asked else 0
        past = DynamicCache(config=self._model.config)
        for layer in _windows(past):
            layer.activate_past_recording()
        length = min(loaded, len(ids) - 1)
        if not length:
            return past, 0
        if self._states:
            self._states.write(past, state, self._model.device)
        for index, group in enumerate(self._groups):
            first = self._prefixes.layout.groups[index].first_needed(loaded) * COLUMN_TOKENS
            there = rows[index][first:length].to(self._model.device)
            parts = iter(there.split(group.widths, dim=1))
            for layer_index, heads in zip(group.layers, group.heads, strict=True):
                layer = past.layers[layer_index]
                layer.update(*(_by_head(next(parts), heads) for _ in ("keys", "values")))
                if group.window is not None:
                    layer.cumulative_length = length  # it has counted from `first`
        return past, length

    def store(
        self,
        tokens: Tokens,
        past: DynamicCache,
        verified: int | None = None,
        rules: Rules = AS_USUAL,
    ) -> Stored:
        """Store what is not stored yet of the first `verified` tokens; of all that `past` holds, if it
        is not said. What a window has dropped already is left out, and so is the state if `past` holds
        more than what is verified. Of a model without attention `past` is taken for one of just the
        verified tokens, since it does not know."""
        ids = _numbers(tokens)
        if not self._groups and verified is None:
            raise ValueError("say what is verified: states do not tell how many tokens they are of")
        there = self._length(past) if self._groups else verified or 0
        verified = there if verified is None else verified
        if not 0 <= verified <= min(there, len(ids)):
            raise ValueError(
                f"{verified} of {len(ids)} tokens can't be verified: there is KV of {there}"
            )
        return self._store(ids, past, there, verified, rules, 0)

    def _store(
        self,
        ids: Sequence[int],
        past: DynamicCache,
        there: int,
        verified: int,
        rules: Rules,
        since: int,
    ) -> Stored:
        """Store from a cache of so many tokens. What is before `since` is not offered again."""

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:  # noqa: ARG001 - one
            if self._states and group == len(self._groups):
                return self._states.read(past)
            return _bytes_of(self._cut(self._groups[group], past, there, depth * COLUMN_TOKENS, tokens))

        kept = [min(_kept(past, layer) for layer in group.layers) for group in self._groups]
        since -= since % COLUMN_TOKENS
        first = [min(verified, max(since, there - count)) for count in kept]
        states = [there] if self._states and there == verified > 0 else []
        if self._states:
            first.append(0)
        return self._prefixes.store(ids, verified, read, rules, first, states=states)

    def _cut(
        self, group: LayerGroup, past: DynamicCache, there: int, start: int, count: int
    ) -> torch.Tensor:
        """So many tokens' rows of a group."""
        parts = []
        for index in group.layers:
            layer = past.layers[index]
            at = start - (there - _kept(past, index))
            there_of_it = (part.detach()[0, :, at : at + count] for part in (layer.keys, layer.values))
            parts += [part.transpose(0, 1).flatten(1) for part in there_of_it]
        rows = torch.cat(parts, dim=1)
        if [part.shape for part in parts] != [(count, width) for width in group.widths]:
            raise ValueError(f"the layers of {group.name} do not keep what the model's config says")
        if rows.dtype != self._model.dtype:
            raise ValueError(f"the cache keeps {rows.dtype}, the model {self._model.dtype}")
        return rows

    def _compute(self, ids: Sequence[int], past: DynamicCache) -> torch.Tensor:
        """The logits of the last one. `past` grows by all."""
        with torch.no_grad():
            asked = torch.tensor([ids], device=self._model.device)
            output = self._model(input_ids=asked, logits_to_keep=1, **cached(self._model, past))
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize()  # else storing would be taken for computing
        return output.logits[0, -1]

    def _length(self, past: DynamicCache) -> int:
        return int(past.layers[self._groups[0].layers[0]].get_seq_length())


def _windows(past: DynamicCache) -> list[DynamicSlidingWindowLayer]:
    return [layer for layer in past.layers if type(layer) is DynamicSlidingWindowLayer]


def _forget_passed(past: DynamicCache) -> None:
    """Drop what windows have gone past."""
    for layer in _windows(past):
        layer.crop(0)


def _kept(past: DynamicCache, layer: int) -> int:
    """How many tokens, the last ones, a layer has."""
    keys = past.layers[layer].keys
    return 0 if keys is None else int(keys.shape[-2])


def _by_head(rows: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """As caches have it: a batch of one, heads, tokens, numbers."""
    return rows.unflatten(1, heads).transpose(0, 1).unsqueeze(0)


def _bytes_of(rows: torch.Tensor) -> memoryview:
    """The tensor's own memory, or that of its copy on the CPU."""
    return memoryview(rows.cpu().view(torch.uint8).numpy().reshape(-1))


def _numbers(tokens: Tokens) -> list[int]:
    """One prompt's. Raises ValueError for none, and for a batch of several."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() == 2 and len(tokens) == 1:
            tokens = tokens[0]
        if tokens.dim() != 1:
            raise ValueError("prompts come one at a time")
        tokens = tokens.tolist()
    if not len(tokens):
        raise ValueError("a prompt has at least one token")
    return list(tokens)


def _heads(layer: PretrainedConfig) -> tuple[int, int]:
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads, size


def _rope_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding: one of all layers, or one of each kind of layer."""
    told: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = [told, *(one for one in told.values() if isinstance(one, Mapping))]
    return {str(one["rope_type"]) for one in each if "rope_type" in one}
