"""The common ground of every config section: frozen, strict about unknown keys, and documented."""

from pydantic import BaseModel, ConfigDict

# One folder, below the one that it is put into: letters, digits and . _ + -, no dot in front.
FOLDER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


class Section(BaseModel):
    """One group of the config. Unknown keys are refused; values cannot change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
