"""Whether anybody answers where runs are to be told, asked before an engine starts and without importing MLflow."""

import http.client
import os
import socket
import ssl
import time
import urllib.request
from urllib.parse import SplitResult, urlsplit

from llmexp.errors import ConfigError, TrackingError

_CONNECT_S, _ANSWER_S = 5.0, 10.0
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_ADVICE = "start it, name another, or keep runs in their folders alone with tracking=off"
# How long the user lets MLflow wait and how often try again: read before llmexp sets its own.
_PATIENCE_S = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "")
_TRIES_MORE = os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")


def require_answer(uri: str, key: str = "tracking.uri", advice: str = _ADVICE) -> None:
    """Refuses a tracking server or database that cannot be connected to, or a server that does not answer at all.

    A server may be slow: one that answers within MLFLOW_HTTP_REQUEST_TIMEOUT is there (within 10 s where that is not
    set), and so is one that comes up within as many further tries as MLFLOW_HTTP_REQUEST_MAX_RETRIES says. Raises
    TrackingError, ConfigError for what is no port.
    """
    url = urlsplit(uri)
    try:
        _ = url.port
    except ValueError:
        raise ConfigError(f"{key}: got {uri}; accepted is http://HOST:PORT with a port from 0 to 65535") from None
    tries = 1 + (int(_TRIES_MORE) if _TRIES_MORE.isdecimal() else 0)
    for i in range(tries):
        try:
            return _ask(url)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = _why(error)
        if i < tries - 1:
            time.sleep(min(2.0**i, 30.0))
    raise TrackingError(f"{key}: got {uri}, where no server answers ({why}); {advice}")


def _ask(url: SplitResult) -> None:
    """Raises OSError or HTTPException if there is nobody; any answer will do."""
    kind = url.scheme.partition("+")[0]
    if url.hostname is None or kind not in _PORTS or _is_proxied(kind, url.hostname):
        return  # a file, or what only MLflow or a proxy knows how to reach
    place = (url.hostname, url.port or _PORTS[kind])
    if kind not in ("http", "https"):
        socket.create_connection(place, _limit_s(_CONNECT_S)).close()
        return
    make = http.client.HTTPSConnection if kind == "https" else http.client.HTTPConnection
    connection = make(*place, timeout=_limit_s(_CONNECT_S))
    try:
        connection.connect()
        connection.sock.settimeout(_limit_s(_ANSWER_S))
        connection.request("GET", f"{url.path.rstrip('/')}/health")
        connection.getresponse()
    except ssl.SSLError:
        return  # somebody is there; which certificates are trusted, MLflow is told otherwise
    finally:
        connection.close()


def _limit_s(default_s: float) -> float:
    return float(_PATIENCE_S) if _PATIENCE_S.isdecimal() else default_s


def _is_proxied(kind: str, host: str) -> bool:
    return kind in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "not in time: MLFLOW_HTTP_REQUEST_TIMEOUT=SECONDS waits for longer"
    said = getattr(error, "strerror", None) or str(error)
    return str(said) or type(error).__name__
