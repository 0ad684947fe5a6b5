"""What more GPUs bring: capacity against the arithmetic, throughput a GPU, latency, and the topology found."""

from collections.abc import Iterator

from llmexp.analyze.compare import Comparison
from llmexp.analyze.pairs import cell_label
from llmexp.analyze.study import Study
from llmexp.report.blocks import filled, section
from llmexp.report.evidence import Place, gib, places, share, whole
from llmexp.report.table import in_words

KEY = "gpu.tensor_parallel_size"
_RATIOS = {
    "throughput_req_per_s": "throughput",
    "throughput_req_per_s_per_gpu": "throughput a GPU",
    "ttft_ms_p50": "TTFT p50",
    "tpot_ms_p50": "TPOT p50",
    "e2e_ms_p50": "e2e p50",
    "e2e_ms_p95": "e2e p95",
}


def tensor_parallel_section(study: Study, comparison: Comparison) -> list[str]:
    """Tables and sentences of a study that compares degrees of tensor parallelism; nothing for others."""
    if comparison.factor != KEY:
        return []
    found = [place for place in places(study, comparison.levels) if place.runs]
    baselines = {cell_label(place.level.cell): place for place in found if place.level.arm == comparison.baseline}
    pairs = [
        (baselines[cell_label(place.level.cell)], place)
        for place in found
        if place.level.arm != comparison.baseline and cell_label(place.level.cell) in baselines
    ]
    return section(
        "Tensor parallelism",
        [
            _ratios(comparison),
            f"Ratios to {KEY}={comparison.baseline}, with {comparison.confidence:.0%} intervals from 3 trials on.",
            "\n".join(f"- {line}" for line in dict.fromkeys(_capacity(pairs))),
            _topology(found),
            "Links as `nvidia-smi topo -m` names them (NV18: 18 NVLinks); what adds up the partial sums by vLLM's log. "
            "Reached: the least time by the datasheet over the time that a round took.",
        ],
    )


def expected_capacity_ratio(base: Place, arm: Place) -> float | None:
    """The capacity that arithmetic expects of `arm` over that of `base`; None where a part is not known.

    Each GPU has the same memory for weights and KV cache: what the two took of it under `base`. Of that, each of n
    GPUs keeps its share of the weights, and the rest is cache: for halved weights twice the memory, less the
    weights once.
    """
    one, other = base.runs[0], arm.runs[0]
    capacity = base.level.mean("kv_capacity_tokens")
    known = [run.engine.get(name) for run in (one, other) for name in ("kv_bytes_per_token", "model_memory_bytes")]
    if capacity is None or any(value is None for value in known):
        return None
    a_token, weights, a_token_there, weights_there = (float(value) for value in known if value is not None)
    before, after = (float(run.config["gpu"]["tensor_parallel_size"]) for run in (one, other))
    a_gpu = capacity * a_token / before + weights
    return after * (a_gpu - weights_there) / a_token_there / capacity


def _capacity(pairs: list[tuple[Place, Place]]) -> Iterator[str]:
    for base, arm in pairs:
        before, after = (place.level.mean("kv_capacity_tokens") for place in (base, arm))
        if not before or not after:
            continue
        text = f"{KEY}={arm.level.arm}: the KV cache holds {after / before:.3f} times as many tokens"
        text += f" ({whole(before)} to {whole(after)})"
        expected = expected_capacity_ratio(base, arm)
        if expected is not None:
            weights = [place.runs[0].engine["model_memory_bytes"] for place in (base, arm)]
            text += (
                f"; arithmetic expects {expected:.3f} times: the same memory on every GPU, of which the weights take "
                f"{gib(weights[1])} GiB instead of {gib(weights[0])}"
            )
        yield f"{text}."


def _ratios(comparison: Comparison) -> str:
    lines = []
    for pairing in comparison.pairings:
        rows = [comparison.row(measure, pairing.cell, pairing.arm) for measure in _RATIOS]
        texts = [in_words(row).replace("\n", ", ") for row in rows]
        lines.append([cell_label(pairing.cell), pairing.arm, *texts])
    return filled(["cell", KEY, *_RATIOS.values()], lines)


def _topology(found: list[Place]) -> str:
    header = ["cell", KEY, "links", "all-reduce", "NCCL", "weights on a GPU (GiB)", "KV cache (tokens)"]
    header += ["req/s a GPU", "TPOT p50 (ms)", "reached"]
    lines = []
    for place in found:
        engine = place.runs[0].engine
        lines.append(
            [
                cell_label(place.level.cell),
                place.level.arm,
                *(str(engine.get(name) or "-") for name in ("links", "all_reduce", "nccl_version")),
                gib(engine.get("model_memory_bytes")),
                place.mean("kv_capacity_tokens", whole),
                place.mean("throughput_req_per_s_per_gpu"),
                place.mean("tpot_ms_p50"),
                place.mean("limit_share", share),
            ]
        )
    return filled(header, lines)
