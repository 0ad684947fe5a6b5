"""Runs of a real engine with `engine.record_steps=true`, as what a calibration is fitted to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from llmexp.errors import ResultError
from llmexp.results import STEPS, SUMMARY, RunResult, load_run
from llmexp.simulate.calibrate import TERMS, fit_best, fit_outputs, fit_requests
from llmexp.simulate.calibration import CalibrationFile, Residuals, cost_as_mapping
from llmexp.simulate.cost import FrontEnd
from llmexp.simulate.requests import Floats, Ints

_LAUNCHES = 3  # as long as few launches take
_CLOCK_S = 5e-4  # the engine stamps a token shortly before its step is over


@dataclass(frozen=True)
class Recording:
    """A run, its steps (one row each, with `work` in the columns of ``Work``) and its requests."""

    run: RunResult
    steps: pd.DataFrame
    requests: pd.DataFrame


def recorded_runs(folders: Iterable[str | Path]) -> list[Recording]:
    """The recorded runs in these folders, each that of a run or of runs side by side.

    Raises ResultError for what cannot be calibrated on: no run, no steps, a simulated run, runs of different engines.
    """
    found = [_recording(folder) for given in folders for folder in _run_folders(Path(given))]
    first = identity(found[0].run)
    for other in found[1:]:
        for key, value in identity(other.run).items():
            if value != first[key]:
                raise ResultError(
                    f"{other.run.folder}: {key} is {value}, but {first[key]} in {found[0].run.folder}; a calibration "
                    "takes runs of one engine"
                )
    return found


def identity(run: RunResult) -> dict[str, Any]:
    """What a run shares with those that its calibration holds for."""
    config, engine = run.config, run.engine
    return {
        "model": config["model"]["name"],
        "gpu": config["gpu"]["name"],
        "dtype": config["gpu"]["dtype"] or "auto",
        "tensor_parallel_size": config["gpu"]["tensor_parallel_size"],
        "engine": config["engine"]["kind"],
        "engine_version": engine.get("version"),
        "async_scheduling": runs_ahead(config),
    }


def runs_ahead(config: Any) -> bool:
    """Whether vLLM schedules ahead: as asked, else everywhere but on a CPU."""
    asked = config["scheduler"]["async_scheduling"]
    return bool(config["gpu"]["device"] != "cpu" if asked is None else asked and config["gpu"]["device"] != "cpu")


def calibrated(found: Sequence[Recording], terms: Sequence[str] = TERMS) -> tuple[CalibrationFile, pd.DataFrame]:
    """The calibration on all of them, of a cost in ``terms``, and the spans and launches that it is fitted to:
    `duration_s`, `predicted_s`, `kind`, `steps`.

    Raises CalibrationError if they do not determine it.
    """
    steps = pd.concat([timed(item.steps) for item in found], ignore_index=True)
    launches_s = prefill_launches_s(steps)
    launch_s = float(np.median(launches_s)) if launches_s.size else 0.0
    spans = device_spans(steps, launch_s)
    fitted = fit_best(spans[list(TERMS)].to_numpy(np.int64), spans["duration_s"].to_numpy(), terms)
    spans["predicted_s"] = fitted.measured_s - fitted.residuals_s
    spans["kind"] = np.select(
        [spans["decode_tokens"] == 0, spans["prefill_tokens"] == 0], ["prefill", "decode"], "mixed"
    )
    launches = pd.DataFrame({"duration_s": launches_s, "predicted_s": launch_s, "kind": "launch", "steps": 1})
    launches = launches[launches["duration_s"] > 0]
    kinds = [*spans.groupby("kind"), ("all", spans), *launches.groupby("kind")]
    run = found[0].run
    delays = front_end(found)
    calibration = CalibrationFile(
        **identity(run),
        block_size=_known(run, "block_size"),
        num_gpu_blocks=_known(run, "num_gpu_blocks"),
        max_num_batched_tokens=run.engine.get("max_num_batched_tokens"),
        cost=cost_as_mapping(fitted.cost),
        prefill_launch_s=launch_s,
        front_end=vars(delays),
        steps=len(steps),
        runs=tuple(f"{item.run.study}/{item.run.name}" for item in found),
        residuals={kind: _residuals(group, steps) for kind, group in kinds},
    )
    return calibration, pd.concat([spans, launches], ignore_index=True)


def timed(steps: pd.DataFrame) -> pd.DataFrame:
    """With when each ended, whether nothing else was under way as it was decided, and whether the next one was decided
    before it ended."""
    rounds = steps.assign(ended_s=steps["start_s"] + steps["duration_s"]).groupby("round")
    before_s, next_s = rounds["ended_s"].shift(fill_value=-np.inf), rounds["scheduled_s"].shift(-1, fill_value=np.inf)
    ended_s = steps["start_s"] + steps["duration_s"]
    return steps.assign(ended_s=ended_s, idle=before_s <= steps["scheduled_s"], followed=next_s < ended_s)


def prefill_launches_s(steps: pd.DataFrame) -> Floats:
    """Seconds that steps with prefill tokens took to be launched, of those where that can be seen, shape (k,); of
    ``timed`` steps.

    The tokens of a decode step are taken as soon as the step after it is launched, if they are waited for twice as
    long as decode steps' are otherwise. Where no step shows that: from idle, the next step is decided as soon as the
    first is launched; but then a load's first requests often come all at once, and taking them in slows the launch.
    """
    prefill, follows = steps["prefill_tokens"] > 0, steps["followed"].shift(fill_value=False)
    waited_s = (steps["ended_s"].shift() - steps["scheduled_s"])[follows & ~prefill.shift(fill_value=True)]
    after_decode_s = waited_s[prefill & (waited_s > 2 * waited_s[~prefill].median())]
    from_idle_s = (steps["scheduled_s"].shift(-1) - steps["scheduled_s"])[prefill & steps["idle"] & steps["followed"]]
    seen: Floats = (after_decode_s if after_decode_s.size else from_idle_s).to_numpy(np.float64)
    return seen


def device_spans(steps: pd.DataFrame, launch_s: float) -> pd.DataFrame:
    """What the device did between times at which it surely ended one of ``timed`` steps: the terms of ``Work``, and
    `duration_s`.

    The engine takes a step's tokens after it has launched the next one. Where that is a step with prefill tokens, the
    device may have been done before, unless three launches would have fitted in: such a step is put together with the
    one that follows. A step with prefill tokens that was over within three launches may have waited for its own: spans
    with such steps are left out.
    """
    prefill = steps["prefill_tokens"] > 0
    waited_s = steps["ended_s"] - steps["scheduled_s"].shift(-1)
    late = steps["followed"] & prefill.shift(-1, fill_value=False) & (waited_s < _LAUNCHES * launch_s)
    launched = prefill & (steps["ended_s"] - steps["scheduled_s"] < _LAUNCHES * launch_s)
    number = (~late).shift(fill_value=True).cumsum().rename("span")
    spans = steps.assign(steps=1, launched=launched).groupby(number)[[*TERMS, "duration_s", "launched"]].sum()
    return spans[(spans["launched"] == 0) & (spans["duration_s"] > 0)].drop(columns="launched")


def front_end(found: Sequence[Recording]) -> FrontEnd:
    """The delays between client and engine core that explain when requests came through and tokens came out."""
    arrivals: list[tuple[Floats, Floats, Floats, Ints]] = []
    outputs: list[tuple[Ints, Ints, Floats]] = []
    for item in found:
        for index, steps in item.steps.groupby("round"):
            requests = item.requests[(item.requests["round"] == index) & item.requests["error"].isna()]
            arrivals.append(_arrivals(requests, steps))
            outputs.append(_outputs(requests, steps))
    sampled, echoed, lags_s = (np.concatenate(columns) for columns in zip(*outputs, strict=True))
    request_s, prompt_token_s = fit_requests(arrivals)
    output_s, token_s, echo_s = fit_outputs(sampled, echoed, lags_s) if lags_s.size else (0.0, 0.0, 0.0)
    return FrontEnd(request_s, prompt_token_s, output_s, token_s, echo_s)


def _arrivals(requests: pd.DataFrame, steps: pd.DataFrame) -> tuple[Floats, Floats, Floats, Ints]:
    """When requests were sent, their prompts' tokens; when steps were scheduled, up to the first preemption; how many
    requests had come through by then: those admitted and those waiting."""
    sent = requests.sort_values("sent_s", kind="stable")
    calm = steps[steps["preempted"].cumsum() == 0]
    through = calm["admitted"].cumsum() + calm["waiting"]
    return (
        sent["sent_s"].to_numpy(np.float64),
        sent["prompt_tokens"].to_numpy(np.float64),
        calm["scheduled_s"].to_numpy(np.float64),
        through.to_numpy(np.int64),
    )


def _outputs(requests: pd.DataFrame, steps: pd.DataFrame) -> tuple[Ints, Ints, Floats]:
    """For each step that gave a request its first or last token: the tokens that it gave, the prompts' tokens of first
    answers, and the median time from its end until the clients had them. Where the engine does not tell of its own
    times, the latest step that had ended is taken for a token's."""
    giving = steps[steps["sampled"] > 0]
    ends_s = (giving["start_s"] + giving["duration_s"]).to_numpy(np.float64)
    firsts, lasts = (
        pd.DataFrame(
            {
                "client_s": requests[f"{which}_token_s"],
                "engine_s": requests[f"engine_{which}_token_s"].fillna(requests[f"{which}_token_s"]),
                "echoed": requests["prompt_tokens"] if which == "first" else 0,
            }
        )
        for which in ("first", "last")
    )
    tokens = pd.concat([firsts, lasts]).astype(np.float64)
    tokens["step"] = np.searchsorted(ends_s, tokens["engine_s"] + _CLOCK_S, side="right") - 1
    tokens = tokens[tokens["step"] >= 0]
    by_step = tokens.groupby("step").agg(client_s=("client_s", "median"), echoed=("echoed", "sum"))
    lags_s = by_step["client_s"].to_numpy(np.float64) - ends_s[by_step.index]
    sampled = giving["sampled"].to_numpy(np.int64)[by_step.index]
    return sampled, by_step["echoed"].to_numpy(np.int64), lags_s


def _run_folders(folder: Path) -> list[Path]:
    if (folder / SUMMARY).exists():
        return [folder]
    inside = sorted(path.parent for path in folder.glob(f"*/{SUMMARY}"))
    if not inside:
        raise ResultError(f"{folder}: no run here and none in its folders; give folders that hold a {SUMMARY}")
    return inside


def _recording(folder: Path) -> Recording:
    run = load_run(folder)
    if run.simulated:
        raise ResultError(f"{folder}: this run is simulated; a calibration takes measured ones")
    if not (folder / STEPS).exists():
        raise ResultError(f"{folder}: no {STEPS} here; a run with engine.record_steps=true leaves one")
    steps = pq.read_table(folder / STEPS).to_pandas()
    missing = {"round", "scheduled_s", "start_s", "duration_s", *TERMS[1:]} - set(steps.columns)
    if missing:
        raise ResultError(f"{folder / STEPS}: not an engine's steps, it lacks {', '.join(sorted(missing))}")
    return Recording(run, steps, run.trace().to_pandas())


def _known(run: RunResult, name: str) -> int:
    value = run.engine.get(name)
    if value is None:
        raise ResultError(f"{run.folder}: the engine did not tell its {name}")
    return int(value)


def _residuals(group: pd.DataFrame, steps: pd.DataFrame) -> Residuals:
    missed = group["duration_s"] - group["predicted_s"]
    relative = (missed / group["duration_s"]).abs()
    return Residuals(
        steps=int(group["steps"].sum()),
        time_share=float(group["duration_s"].sum() / steps["duration_s"].sum()),
        bias=float(missed.sum() / group["duration_s"].sum()),
        error_p50=float(relative.quantile(0.5)),
        error_p95=float(relative.quantile(0.95)),
    )
