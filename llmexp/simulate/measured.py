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
    """The calibration on all of them, of a cost in ``terms``, and their steps with columns `kind` and `predicted_s`.

    Raises CalibrationError if the steps do not determine it.
    """
    steps = pd.concat([item.steps.assign(run=item.run.name) for item in found], ignore_index=True)
    steps = steps[steps["duration_s"] > 0].reset_index(drop=True)
    fitted = fit_best(_work(steps), steps["duration_s"].to_numpy(), terms)
    steps["predicted_s"] = fitted.measured_s - fitted.residuals_s
    steps["kind"] = np.select(
        [steps["decode_tokens"] == 0, steps["prefill_tokens"] == 0], ["prefill", "decode"], "mixed"
    )
    run = found[0].run
    delays = front_end(found)
    calibration = CalibrationFile(
        **identity(run),
        block_size=_known(run, "block_size"),
        num_gpu_blocks=_known(run, "num_gpu_blocks"),
        max_num_batched_tokens=run.engine.get("max_num_batched_tokens"),
        cost=cost_as_mapping(fitted.cost),
        front_end=vars(delays),
        steps=len(steps),
        runs=tuple(f"{item.run.study}/{item.run.name}" for item in found),
        residuals={kind: _residuals(group, steps) for kind, group in [*steps.groupby("kind"), ("all", steps)]},
    )
    return calibration, steps


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
    missing = {"round", "start_s", "duration_s", *TERMS[1:]} - set(steps.columns)
    if missing:
        raise ResultError(f"{folder / STEPS}: not an engine's steps, it lacks {', '.join(sorted(missing))}")
    return Recording(run, steps, run.trace().to_pandas())


def _work(steps: pd.DataFrame) -> Ints:
    work: Ints = steps.assign(steps=1)[list(TERMS)].to_numpy(np.int64)
    return work


def _known(run: RunResult, name: str) -> int:
    value = run.engine.get(name)
    if value is None:
        raise ResultError(f"{run.folder}: the engine did not tell its {name}")
    return int(value)


def _residuals(group: pd.DataFrame, steps: pd.DataFrame) -> Residuals:
    missed = group["duration_s"] - group["predicted_s"]
    relative = (missed / group["duration_s"]).abs()
    return Residuals(
        steps=len(group),
        time_share=float(group["duration_s"].sum() / steps["duration_s"].sum()),
        bias=float(missed.sum() / group["duration_s"].sum()),
        error_p50=float(relative.quantile(0.5)),
        error_p95=float(relative.quantile(0.95)),
    )
