"""The table of cells: what a study found, one row per cell and arm, for the terminal and for Markdown."""

import math
import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from llmexp.analyze.compare import Comparison, Effect, Level
from llmexp.analyze.intervals import MIN_TRIALS
from llmexp.analyze.pairs import Pairing
from llmexp.words import count

HEADLINES = {"throughput_req_per_s": "throughput", "ttft_ms_p50": "TTFT p50", "e2e_ms_p95": "e2e p95"}
UNITS = {"throughput_req_per_s": "req/s", "ttft_ms_p50": "ms", "e2e_ms_p95": "ms"}
LATENCY_NAMES = {"ttft_ms": "TTFT", "e2e_ms": "e2e latency"}
HIT_RATE = "cache_hit_rate"
WIDTH = 100
_CELL, _HEADER = 34, 12  # widths of the terminal's table: of a cell's name before others must give room, of a heading
_PART = r"[_ .=]*(?:[^_ .=\n]|\.(?=\d))+[_ .=]*"  # of a name, up to where a line may end
_NO_INTERVAL = "no interval"

Row = tuple[str, ...]


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
    """`1.93 to 2.29`; `exact` for a count that is the same in every trial; `-` where no interval is claimed."""
    if effect.deterministic:
        return "deterministic"
    if not effect.replicated:
        return "-"
    return f"{amount(effect.low, effect)} to {amount(effect.high, effect)}" if effect.varies else "exact"


def in_words(effect: Effect | None) -> str:
    """An effect, with its interval and verdict if there are any, a line each; `-` for None."""
    if effect is None:
        return "-"
    shown = amount(effect.estimate, effect)
    return f"{shown}\n{interval(effect)}\n{effect.verdict or 'no direction'}" if effect.replicated else shown


def replication(pairs: int, simulated: bool = False) -> str:
    """What a number of pairs keeps one from saying; nothing where they suffice."""
    of_what, single = ("workloads", "one workload") if simulated else ("trials", "not replicated")
    return {0: "no valid pair", 1: single, 2: f"{_NO_INTERVAL} below {MIN_TRIALS} {of_what}"}.get(pairs, "")


def simulated(comparison: Comparison) -> str:
    """The mark that every heading of simulated data bears."""
    if "simulated" not in comparison.kinds:
        return ""
    return "PARTLY SIMULATED: " if "measured" in comparison.kinds else "SIMULATED: "


def over(comparison: Comparison) -> str:
    """What intervals are over, where that is no launches: ` over workloads` of simulations."""
    return " over workloads" if comparison.kinds == {"simulated"} else ""


def title(comparison: Comparison) -> str:
    """What is compared, how often and with which confidence."""
    about = f"{comparison.factor}, ratio to {comparison.baseline}" if comparison.factor else "nothing compared"
    parts = [about, count(comparison.trials, "trial")]
    if any(row.replicated and row.varies for row in comparison.rows):
        parts.append(f"{comparison.confidence:.0%} intervals{over(comparison)}")
    return f"{simulated(comparison)}{comparison.study}: {', '.join(parts)}"


def cells_table(comparison: Comparison, width: int = WIDTH) -> Table:
    """The table for a terminal of so many columns: ratios with intervals and verdicts, or levels of a single arm."""
    table = Table(
        title=title(comparison),
        caption=" ".join(filter(None, [legend(comparison), caption(comparison)])),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    header, rows, texts = _contents(comparison)
    header = tuple(_in_lines(name) for name in header)
    widths = _widths([header, *rows], width)
    for i, (name, wide) in enumerate(zip(header, widths, strict=True)):
        table.add_column(name, justify="left" if i < texts else "right", overflow="fold", width=wide)
    for row in rows:
        row = (" ".join(_in_lines(word, widths[0]) for word in row[0].split()), *row[1:])
        table.add_row(*(Text(cell) for cell in row), end_section=any("\n" in cell for cell in row))
    return table


def to_markdown(comparison: Comparison) -> str:
    """The same table in Markdown."""
    header, rows, texts = _contents(comparison)
    align = ("---" if i < texts else "---:" for i in range(len(header)))
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", ", ") for line in (header, align, *rows))


def legend(comparison: Comparison) -> str:
    """`Cells by engine, workload.{order,num_requests}; all with max_num_seqs=64; order=sorted with rounds=2.` Nothing
    where their names say it."""
    groups: dict[str, list[str]] = {}
    along: dict[str, list[str]] = {}
    cells = [level.cell for level in comparison.levels]
    for key in dict.fromkeys(key for cell in cells for key in cell if key not in comparison.common):
        name = comparison.names[key]
        groups.setdefault(key.removesuffix(name), []).append(name)
        one = comparison.implied.get(key)
        for value, settled in dict.fromkeys((cell.get(one), cell.get(key)) for cell in cells if one is not None):
            along.setdefault(f"{comparison.names[str(one)]}={value}", []).append(f"{name}={settled}")
    shared = [f"{key}={value}" for key, value in comparison.common.items()]
    if not shared and not along and not any(groups):
        return ""
    keys = [
        f"{group}{{{','.join(names)}}}" if group and names[1:] else group + ", ".join(names)
        for group, names in groups.items()
    ]
    parts = [f"cells by {', '.join(keys)}"] if keys else []
    parts += [f"all with {' '.join(shared)}"] if shared else []
    parts += [f"{value} with {' '.join(others)}" for value, others in along.items()]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def caption(comparison: Comparison) -> str:
    """How to read the table, and what its verdicts rest on."""
    parts = []
    used = [pairing for pairing in comparison.pairings if pairing.pairs]
    rows = [comparison.row(measure, pairing.cell, pairing.arm) for pairing in used for measure in HEADLINES]
    if comparison.factor:
        parts.append("Above 1: more than the baseline. valid: pairs of runs used, of those planned.")
    if None in rows:
        parts.append("-: too few requests for that percentile.")
    if any(row is not None and row.deterministic for row in rows):
        parts.append("Deterministic: simulated and the same in every trial, so that there is no interval.")
    for few in {replication(2, pairing.simulated) for pairing in used if _note(comparison, pairing) == _NO_INTERVAL}:
        parts.append(f"{few[0].upper()}{few[1:]}.")
    if comparison.tested:
        parts.append(
            f"Verdicts{over(comparison)}: {comparison.tested} comparisons at a false discovery rate of "
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


def _contents(comparison: Comparison) -> tuple[Row, list[Row], int]:
    """Header, rows, and how many columns from the left hold names. One cell alone needs no column."""
    if comparison.factor is None:
        units = (f"{name} ({UNITS[measure]})" for measure, name in HEADLINES.items())
        return ("cell", *units, "hit rate", "valid"), [_level_row(comparison, level) for level in comparison.levels], 1
    header = ("cell", comparison.names[comparison.factor], *HEADLINES.values(), "hit rate", "valid")
    rows = [_pair_row(comparison, pairing) for pairing in comparison.pairings]
    if len({row[0] for row in rows}) == 1:
        return header[1:], [row[1:] for row in rows], 1
    return header, rows, 2


def _level_row(comparison: Comparison, level: Level) -> Row:
    figures = (number(level.mean(measure)) for measure in HEADLINES)
    rate = ratio(level.mean(HIT_RATE))
    return (comparison.label(level.cell), *figures, rate, f"{len(level.runs)}/{level.planned}")


def _pair_row(comparison: Comparison, pairing: Pairing) -> Row:
    effects = (comparison.row(measure, pairing.cell, pairing.arm) for measure in HEADLINES)
    levels = [comparison.level(pairing.cell, arm) for arm in (comparison.baseline, pairing.arm)]
    hits = " → ".join(_rate(level) for level in levels)
    valid = f"{len(pairing.pairs)}/{pairing.planned}"
    note = _note(comparison, pairing)
    return (
        comparison.label(pairing.cell),
        f"{comparison.baseline} → {pairing.arm}",
        *(in_words(effect) for effect in effects),
        hits,
        f"{valid}\n{note}" if note else valid,
    )


def _note(comparison: Comparison, pairing: Pairing) -> str:
    """What keeps a pairing from a verdict, in a word or two."""
    if pairing.shortage:
        return "does not start"
    rows = [comparison.row(measure, pairing.cell, pairing.arm) for measure in HEADLINES]
    if any(row is not None and row.deterministic for row in rows):
        return "deterministic"
    if len(pairing.pairs) == 2:
        return _NO_INTERVAL
    return replication(len(pairing.pairs), pairing.simulated)


def _rate(level: Level | None) -> str:
    rate = level.mean(HIT_RATE) if level else None
    return "-" if rate is None else f"{rate:.2f}"


def _in_lines(name: str, wide: int = _HEADER) -> str:
    """A heading or a name in lines that end behind blanks and signs, where it is longer than `wide`."""
    lines = [""]
    for part in re.findall(_PART, name):
        lines = (
            [*lines, part] if lines[-1] and len(lines[-1] + part.rstrip()) > wide else [*lines[:-1], lines[-1] + part]
        )
    return "\n".join(line.rstrip() for line in lines)


def _widths(rows: Sequence[Row], width: int) -> list[int]:
    """Widths of columns, two blanks between them and one on either side, in which no word is broken.

    Where their longest lines have no room, the first column and the last two give way before the effects between, and
    at last the names in the first are broken behind their signs.
    """
    columns = list(zip(*rows, strict=True))
    kept = [max(len(line) for text in column for line in text.splitlines()) for column in columns]
    words = [max(len(word) for text in column for word in re.findall(r"\S+(?: →)?", text)) for column in columns]
    part = max(len(found) for text in columns[0] for found in re.findall(_PART, text))
    last = len(words) - 1
    give_way = [(0, max(words[0], _CELL)), *((i, words[i]) for i in (last, last - 1, 0, *range(last - 2, 0, -1)))]
    for i, least in [*give_way, (0, part)]:
        over = sum(kept) + 2 * len(kept) + 1 - width
        kept[i] = max(kept[i] - max(over, 0), min(kept[i], least))
    return kept
