"""`llmexp record`: conversations with the answers that an engine gives, so that every arm is sent the same."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from llmexp import models
from llmexp.arguments import Arguments
from llmexp.compose import compose
from llmexp.engines.engine import Engine
from llmexp.engines.kinds import kind_of
from llmexp.engines.lease import EngineLease
from llmexp.engines.simulator import Simulator
from llmexp.engines.target import Target
from llmexp.errors import ConfigError, EngineError
from llmexp.progress import phase
from llmexp.schema.config import Config
from llmexp.schema.load import ClosedLoop
from llmexp.schema.workloads import MultiTurn
from llmexp.workloads import store
from llmexp.workloads.build import build
from llmexp.workloads.multi_turn import record_with
from llmexp.workloads.workload import Tokens, Workload


def record(arguments: Sequence[str]) -> None:
    """Builds the conversations of a run with these overrides, has the run's engine answer them, and writes a file.

    Raises ConfigError or WorkloadError before the engine starts, EngineError after.
    """
    options, overrides = _parser().with_overrides(arguments)
    config, out = compose(overrides), Path(options.out)
    _require_recordable(config, out)
    model = models.locate(config.model)
    workload = build(config.workload, model)
    folder = Path(tempfile.mkdtemp(prefix="llmexp-record-"))  # an error names the engine's log, which stays there
    with EngineLease(keep=False).engine(config, model, folder, lambda: None) as (engine, _):
        assert not isinstance(engine, Simulator)
        recorded = answered(workload, engine, config)
    store.save(recorded, out)
    shutil.rmtree(folder)
    print(f"Written: {out}. Replay it with the same overrides and workload.answers={out}")


def answered(workload: Workload, engine: Engine, config: Config) -> Workload:
    """The conversations with the engine's own answers, generated turn by turn. Raises EngineError."""
    target = engine.destination
    assert isinstance(target, Target)
    concurrency = config.load.concurrency if isinstance(config.load, ClosedLoop) else config.max_num_seqs
    sampling = {"temperature": config.client.temperature, "seed": config.client.seed}

    def ask(prompt: Tokens, output_tokens: int) -> list[int]:
        asked = {"model": target.model, "prompt": prompt.tolist(), "max_tokens": output_tokens, **sampling}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        answer = target.post("/v1/completions", json.dumps(asked).encode(), config.client.timeout_s)
        try:
            ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"{target.base_url} returns no token ids of what it generates; vLLM 0.24 does") from None
        return ids

    def generate(prompts: list[Tokens], output_tokens: list[int]) -> list[Sequence[int]]:
        with phase("answers to a turn", len(prompts)) as tick, ThreadPoolExecutor(concurrency) as pool:
            given: list[Sequence[int]] = []
            for answer in pool.map(ask, prompts, output_tokens):
                given.append(answer)
                tick(len(given), len(prompts))
            return given

    by = {"recorded_with": f"{target.model}, vLLM {engine.facts.version or 'unknown'}"}
    return replace(record_with(workload, generate), recipe={**workload.recipe, **by})


def _require_recordable(config: Config, out: Path) -> None:
    """Raises ConfigError where there is nothing to record, or no way to."""
    if not isinstance(config.workload, MultiTurn):
        raise ConfigError(f"workload: got {config.workload.kind}; only the prompts of multi_turn hold answers")
    if config.workload.answers is not None:
        raise ConfigError(f"workload.answers: got {config.workload.answers!r}; accepted here is null")
    if config.engine.kind not in ("vllm_server", "endpoint"):
        raise ConfigError(
            f"engine: got {config.engine.kind}; accepted here is vllm_server, or endpoint with a vLLM behind it"
        )
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out: got {str(out)!r}; accepted is a file in a folder that there is")
    kind_of(config).check(config, True)


def _parser() -> Arguments:
    parser = Arguments(
        prog="llmexp record",
        usage="llmexp record [--out FILE] workload=multi_turn KEY=VALUE …",
        description="Has an engine answer conversations, turn by turn, and keeps them for replays.",
    )
    parser.add_argument("--out", metavar="FILE", default="answers.parquet", help="default: answers.parquet")
    return parser
