"""The common ground of every config section: frozen, strict about unknown keys, and documented."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One group of the config. Unknown keys are refused; values cannot change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
