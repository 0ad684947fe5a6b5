"""What a search has found: every value tried, with the evidence beside it, as a table and as a figure."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmexp.analyze.compare import Comparison
from llmexp.analyze.study import Study
from llmexp.report.blocks import section
from llmexp.report.evidence import Place, engine_table, places
from llmexp.report.style import Plot, colour, is_number, line, marked_axis, marker, titled
from llmexp.results import SearchRecord

_GIB = 2**30


def search_section(study: Study, comparison: Comparison) -> list[str]:
    """The finding in words and the table of all values tried; nothing for a study that did not search."""
    search = study.search
    if search is None:
        return []
    found = sorted(places(study, comparison.levels), key=lambda place: _tried(place, comparison, search))
    return section("Search", [f"**{search.found}.**", *engine_table(comparison, found)])


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


def _saturation(search: SearchRecord, found: Sequence[tuple[float, Place]], comparison: Comparison) -> Plot:
    figure = Figure(figsize=(10, 7), layout="constrained")
    throughput, latency, engine, memory = figure.subplots(2, 2, sharex=True).ravel()
    points = [(value, place) for value, place in found if place.runs]
    _lines(throughput, points, {"throughput_req_per_s": "throughput"})
    throughput.set_ylabel("throughput (req/s)")
    _lines(latency, points, {"ttft_ms_p50": "TTFT p50", "ttft_ms_p95": "TTFT p95", "e2e_ms_p95": "e2e p95"})
    latency.set_ylabel("latency (ms)")
    slo = {key: limit for key, limit in points[0][1].runs[0].config.get("slo", {}).items() if limit} if points else {}
    for key, limit_ms in slo.items():
        latency.axhline(limit_ms, color="0.4", linestyle="-.", linewidth=0.9, label=f"slo.{key}={limit_ms:g}")
    _lines(engine, points, {"mean_in_flight": "in flight", "requests_running_mean": "running"})
    engine.set_ylabel("requests at once")
    _lines(memory, points, {"prompt_pressure": "prompt pressure", "kv_usage_peak": "peak use of KV blocks"})
    memory.set_ylabel("share of the KV cache")
    preempted = memory.twinx()
    _lines(preempted, points, {"preemptions": "preemptions a round (right)"}, first=2)
    preempted.set_ylabel("preemptions a round")
    for panel in (throughput, latency, engine, memory):
        if search.knee is not None:
            panel.axvline(search.knee, color="0.3", linestyle=":", linewidth=1.4, label=f"knee: {search.knee:g}")
        if search.slo_limit is not None and slo:
            text = f"SLO met up to {search.slo_limit:g}"
            panel.axvline(search.slo_limit, color="0.3", linestyle=(0, (6, 2)), linewidth=1, label=text)
        marked_axis(
            panel, [value for value, _ in points], first=[value for value in (search.knee, search.slo_limit) if value]
        )
        panel.set_xlabel(search.key)
        panel.grid(color="0.92", linewidth=0.6)
    for panel in (throughput, latency, engine, memory, preempted):
        panel.set_ylim(0, max(panel.get_ylim()[1], 1e-9))
        panel.tick_params(axis="x", labelbottom=True)
    for panel in (throughput, latency, engine):
        panel.legend(fontsize=7)
    handles = [*memory.get_legend_handles_labels()[0], *preempted.get_legend_handles_labels()[0]]
    memory.legend(handles=handles, fontsize=7)
    caption = (
        "Mark: mean over trials; dashes: single trials. Knee: smallest value as good as the best, within study.margin. "
        "Prompt pressure: most prompt tokens in flight over what the KV cache holds; above 1 requests wait, share "
        "blocks or are preempted."
    )
    return titled("search", f"Search over {search.key}", caption, comparison, figure)


def _lines(panel: Axes, points: Sequence[tuple[float, Place]], measures: Mapping[str, str], first: int = 0) -> None:
    """A line for each measure over the values tried, where it is known."""
    for style, (measure, label) in enumerate(measures.items(), first):
        known = [(value, place.level.measures[measure]) for value, place in points if measure in place.level.measures]
        if not known:
            continue
        panel.plot(
            [value for value, _ in known],
            [sum(trials) / len(trials) for _, trials in known],
            color=colour(style),
            linestyle=line(style),
            marker=marker(style),
            markersize=5,
            label=label,
        )
        for value, trials in known:
            if len(trials) > 1:
                panel.plot([value] * len(trials), trials, "_", color=colour(style), markersize=9)


def _floor(search: SearchRecord, found: Sequence[tuple[float, Place]], comparison: Comparison) -> Plot:
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
