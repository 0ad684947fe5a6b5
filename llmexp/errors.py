"""Errors that a user can act on. Each message says what was wrong, what was found and what is accepted."""


class LlmexpError(Exception):
    """A failure with a message meant for the user; printed without a traceback."""


class ConfigError(LlmexpError):
    """A key of the config has a value that cannot be used."""


class WorkloadError(LlmexpError):
    """A workload cannot be built or sent as asked (file, line and what is wrong with it)."""


class EngineError(LlmexpError):
    """The engine did not start, died or refused a request of ours."""


class TrackingError(LlmexpError):
    """MLflow could not be reached or written; what was measured is on disk all the same."""


class ResultError(LlmexpError):
    """A run or study on disk is missing, broken or not comparable."""
