"""The common ground of every config section: frozen, strict about types and unknown keys, and documented."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Words:
    """What a pattern accepts, as messages say it."""

    said: str


# One folder, below the one that it is put into: no dot in front.
FOLDER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
FolderName = Annotated[str, Field(pattern=FOLDER_NAME), Words("a name of letters, digits and . _ + -, no sign first")]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), Words("a name of letters, digits and _")]

# Bounds that no sensible run comes near, so that a slip of the hand ends in a message and not in the machine's memory.
MOST_REQUESTS = 10_000_000
Tokens = Annotated[int, Field(gt=0, lt=2**29)]  # so that a few of them add up in 32 bits
Requests = Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
InFlight = Annotated[int, Field(gt=0, le=65_536)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]


class Section(BaseModel):
    """One group of the config. Unknown keys are refused, and `true` is no number; values cannot change afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), strict=True)
