"""Where requests go: the address of an OpenAI-compatible server, and single questions to it."""

import urllib.error
import urllib.request
from dataclasses import dataclass, field

from llmexp.errors import EngineError

_TIMEOUT_S = 30.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the load goes, whatever proxy is set


@dataclass(frozen=True)
class Target:
    """`base_url` ends before `/v1`. The key is kept out of `repr`, so that it reaches no log."""

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    def get(self, path: str) -> bytes:
        """The body of an answer of status 200. Raises EngineError for another status, OSError for none."""
        return self._ask(path, None)

    def post(self, path: str, body: bytes = b"") -> bytes:
        """As `get`, with a body of JSON."""
        return self._ask(path, body)

    def _ask(self, path: str, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.base_url + path, data=body, headers=headers)
        try:
            with _DIRECT.open(request, timeout=_TIMEOUT_S) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self.base_url}{path}: the server answered {error.code} {error.reason}") from None
