"""Where requests go: the address of an OpenAI-compatible server, and single questions to it."""

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from llmexp.errors import EngineError
from llmexp.secrets import HIDDEN

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

    def post(self, path: str, body: bytes = b"", timeout_s: float = _TIMEOUT_S) -> bytes:
        """As `get`, with a body of JSON."""
        return self._ask(path, body, timeout_s)

    def _ask(self, path: str, body: bytes | None, timeout_s: float = _TIMEOUT_S) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.base_url + path, data=body, headers=headers)
        try:
            with _DIRECT.open(request, timeout=timeout_s) as response:
                body = bytes(response.read())
        except urllib.error.HTTPError as error:
            reason = self._without_key(str(error.reason).encode()).decode()
            raise EngineError(f"{self.base_url}{path}: the server answered {error.code} {reason}") from None
        except http.client.HTTPException as error:  # it ends meanwhile, or does not speak HTTP
            raise ConnectionError(f"no whole answer over HTTP: {type(error).__name__}") from None
        return self._without_key(body)

    def _without_key(self, said: bytes) -> bytes:
        """What the server said, which may be an echo."""
        return said.replace(self.api_key.encode(), HIDDEN.encode()) if self.api_key else said
