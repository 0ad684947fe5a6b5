"""A tracking server that is not there is told before anything starts; one that is slow, or comes up, is used."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

from llmexp import reachable
from llmexp.errors import ConfigError, TrackingError
from llmexp.reachable import require_answer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"


@contextmanager
def server(answer: Callable[[socket.socket], object], port: int = 0) -> Iterator[int]:
    """A port where connections are taken, each with an `answer`."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(ConnectionError):  # who asked may have gone
                connection.recv(4096)
                answer(connection)

    with socket.create_server(("127.0.0.1", port)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize("kind", ["http", "https", "postgresql", "mysql+pymysql"])
def test_a_server_that_is_not_there_is_told_with_key_and_address(kind: str) -> None:
    uri = f"{kind}://127.0.0.1:{closed_port()}"
    with pytest.raises(TrackingError) as error:
        require_answer(f"{uri}/path")
    assert str(error.value).startswith(f"tracking.uri: got {uri}/path, where no server answers (Connection refused); ")


def test_what_is_no_port_is_wrong_input() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri: got http://localhost:99999; accepted is .* to 65535"):
        require_answer("http://localhost:99999")


def test_no_user_is_told_of_an_address() -> None:
    with pytest.raises(TrackingError) as error:
        require_answer(f"http://somebody:CANARY@127.0.0.1:{closed_port()}")
    assert "127.0.0.1" in str(error.value) and "CANARY" not in str(error.value)


def test_a_server_that_takes_connections_and_says_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_ANSWER_S", 0.1)
    monkeypatch.setattr(reachable, "_PATIENCE_S", "")
    over = threading.Event()
    with server(lambda connection: over.wait()) as port:
        try:
            with pytest.raises(TrackingError, match=r"not in time: MLFLOW_HTTP_REQUEST_TIMEOUT=SECONDS waits for lo"):
                require_answer(f"http://127.0.0.1:{port}")
        finally:
            over.set()


@pytest.mark.parametrize("answer", [OK, b"HTTP/1.1 401 Unauthorized\r\n\r\n", b"HTTP/1.1 500 Oh\r\n\r\n"])
def test_a_server_that_answers_anything_is_there(answer: bytes) -> None:
    with server(lambda connection: connection.sendall(answer)) as port:
        require_answer(f"http://127.0.0.1:{port}/prefix/")


def test_a_slow_server_is_waited_for_as_long_as_the_user_lets_mlflow_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_ANSWER_S", 0.05)
    monkeypatch.setattr(reachable, "_PATIENCE_S", "60")

    def slowly(connection: socket.socket) -> None:
        time.sleep(0.5)
        connection.sendall(OK)

    with server(slowly) as port:
        require_answer(f"http://127.0.0.1:{port}")


def test_a_server_that_comes_up_is_tried_as_often_as_the_user_lets_mlflow_try(monkeypatch: pytest.MonkeyPatch) -> None:
    port, pauses_s = closed_port(), []
    with ExitStack() as stack:

        def pause(seconds: float) -> None:
            pauses_s.append(seconds)
            if len(pauses_s) == 2:
                stack.enter_context(server(lambda connection: connection.sendall(OK), port))

        monkeypatch.setattr(reachable, "time", SimpleNamespace(sleep=pause))  # other threads go on to sleep
        monkeypatch.setattr(reachable, "_TRIES_MORE", "1")
        with pytest.raises(TrackingError):
            require_answer(f"http://127.0.0.1:{port}")
        monkeypatch.setattr(reachable, "_TRIES_MORE", "2")
        require_answer(f"http://127.0.0.1:{port}")
    assert pauses_s == [1.0, 1.0]


@pytest.mark.parametrize("uri", ["sqlite:////no/such/file.db", "databricks", "postgresql:///db?host=/tmp"])
def test_what_is_no_server_with_an_address_is_left_to_mlflow(uri: str) -> None:
    require_answer(uri)
