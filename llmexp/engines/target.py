"""Where requests go: the address of an OpenAI-compatible server."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """`base_url` ends before `/v1`. The key is kept out of `repr`, so that it reaches no log."""

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
