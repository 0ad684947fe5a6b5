"""What a search has found: every value tried, with the evidence beside it, as tables, in words and as a figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmexp.analyze.compare import Comparison
from llmexp.analyze.study import Study
from llmexp.report.blocks import filled, section
from llmexp.report.evidence import Place, engine_table, level, places, queue, share, whole
from llmexp.report.style import Plot, colour, curve, curve_marks, is_number, marked_axis, titled
from llmexp.report.table import number, ratio
from llmexp.results import SearchRecord

_GIB = 2**30
_FULL = 0.95  # peak use of KV blocks from which the cache is the limit
_OF_REQUESTS = ("max_num_seqs", "load.concurrency")  # keys that say how many requests there are to be at once

_ROOM = 1.3  # above the curves, for a legend

Tried = Sequence[tuple[float, Place]]


def search_section(study: Study, comparison: Comparison) -> list[str]:
    """The finding in words, the tables of all values tried, and why throughput stops rising; nothing for a study that
    did not search."""
    search = study.search
    if search is None:
        return []
    tried = [(_tried(place, comparison, search), place) for place in places(study, comparison.levels)]
    tried.sort(key=lambda point: point[0])
    if search.kind == "floor":
        return section("Search", [f"**{search.found}.**", *engine_table(comparison, [place for _, place in tried])])
    measured = [(value, place) for value, place in tried if place.runs]
    return section("Search", [f"**{search.found}.**", *_points(search, measured, comparison), *_why(search, measured)])


def _points(search: SearchRecord, tried: Tried, comparison: Comparison) -> Iterator[str]:
    """What clients saw at each value, and what the engine did there."""

    def served(measure: str) -> Callable[[Place], str]:
        return lambda place: level(place, measure, comparison.confidence)

    yield _table(
        search,
        tried,
        {
            "throughput (req/s)": served("throughput_req_per_s"),
            "TTFT p50 (ms)": served("ttft_ms_p50"),
            "TTFT p95 (ms)": served("ttft_ms_p95"),
            "e2e p95 (ms)": served("e2e_ms_p95"),
            "SLO met": lambda place: place.mean("goodput_share", share),
        },
    )
    yield _table(
        search,
        tried,
        {
            "in flight": lambda place: place.mean("mean_in_flight"),
            "running": lambda place: place.mean("requests_running_mean"),
            "tokens a step": lambda place: place.mean("tokens_per_step", whole),
            "time a step (ms)": lambda place: number(_step_ms(place)),
            "queue mean (ms)": lambda place: place.mean("queue_ms_mean"),
            "queue p95 (ms)": lambda place: queue(place, 95),
            "prompt pressure": lambda place: place.mean("prompt_pressure", ratio),
            "peak KV use": lambda place: place.mean("kv_usage_peak", share),
            "preemptions": lambda place: place.mean("preemptions"),
            "hit rate": lambda place: place.mean("cache_hit_rate", ratio),
            "tokens a chunk": lambda place: place.mean("tokens_per_chunk"),
            "GPU busy": lambda place: place.mean("gpu_utilization_mean", share),
            "reached": lambda place: place.mean("limit_share", share),
        },
    )
    yield (
        f"Means over trials and valid rounds; in brackets the {comparison.confidence:.0%} t interval, or both of two "
        "trials. In flight: requests sent and not answered. Running: those that the engine ran at once. "
        "Tokens and time a step: of all the round's steps. Prompt pressure: most prompt tokens in flight at once, over "
        "what the KV cache holds. Reached: the least time by the datasheet over the time that a round took."
    )


def _table(search: SearchRecord, tried: Tried, columns: Mapping[str, Callable[[Place], str]]) -> str:
    marks = {search.knee: " (knee)"} if search.knee != tried[-1][0] else {}
    lines = [
        [f"{value:g}{marks.get(value, '')}", *(text(place) for text in columns.values())] for value, place in tried
    ]
    return filled([search.key, *columns], lines)


def _why(search: SearchRecord, tried: Tried) -> list[str]:
    """What changed in the engine from the knee to the largest value tried, where throughput rises no more, and from
    the best value before it to each dip."""
    at = dict(tried)
    last = tried[-1][0]
    compared = [(f"Why it dips at {dip:g}", _best_below(dip, tried), dip) for dip in search.dips]
    if search.knee in at and last != search.knee:
        compared.append(("Why it stops there", float(search.knee), last))
    found = []
    for what, first, second in compared:
        told = [*_growth(at[first], at[second]), *_limits(search, at[first], at[second], second)]
        if lines := [line for line in told if line]:
            found += [
                f"{what}, by what changed from {search.key}={first:g} to {second:g}:",
                "\n".join(f"- {line}" for line in lines),
            ]
    return found


def _best_below(dip: float, tried: Tried) -> float:
    """The value below a dip at which throughput was best."""
    below = [(place.level.mean("throughput_req_per_s") or 0.0, value) for value, place in tried if value < dip]
    return max(below)[1]


def _growth(before: Place, after: Place) -> Iterator[str]:
    """How much more the engine did at once, and how much longer it took."""
    changes = {
        "Throughput": _ratio(before, after, "throughput_req_per_s"),
        "TTFT p95": _ratio(before, after, "ttft_ms_p95"),
        "e2e p95": _ratio(before, after, "e2e_ms_p95"),
    }
    known = [f"{name} {ratio(value)} times" for name, value in changes.items() if value is not None]
    if known:
        yield f"{', '.join(known)} what it was."
    tokens, first_ms, last_ms = _ratio(before, after, "tokens_per_step"), _step_ms(before), _step_ms(after)
    if tokens is None or not first_ms or not last_ms:
        return
    longer = last_ms / first_ms
    steps = (
        f"A step computes {ratio(tokens)} times as many tokens ({before.mean('tokens_per_step', whole)} to "
        f"{after.mean('tokens_per_step', whole)}) in {ratio(longer)} times the time ({number(first_ms)} to "
        f"{number(last_ms)} ms)"
    )
    if tokens < 1.05:
        yield f"{steps}: steps do not grow any more."
    else:
        gains = ", so larger batches gain nothing" if longer > tokens else ""
        yield f"{steps}: a token takes {ratio(longer / tokens)} times as long{gains}."


def _limits(search: SearchRecord, before: Place, after: Place, last: float) -> Iterator[str]:
    """Which of the limits that are known the engine has met: requests, KV cache, device."""
    in_flight, running = after.level.mean("mean_in_flight"), after.level.mean("requests_running_mean")
    if in_flight is not None and search.key in _OF_REQUESTS and in_flight < 0.9 * last:
        yield f"The load kept {number(in_flight)} requests in flight on average, not {last:g}."
    if in_flight is not None and running is not None and running < 0.9 * in_flight:
        waits = (
            f"; they waited {after.mean('queue_ms_mean')} ms on average" if after.level.mean("queue_ms_mean") else ""
        )
        yield f"Of {number(in_flight)} requests in flight the engine ran {number(running)} at once{waits}."
    used, preempted = after.level.mean("kv_usage_peak"), after.level.mean("preemptions")
    if used and preempted is not None:  # 0: too short a round for a sample
        full = used >= _FULL or preempted > 0
        is_limit = "The KV cache is full" if full else "The KV cache is not the limit"
        times = f"{number(preempted)} preemptions" if preempted else "no preemption"
        yield f"{is_limit}: {share(used)} of its blocks in use at most, {times} a round."
    shares = [place.level.mean("limit_share") for place in (before, after)]
    if None not in shares:
        reached = " and ".join(share(value) for value in shares)
        yield f"A round reaches {reached} of what the device's datasheet allows."
    chunks = _ratio(after, before, "tokens_per_chunk")
    if chunks is not None and abs(chunks - 1) > 0.1:
        per_chunk = " and ".join(place.mean("tokens_per_chunk") for place in (before, after))
        yield f"Tokens came {per_chunk} a chunk: the server sent {ratio(chunks)} times as many chunks a request."
    yield _busy(before, after)


def _busy(before: Place, after: Place) -> str:
    """For how long the GPU worked; empty where it was not asked."""
    shares, steps_ms = [], []
    for place in (before, after):
        busy, step_ms = place.level.mean("gpu_utilization_mean"), _step_ms(place)
        if busy is None or step_ms is None:
            return ""
        shares.append(share(busy))
        steps_ms.append(number(busy * step_ms))
    return (
        f"A kernel runs on the GPU {' and '.join(shares)} of the time, {' and '.join(steps_ms)} ms a step; in the rest "
        "it waits for the CPU."
    )


def _ratio(before: Place, after: Place, measure: str) -> float | None:
    first, second = before.level.mean(measure), after.level.mean(measure)
    return second / first if first and second is not None else None


def _step_ms(place: Place) -> float | None:
    """The mean time of an engine step in a round."""
    duration_s, steps = place.level.mean("duration_s"), place.level.mean("engine_steps")
    return 1000 * duration_s / steps if duration_s and steps else None


def search_plot(study: Study, comparison: Comparison) -> Plot | None:
    """Of a floor, the memory for the KV cache at each value tried; of a saturation, throughput, latency and what
    the engine did. None for a study that did not search."""
    search = study.search
    if search is None or not all(map(is_number, study.swept.get(search.key, ("",)))):
        return None
    found = [(_tried(place, comparison, search), place) for place in places(study, comparison.levels)]
    found.sort(key=lambda point: point[0])
    return (_floor if search.kind == "floor" else _saturation)(search, found, comparison)


def _tried(place: Place, comparison: Comparison, search: SearchRecord) -> float:
    """The value of the searched key."""
    return float(place.level.arm if comparison.factor == search.key else place.level.cell[search.key])


def _saturation(search: SearchRecord, found: Tried, comparison: Comparison) -> Plot:
    figure = Figure(figsize=(10, 9.6), layout="constrained")
    panels = list(figure.subplots(3, 2, sharex=True).ravel())
    throughput, latency, requests, memory, steps, queued = panels
    points = [(value, place) for value, place in found if place.runs]
    sure = comparison.confidence
    _lines(throughput, points, {"throughput_req_per_s": "throughput"}, sure)
    throughput.set_ylabel("throughput (req/s)")
    _lines(latency, points, {"ttft_ms_p50": "TTFT p50", "ttft_ms_p95": "TTFT p95", "e2e_ms_p95": "e2e p95"}, sure)
    latency.set_ylabel("latency (ms)")
    slo = {key: limit for key, limit in points[0][1].runs[0].config.get("slo", {}).items() if limit} if points else {}
    for key, limit_ms in slo.items():
        latency.axhline(limit_ms, color="0.4", linestyle="-.", linewidth=0.9, label=f"slo.{key}={limit_ms:g}")
    _lines(requests, points, {"mean_in_flight": "in flight", "requests_running_mean": "running"}, sure)
    requests.set_ylabel("requests at once")
    _lines(memory, points, {"prompt_pressure": "prompt pressure", "kv_usage_peak": "peak use of KV blocks"}, sure)
    memory.set_ylabel("share of the KV cache")
    preempted = _on_the_right(memory, points, "preemptions", "preemptions", sure)
    preempted.set_ylabel("preemptions a round")
    preempted.set_ylim(0, max(preempted.get_ylim()[1], 1.0))
    _lines(steps, points, {"tokens_per_step": "tokens a step"}, sure)
    steps.set_ylabel("tokens a step")
    took = [(value, [step_ms]) for value, place in points if (step_ms := _step_ms(place)) is not None]
    time = steps.twinx()
    if took:
        curve(time, took, 2, "time a step (right)", sure)
    time.set_ylabel("time a step (ms)")
    _lines(queued, points, {"queue_ms_mean": "mean wait in the engine's queue"}, sure)
    queued.set_ylabel("queue (ms)")
    reached = _on_the_right(queued, points, "limit_share", "reached of the least time", sure)
    reached.set_ylabel("share of the least time reached")
    for panel in panels:
        if search.knee is not None and search.knee != points[-1][0]:
            panel.axvline(search.knee, color="0.3", linestyle=":", linewidth=1.4, label=f"knee: {search.knee:g}")
        if search.slo_limit is not None and slo:
            text = f"SLO met up to {search.slo_limit:g}"
            panel.axvline(search.slo_limit, color="0.3", linestyle=(0, (6, 2)), linewidth=1, label=text)
        marked_axis(
            panel, [value for value, _ in points], first=[value for value in (search.knee, search.slo_limit) if value]
        )
        panel.set_xlabel(search.key)
        panel.grid(color="0.92", linewidth=0.6)
        panel.tick_params(axis="x", labelbottom=True)
    for panel in (*panels, time, preempted):
        panel.set_ylim(0, _ROOM * max(panel.get_ylim()[1], 1e-9))
    reached.set_ylim(0, _ROOM)
    reached.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    for panel, right in ((throughput, None), (latency, None), (requests, None), (memory, preempted), (steps, time),
                         (queued, reached)):  # fmt: skip
        handles = panel.get_legend_handles_labels()[0] + (right.get_legend_handles_labels()[0] if right else [])
        panel.legend(handles=handles, fontsize=7, loc="upper left")
    caption = (
        f"{curve_marks(comparison)} Knee: smallest value as good as the best, within study.margin. Prompt pressure: "
        "most prompt tokens in flight over what the KV cache holds; above 1 requests wait, share blocks or are "
        "preempted."
    )
    return titled("search", f"Search over {search.key}", caption, comparison, figure)


def _on_the_right(panel: Axes, points: Tried, measure: str, name: str, sure: float) -> Axes:
    right: Axes = panel.twinx()
    _lines(right, points, {measure: f"{name} (right)"}, sure, first=2)
    return right


def _lines(panel: Axes, points: Tried, measures: Mapping[str, str], sure: float, first: int = 0) -> None:
    """A line for each measure over the values tried, where it is known."""
    for style, (measure, label) in enumerate(measures.items(), first):
        known = [(value, place.level.measures[measure]) for value, place in points if measure in place.level.measures]
        if known:
            curve(panel, known, style, label, sure)


def _floor(search: SearchRecord, found: Tried, comparison: Comparison) -> Plot:
    figure = Figure(figsize=(7, 4.8), layout="constrained")
    panel = figure.subplots()
    started = [(value, size / _GIB) for value, place in found if (size := place.capacity_bytes)]
    lacked = [(value, run.engine) for value, place in found for run in place.refused]
    left = [(value, engine["available_bytes"] / _GIB) for value, engine in lacked if _told(engine, "available_bytes")]
    needed = sorted({round(engine["needed_bytes"] / _GIB, 2) for _, engine in lacked if _told(engine, "needed_bytes")})
    if started:
        panel.plot(
            *zip(*started, strict=True), "o", color="black", markerfacecolor="white", label="starts: its KV cache"
        )
    if left:
        panel.plot(*zip(*left, strict=True), "x", color=colour(2), label="does not start: memory that there was")
    for size in needed:
        panel.axhline(size, color=colour(2), linestyle="--", linewidth=0.9, label=f"needed: {size:.2f} GiB")
    if search.smallest is not None:
        panel.axvline(search.smallest, color="0.3", linestyle=":", label=f"smallest that starts: {search.smallest:g}")
    if search.largest_failed is not None:
        label = f"largest that does not: {search.largest_failed:g}"
        panel.axvline(search.largest_failed, color="0.7", linestyle=":", label=label)
    panel.set_xlabel(search.key)
    panel.set_ylabel("memory for the KV cache (GiB)")
    panel.grid(color="0.92", linewidth=0.6)
    panel.legend(fontsize=8)
    caption = (
        "One mark a run: what its KV cache takes, by its tokens and the model's dimensions, or what memory there was "
        "where the engine did not start, by its log."
    )
    return titled("search", f"Search for the floor of {search.key}", caption, comparison, figure)


def _told(engine: Mapping[str, object], name: str) -> bool:
    return engine.get(name) is not None
