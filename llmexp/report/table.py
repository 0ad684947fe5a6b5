"""The table of cells: what a study found, one row per cell and arm, for the terminal and for Markdown."""

import math

from rich import box
from rich.table import Table
from rich.text import Text

from llmexp.analyze.compare import Comparison, Effect, Level
from llmexp.analyze.pairs import Pairing, cell_label
from llmexp.words import count

HEADLINES = {"throughput_req_per_s": "throughput", "ttft_ms_p50": "TTFT p50", "e2e_ms_p95": "e2e p95"}
UNITS = {"throughput_req_per_s": "req/s", "ttft_ms_p50": "ms", "e2e_ms_p95": "ms"}
LATENCY_NAMES = {"ttft_ms": "TTFT", "e2e_ms": "e2e latency"}
HIT_RATE = "cache_hit_rate"
WIDTH = 100
_WIDEST_CELL = 34  # that leaves the other columns their room


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent for the sizes that occur; `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    if not -4 <= magnitude < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - magnitude, 0)}f}"


def ratio(value: float | None) -> str:
    """Two decimals, or two digits below 0.1; `-` for None."""
    return "-" if value is None else f"{value:.2f}" if value >= 0.095 else number(value, 2)


def amount(value: float | None, effect: Effect) -> str:
    """A ratio, or a difference with its sign."""
    if effect.scale == "ratio" or value is None:
        return ratio(value)
    return f"{'+' if value > 0 else ''}{number(value)}"


def interval(effect: Effect) -> str:
    """`1.93 to 2.29`; `-` where no interval is claimed."""
    return f"{amount(effect.low, effect)} to {amount(effect.high, effect)}" if effect.replicated else "-"


def in_words(effect: Effect | None) -> str:
    """An effect with its interval and verdict, a line each; `-` for None."""
    if effect is None:
        return "-"
    if not effect.replicated:
        return ratio(effect.estimate)
    return f"{ratio(effect.estimate)}\n{interval(effect)}\n{effect.verdict}"


def replication(trials: int) -> str:
    """What a number of pairs keeps one from saying; nothing where they suffice."""
    return {0: "no valid pair", 1: "not replicated", 2: "no interval below 3 trials"}.get(trials, "")


def simulated(comparison: Comparison) -> str:
    """The mark that every heading of simulated data bears."""
    if "simulated" not in comparison.kinds:
        return ""
    return "PARTLY SIMULATED: " if "measured" in comparison.kinds else "SIMULATED: "


def title(comparison: Comparison) -> str:
    """What is compared, how often and with which confidence."""
    about = f"{comparison.factor}, ratio to {comparison.baseline}" if comparison.factor else "nothing compared"
    parts = [about, count(comparison.trials, "trial")]
    if any(row.replicated for row in comparison.rows):
        parts.append(f"{comparison.confidence:.0%} intervals")
    return f"{simulated(comparison)}{comparison.study}: {', '.join(parts)}"


def cells_table(comparison: Comparison) -> Table:
    """The table for a terminal of 100 columns: ratios with intervals and verdicts, or levels of a single
    arm."""
    table = Table(
        title=title(comparison),
        caption=caption(comparison),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    header, rows = _contents(comparison)
    widest = max((len(line) for row in rows for line in row[0].splitlines()), default=0)
    for i, name in enumerate(header):
        whole = i == 0 and widest <= _WIDEST_CELL
        table.add_column(name, justify="left" if i < 2 else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), end_section=any("\n" in cell for cell in row))
    return table


def to_markdown(comparison: Comparison) -> str:
    """The same table in Markdown."""
    header, rows = _contents(comparison)
    align = tuple("---" if i < 2 else "---:" for i in range(len(header)))
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", ", ") for line in (header, align, *rows))


def caption(comparison: Comparison) -> str:
    """How to read the table, and what its verdicts rest on."""
    parts = []
    if comparison.factor:
        parts.append("Above 1: more than the baseline. valid: pairs of runs used, of those planned.")
    if comparison.tested:
        parts.append(
            f"Verdicts: {comparison.tested} comparisons at a false discovery rate of "
            f"{1 - comparison.confidence:.0%}; equivalent: within {comparison.margin:.0%}."
        )
    short = sum(one.kind == "refused" for one in comparison.excluded)
    if short:
        parts.append(f"{count(short, 'run')} did not start for lack of memory.")
    if left_out := len(comparison.excluded) - short:
        parts.append(f"{count(left_out, 'run')} left out as failed, invalid or missing.")
    if comparison.throttled:
        parts.append(f"{count(len(comparison.throttled), 'run')} throttled: heat or a fault slowed a GPU.")
    return " ".join(parts)


def _contents(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if comparison.factor is None:
        units = (f"{name}\n{UNITS[measure]}" for measure, name in HEADLINES.items())
        return ("cell", "arm", *units, "hit rate", "valid"), [_level_row(level) for level in comparison.levels]
    header = ("cell", comparison.factor, *HEADLINES.values(), "hit rate", "valid")
    return header, [_pair_row(comparison, pairing) for pairing in comparison.pairings]


def _level_row(level: Level) -> tuple[str, ...]:
    figures = (number(level.mean(measure)) for measure in HEADLINES)
    rate = ratio(level.mean(HIT_RATE))
    return (_lines(level), level.arm or "-", *figures, rate, f"{len(level.runs)}/{level.planned}")


def _pair_row(comparison: Comparison, pairing: Pairing) -> tuple[str, ...]:
    effects = (comparison.row(measure, pairing.cell, pairing.arm) for measure in HEADLINES)
    levels = [comparison.level(pairing.cell, arm) for arm in (comparison.baseline, pairing.arm)]
    hits = " → ".join(_rate(level) for level in levels)
    valid = f"{len(pairing.pairs)}/{pairing.planned}"
    note = "does not start" if pairing.shortage else replication(len(pairing.pairs))
    return (
        _lines(pairing),
        f"{comparison.baseline} → {pairing.arm}",
        *(in_words(effect) for effect in effects),
        hits,
        f"{valid}\n{note}" if note else valid,
    )


def _lines(place: Level | Pairing) -> str:
    return "\n".join(cell_label({key: value}) for key, value in place.cell.items()) or cell_label({})


def _rate(level: Level | None) -> str:
    rate = level.mean(HIT_RATE) if level else None
    return "-" if rate is None else f"{rate:.2f}"
