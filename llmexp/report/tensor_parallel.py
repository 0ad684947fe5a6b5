"""What more GPUs bring: throughput and latency, a GPU's share of it, capacity against the arithmetic, and how near a
round comes to its floor on the topology found."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from llmexp.analyze.compare import Comparison, Effect
from llmexp.analyze.study import Study
from llmexp.report.blocks import by_cell, filled, section
from llmexp.report.evidence import Place, gib, places, share, whole
from llmexp.report.style import Plot, colour, titled, wrapped
from llmexp.report.table import in_words, number, over, ratio
from llmexp.words import count

KEY = "gpu.tensor_parallel_size"
RATIOS = {
    "throughput_req_per_s": "throughput",
    "throughput_req_per_s_per_gpu": "throughput a GPU",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p95": "TTFT p95",
    "tpot_ms_p50": "TPOT p50",
    "e2e_ms_p50": "e2e p50",
    "e2e_ms_p95": "e2e p95",
    "kv_capacity_tokens": "KV capacity",
}
_FLOOR = {"limit_prefill_s": "prefill", "limit_decode_s": "decode", "limit_all_reduce_s": "all-reduce"}


def tensor_parallel_section(study: Study, comparison: Comparison) -> list[str]:
    """Tables and sentences of a study that compares degrees of tensor parallelism; nothing for others."""
    if comparison.factor != KEY:
        return []
    found = [place for place in places(study, comparison.levels) if place.runs]
    label = comparison.label
    baselines = {label(place.level.cell): place for place in found if place.level.arm == comparison.baseline}
    pairs = [
        (baselines[label(place.level.cell)], place)
        for place in found
        if place.level.arm != comparison.baseline and label(place.level.cell) in baselines
    ]
    lines = [*_a_gpu(comparison), *dict.fromkeys(_capacity(pairs))]
    return section(
        "Tensor parallelism",
        [
            "\n".join(f"- {line}" for line in lines),
            _ratios(comparison),
            f"Ratios to {KEY}={comparison.baseline}, with {comparison.confidence:.0%} intervals{over(comparison)} "
            "from 3 trials on.",
            _topology(found),
            "Links as `nvidia-smi topo -m` names them (NV18: 18 NVLinks, by which GPUs reach each other's memory). "
            "All-reduce: what adds up the partial sums by vLLM's log, its own kernel (custom), which needs that, or "
            "NCCL.",
            *_floors(found, comparison),
        ],
    )


def _a_gpu(comparison: Comparison) -> Iterator[str]:
    """Whether the GPUs do more together than apart, a sentence for each degree."""
    for arm in dict.fromkeys(pairing.arm for pairing in comparison.pairings):
        rows = [row for row in comparison.rows if row.arm == arm]
        whole_engine = [row for row in rows if row.measure == "throughput_req_per_s"]
        each = [row for row in rows if row.measure == "throughput_req_per_s_per_gpu"]
        if not each:
            continue
        cells = count(len(each), "cell")
        below, above = (
            sum(_beyond(row, side) if row.replicated else side * row.estimate > side for row in each)
            for side in (-1, 1)
        )
        by = " by its interval" if all(row.replicated for row in each) else ""
        yield (
            f"{KEY}={arm}: throughput is {_span(whole_engine)} that of {comparison.baseline}, and {_span(each)} a GPU, "
            f"in {cells}. A GPU does less in {below} and more in {above} of them{by}; where it does less, the same "
            f"GPUs serve more as engines of {comparison.baseline} each, if model and KV cache have room there."
        )


def _beyond(row: Effect, side: int) -> bool:
    """Whether the interval of a ratio is below (-1) or above (1) one."""
    return row.low is not None and row.high is not None and (row.low > 1 if side > 0 else row.high < 1)


def _span(rows: Sequence[Effect]) -> str:
    """`1.74 times` or, over several cells, `1.74 to 1.89 times`."""
    ends = sorted(row.estimate for row in rows)
    return f"{' to '.join(dict.fromkeys((ratio(ends[0]), ratio(ends[-1]))))} times"


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
        rows = [comparison.row(measure, pairing.cell, pairing.arm) for measure in RATIOS]
        texts = [in_words(row).replace("\n", ", ") for row in rows]
        lines.append([comparison.label(pairing.cell), pairing.arm, *texts])
    return filled(*by_cell(["cell", KEY, *RATIOS.values()], lines))


def _topology(found: Sequence[Place]) -> str:
    """What connects the GPUs of each degree, and what they hold: a line each, or more where runs differ."""
    lines: dict[tuple[str, ...], None] = {}
    for place in found:
        for run in place.runs:
            links = [str(run.engine.get(name) or "-") for name in ("links", "all_reduce", "nccl_version")]
            capacity = run.engine.get("kv_capacity_tokens")
            lines[place.level.arm, *links, gib(run.engine.get("model_memory_bytes")), whole(capacity)] = None
    header = [KEY, "links", "all-reduce", "NCCL", "weights on a GPU (GiB)", "KV cache (tokens)"]
    return filled(header, sorted(map(list, lines), key=lambda line: float(line[0])))


def _floors(found: Sequence[Place], comparison: Comparison) -> Iterator[str]:
    """How long a round took, and what each part of it takes at the least."""
    header = ["cell", KEY, "a round (s)", *(f"least for {name} (s)" for name in _FLOOR.values())]
    header += ["all-reduce, of the round", "reached"]
    lines = []
    for place in found:
        took_s, reduced_s = (place.level.mean(name) for name in ("duration_s", "limit_all_reduce_s"))
        lines.append(
            [
                comparison.label(place.level.cell),
                place.level.arm,
                number(took_s),
                *(place.mean(measure) for measure in _FLOOR),
                share(reduced_s / took_s) if took_s and reduced_s is not None else "-",
                place.mean("limit_share", share),
            ]
        )
    if all(line[-1] == "-" for line in lines):
        return
    yield filled(*by_cell(header, lines))
    rates = {run.config["gpu"].get("link_bytes_per_s") for place in found for run in place.runs} - {None}
    link = f", {' or '.join(f'{rate / 1e9:.0f}' for rate in sorted(rates))} GB/s in one direction" if rates else ""
    yield (
        "Least times by the datasheet's rates. All-reduce: two a layer of the hidden states of every token computed, "
        f"each of which sends 2 (n - 1) / n of its data over a GPU's link{link}. Parts may overlap, so the longest is "
        "the floor; reached: the floor over the time that a round took. An all-reduce of a decode step moves so little "
        "that its latency counts, which no floor knows."
    )
    slow = {links for place in found for run in place.runs if (links := run.engine.get("links")) and not _nvlink(links)}
    if slow and rates:
        yield (
            f"The links found ({', '.join(sorted(slow))}) are no NVLink, of which gpu.link_bytes_per_s speaks: the "
            "floor of the all-reduces is higher than stated here, and what was reached of it is more."
        )


def _nvlink(links: str) -> bool:
    return all(link.startswith("NV") for link in links.split(","))


def floor_plot(study: Study, comparison: Comparison) -> Plot | None:
    """The least times of a round's parts as shares of the time that it took; None for studies of other keys, or where
    the device's rates are not known."""
    if comparison.factor != KEY:
        return None
    found = [
        place
        for place in places(study, comparison.levels)
        if place.level.mean("duration_s") and place.level.mean("limit_s")
    ]
    if not found:
        return None
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(found)), layout="constrained")
    panel = figure.subplots()
    for style, (measure, name) in enumerate(_FLOOR.items()):
        shares = [(place.level.mean(measure) or 0.0) / (place.level.mean("duration_s") or 1.0) for place in found]
        ys = np.arange(len(found)) + 0.26 * (style - 1)
        hatch = ("", "////", "....")[style]
        panel.barh(ys, shares, height=0.24, facecolor="white", edgecolor=colour(style), hatch=hatch, label=name)
    for y, place in enumerate(found):
        text = f"{place.mean('duration_s')} s a round, {place.mean('limit_share', share)} reached"
        panel.text(1.01, y, text, fontsize=8, va="center", transform=panel.get_yaxis_transform())
    names = [f"{KEY}={place.level.arm}" for place in found]
    if len({comparison.label(place.level.cell) for place in found}) > 1:
        names = [f"{name}, {comparison.label(place.level.cell)}" for name, place in zip(names, found, strict=True)]
    panel.set_yticks(range(len(found)), [wrapped(name, 52) for name in names], fontsize=8)
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlim(0, 1)
    panel.set_xlabel("least time over the time that a round took", fontsize=9)
    panel.grid(axis="x", color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.legend(fontsize=8, loc="lower right")
    caption = (
        "Means over valid rounds and trials. Least times by the datasheet: arithmetic of the prefill, reading of "
        "weights and KV for decode, two all-reduces a layer. They may overlap, so the longest bar is the share reached."
    )
    return titled("floor", "How near a round comes to its floor", caption, comparison, figure)
