"""Engines that outlast a run: consecutive runs that need an equal engine share one launch."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmexp.engines.engine import Engine
from llmexp.engines.kinds import kind_of
from llmexp.engines.simulator import Simulator
from llmexp.models import Model
from llmexp.results import ENGINE_LOG
from llmexp.schema.config import Config
from llmexp.secrets import mask_file


class EngineLease:
    """Holds at most one running engine. `launch_s` counts the time spent on launches."""

    def __init__(self, keep: bool) -> None:
        """`keep` leaves the engine running after a run, for the next one that needs an equal engine."""
        self.launches = 0
        self.launch_s = 0.0
        self._keep = keep
        self._engine: Engine | Simulator | None = None
        self._key: object = None

    @contextmanager
    def engine(
        self, config: Config, model: Model, folder: Path, while_starting: Callable[[], None]
    ) -> Iterator[tuple[Engine | Simulator, bool]]:
        """An engine for a run, and whether it ran before. Its log is in `folder` once the run has ended."""
        key = launch_key(config, model)
        if self._engine is not None and (key != self._key or not self._engine.alive):
            self.close()
        reused = self._engine is not None
        if self._engine is None:
            try:
                self._engine = kind_of(config).start(config, model, folder, while_starting)
            except BaseException:
                mask_file(folder / ENGINE_LOG)
                raise
            self._key = key
            self.launches += 1
            self.launch_s += self._engine.launch_s
        else:
            while_starting()
        try:
            yield self._engine, reused
        except BaseException:
            self._leave(folder, keep=False)
            raise
        self._leave(folder, keep=self._keep)

    def _leave(self, folder: Path, keep: bool) -> None:
        assert self._engine is not None
        log = self._engine.log
        if not keep:
            self.close()
        if log is not None:
            mask_file(log)
            if log != folder / ENGINE_LOG:
                shutil.copyfile(log, folder / ENGINE_LOG)

    def close(self) -> None:
        """Stops the engine, if one runs."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.stop()
            if engine.log is not None:
                mask_file(engine.log)


def launch_key(config: Config, model: Model) -> object:
    """Equal for runs that may share a launch: the same engine in every detail, and the same trial."""
    own = config.engine.model_dump_json(exclude={"sample_interval_s", "gpu_sample_interval_s", "stall_timeout_s"})
    return (config.run.trial, own, tuple(kind_of(config).arguments(config, model)))
