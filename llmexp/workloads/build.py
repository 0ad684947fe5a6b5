"""From config to workload: one builder a kind, and what must hold for all of them."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llmexp.errors import WorkloadError
from llmexp.models import Model, with_longer_context
from llmexp.schema.workloads import WorkloadConfig
from llmexp.workloads.custom import custom
from llmexp.workloads.datasets import dataset
from llmexp.workloads.mixed import mixed
from llmexp.workloads.mmlu import mmlu
from llmexp.workloads.multi_turn import multi_turn
from llmexp.workloads.synthetic import shared_prefix, unique_prefix
from llmexp.workloads.traces import azure, mooncake
from llmexp.workloads.workload import Workload

BUILDERS: dict[str, Callable[[Any, Model], Workload]] = {
    "shared_prefix": shared_prefix,
    "unique_prefix": unique_prefix,
    "mixed": mixed,
    "multi_turn": multi_turn,
    "mmlu": mmlu,
    "custom": custom,
    "mooncake": mooncake,
    "azure": azure,
    "sharegpt": dataset,
    "alpaca": dataset,
}


def build(config: WorkloadConfig, model: Model) -> Workload:
    """Builds the workload of `config` in the tokens of `model`.

    The recipe is the config, what the builder adds (such as the hash of its source file) and the identity of
    the vocabulary. Raises WorkloadError if the source or a combination of knobs is wrong, or if a request is
    longer than the model allows.
    """
    workload = BUILDERS[config.kind](config, model)
    recipe = {**config.model_dump(mode="json"), **workload.recipe, "vocabulary": _vocabulary(model)}
    workload = replace(workload, recipe=recipe)
    _require_fit(workload, config, model)
    return workload


def _vocabulary(model: Model) -> str:
    special = ",".join(map(str, sorted(model.special_token_ids)))
    return f"{model.vocab_size} tokens, special {hashlib.sha256(special.encode()).hexdigest()[:12]}"


def _require_fit(workload: Workload, config: WorkloadConfig, model: Model) -> None:
    if not len(workload):
        raise WorkloadError(f"workload {workload.name}: no requests")
    if workload.prompt_tokens.min() < 1:
        raise WorkloadError(f"workload {workload.name}: request {workload.prompt_tokens.argmin()} has an empty prompt")
    total = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    too_long = np.flatnonzero(total > model.max_model_len)
    if len(too_long):
        worst = int(total.argmax())
        raise WorkloadError(
            f"workload {workload.name}: {len(too_long)} of {len(workload)} requests are too long for "
            f"{model.name}, whose max_model_len is {model.max_model_len}; the longest, request {worst}, has "
            f"{workload.prompt_tokens[worst]} prompt and {workload.output_tokens[worst]} output tokens; "
            f"{_advice(int(total[worst]), config, model)}"
        )


def _advice(tokens: int, config: WorkloadConfig, model: Model) -> str:
    """What to do about a request of too many tokens."""
    scale = getattr(config, "scale_lengths", None)
    shorter = "ask for shorter ones"
    if scale is not None:
        shorter += f", as with workload.scale_lengths={_rounded_down(scale * model.max_model_len / tokens)}"
    if tokens <= model.most_tokens:
        return f"set model.max_model_len={tokens} or more, of which the model takes {model.most_tokens}, or {shorter}"
    return f"{shorter}{with_longer_context(tokens)}"


def _rounded_down(share: float) -> str:
    """With two digits that count."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return f"{math.floor(share / unit) * unit:.2g}"
