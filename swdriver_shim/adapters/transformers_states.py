"""States of a transformers model: what layers of Mamba and linear attention keep of all tokens so far.

A layer keeps a few tensors of fixed shapes, and overwrites them with each token. All of them together
are one state of the model, and what a column of its state group stores. How large they are is asked of
the model itself, without its weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

NAME: Final = "state"
PROBE_TOKENS: Final = 16
PROBE_ENDS: Final = ((), (PROBE_TOKENS - 1,), (PROBE_TOKENS - 2,))  # of pieces: one, and two


class StateTensor(NamedTuple):
    """One tensor of a layer's state. `kind` is `conv` or `recurrent`; of each there may be several."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers that keep a state, as the tensors that they keep."""

    tensors: tuple[StateTensor, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.tensors)

    def read(self, past: DynamicCache) -> memoryview:
        """The state that the cache is in. Raises ValueError if it is not of the shape that the model's
        config says."""
        found = list(_tensors(past))
        if tuple(one for one, _ in found) != self.tensors:
            raise ValueError("the layers do not keep the states that the model's config says")
        parts = [tensor.detach().contiguous().view(torch.uint8).flatten() for _, tensor in found]
        return memoryview(torch.cat(parts).cpu().numpy())

    def write(self, past: DynamicCache, raw: memoryview, device: torch.device) -> None:
        """Bring a cache that has seen nothing into this state."""
        at = 0
        for one in self.tensors:
            part = torch.frombuffer(raw, dtype=torch.uint8, count=one.bytes, offset=at)
            tensor = part.clone().view(one.dtype).view(one.shape).to(device)
            layer = past.layers[one.layer]
            update = layer.update_conv_state if one.kind == "conv" else layer.update_recurrent_state
            update(tensor, state_idx=one.number)
            at += one.bytes


def has_states(config: PretrainedConfig) -> bool:
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def state_group(config: PretrainedConfig, dtype: torch.dtype) -> StateGroup | None:
    """The states of a model of this config and type; None if it has none."""
    if not has_states(config):
        return None
    decoder = config.get_text_config(decoder=True)
    with torch.device("meta"), torch.no_grad():  # shapes, without memory
        # What experts do by default has no shapes for all types.
        how = {"dtype": dtype, "experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_config(decoder, **how).eval()
        past = DynamicCache(config=decoder)
        model(input_ids=torch.zeros((1, 2), dtype=torch.long), **cached(model, past))
    return StateGroup(tuple(one for one, _ in _tensors(past)))


def cached(model: PreTrainedModel, past: DynamicCache) -> dict[str, Any]:
    """How a model is told its cache: those without attention have another name for it."""
    names = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in names else "cache_params"
    return {name: past, "use_cache": True}


def check_continues(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model computes the same in one piece as from a state on.

    Some layers in transformers compute several tokens as if nothing were before them. Then no prompt can
    be continued from a state, or computed in chunks.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[(7 * at + 3) % vocabulary for at in range(PROBE_TOKENS)]], device=model.device)
    once, *others = (list(_computed(model, ids, ends)) for ends in PROBE_ENDS)
    near = sqrt(torch.finfo(model.dtype).eps)  # what rounding may do, and a lost state does not
    for other in others:
        for right, got in zip(once, other, strict=True):
            if (right - got).abs().max() > near * right.abs().max():
                raise ValueError(
                    f"{type(model).__name__} does not continue from a state: in this version of "
                    "transformers, several tokens after others get another result than all at once"
                )


def _computed(
    model: PreTrainedModel, ids: torch.Tensor, ends: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """The logits of the last token and all states, computed in pieces that end at these places."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in pairwise((0, *ends, PROBE_TOKENS)):
            output = model(input_ids=ids[:, start:end], logits_to_keep=1, **cached(model, past))
    yield output.logits[0, -1].float()
    for _, tensor in _tensors(past):
        yield tensor.float()


def _tensors(past: DynamicCache) -> Iterator[tuple[StateTensor, torch.Tensor]]:
    for index, layer in enumerate(past.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for number, tensor in states.items():
                if tensor is not None:
                    yield StateTensor(index, kind, number, tuple(tensor.shape), tensor.dtype), tensor
