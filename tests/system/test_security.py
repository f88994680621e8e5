"""A whole system against callers who mean no good, while operators rotate what it knows; real processes throughout."""

import gzip
import http.client
import json
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import CallError, Client, Tls
from service.http_server import HANDSHAKE_S, HEAD_S
from service.token_file import create, revoke
from tests.certificates import Authority
from tests.system.running import Running, short_directory, system, wait_until

pytestmark = pytest.mark.alone

SCORE = {"rows": [{"user_id": 1, "video_id": 2}]}
MIB = 2**20
ANYWHERE = "0.0.0.0"  # noqa: S104 - refused
HEAD = "POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


class Secured(Running):
    """A system with tokens and TLS. Readiness is asked of the admin port, which on loopback has none."""

    tokens: Path
    authority: Authority

    def is_ready(self) -> bool:
        try:
            assert self._process is None or self._process.poll() is None, self.log
            return self.get("/readyz", admin=True)[0] == 200
        except OSError:
            return False

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)

    def ask(self, token: str, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request on a connection of its own."""
        url = f"https://127.0.0.1:{self.http_port}{path}"
        headers = {"authorization": f"Bearer {token}"}
        return httpx.request(method, url, json=body, headers=headers, verify=self.context, timeout=20)

    def sdk(self, token: str) -> Client:
        tls = Tls(self.authority.certificate)
        return Client(f"127.0.0.1:{self.grpc_port}", timeout_s=20, token=token, tls=tls)

    def served(self) -> str:
        """The common name that a new connection is shown."""
        with (
            socket.create_connection(("127.0.0.1", self.http_port), timeout=20) as connection,
            self.context.wrap_socket(connection, server_hostname="127.0.0.1") as secure,
        ):
            subject: Any = (secure.getpeercert() or {})["subject"]
            return str(subject[0][0][1])


@contextmanager
def secured(*, mtls: bool = False, **overrides: Any) -> Iterator[Secured]:
    """A ready system with tokens and TLS."""
    with short_directory() as directory:
        authority = Authority("servers")
        cert_file, key_file = authority.sign("first").write(directory, "server")
        tls = {"cert_file": str(cert_file), "key_file": str(key_file)}
        if mtls:
            clients = Authority("clients")
            (directory / "clients.pem").write_bytes(clients.certificate)
            clients.sign("caller").write(directory, "client")
            tls["client_ca_file"] = str(directory / "clients.pem")
        (directory / "ca.pem").write_bytes(authority.certificate)
        tokens = directory / "tokens.jsonl"
        create(tokens, "first", ["score"])
        running = Secured(directory, serving__tls=tls, serving__tokens_file=str(tokens), **overrides)
        running.tokens, running.authority = tokens, authority
        with running:
            yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[Secured]:
    with secured(serving__workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with system() as running:
        yield running


def cli(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIVEBED_")} | variables
    command = [sys.executable, "-m", "service.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def statuses(running: Secured, token: str, *, times: int = 8) -> set[int]:
    """What both workers answer: each connection may come to either."""
    return {running.ask(token, "POST", "/v1/score", SCORE).status_code for _ in range(times)}


def test_tokens_are_made_used_and_revoked_from_the_command_line(guarded: Secured) -> None:
    file = ("--file", str(guarded.tokens))
    made = json.loads(
        cli("token", "create", "--name", "cli", "--scope", "score", "--scope", "lookup", *file, "--json").stdout
    )
    url = ("--url", f"https://127.0.0.1:{guarded.http_port}", "--ca-file", str(guarded.ca_file))
    token = {"LIVEBED_TOKEN": made["token"]}
    wait_until(lambda: statuses(guarded, made["token"]) == {200}, timeout_s=20, why="both workers know the token")
    assert cli("score", json.dumps(SCORE), *url, **token).stdout.startswith("0\t0.")
    assert cli("lookup", "video", "1", *url, "--token", made["token"]).returncode == 0
    assert cli("status", *url, "--json", **token).returncode == 0
    refused = cli("send", "/dev/null", *url, **token)
    assert refused.returncode == 0  # nothing to send, nothing refused
    events = guarded.directory / "events"
    events.write_text('{"features": {"user_id": 1, "video_id": 1}, "label": 1}\n')
    refused = cli("send", str(events), *url, **token)
    assert (refused.returncode, "403 permission_denied" in refused.stderr) == (1, True)
    unknown = cli("score", json.dumps(SCORE), *url)
    assert (unknown.returncode, "401 unauthenticated" in unknown.stderr) == (1, True)
    untrusted = cli("score", json.dumps(SCORE), *url[:2], **token)
    assert (untrusted.returncode, "CERTIFICATE_VERIFY_FAILED" in untrusted.stderr) == (1, True)
    listed = cli("token", "list", *file).stdout
    assert "cli\tlookup,score\tfor good" in listed and made["token"] not in listed
    assert cli("token", "revoke", "cli", *file).returncode == 0
    wait_until(lambda: statuses(guarded, made["token"]) == {401}, timeout_s=20, why="it is refused everywhere")


def test_an_expired_token_is_refused_over_http_and_grpc(guarded: Secured) -> None:
    token = create(guarded.tokens, "short-lived", ["score"], expires_days=4 / 86_400)
    wait_until(lambda: statuses(guarded, token) == {200}, timeout_s=4, why="it is taken while it lives")
    wait_until(lambda: statuses(guarded, token) == {401}, timeout_s=20, why="it expires")
    assert "has expired" in guarded.ask(token, "POST", "/v1/score", SCORE).json()["detail"]
    with guarded.sdk(token) as sdk, pytest.raises(CallError, match=r"unauthenticated: .*has expired"):
        sdk.score(SCORE["rows"])


def test_a_wrong_scope_is_refused_over_http_grpc_and_on_the_admin_port(guarded: Secured) -> None:
    token = create(guarded.tokens, "reader", ["lookup"])
    wait_until(lambda: statuses(guarded, token) == {403}, timeout_s=20, why="both workers know the token")
    with guarded.sdk(token) as sdk, pytest.raises(CallError, match="permission_denied"):
        sdk.score(SCORE["rows"])
    header = {"authorization": f"Bearer {token}"}
    assert guarded.request("POST", "/v1/checkpoints", admin=True, **header)[0] == 403
    assert guarded.request("POST", "/v1/checkpoints", admin=True)[0] == 401


def test_tokens_are_rotated_under_load_and_no_request_fails(guarded: Secured) -> None:
    current = [create(guarded.tokens, "load-0", ["score"])]
    wait_until(lambda: statuses(guarded, current[0]) == {200}, timeout_s=20, why="both workers know the token")
    with load(lambda: guarded.ask(current[0], "POST", "/v1/score", SCORE).status_code == 200) as failed:
        for k in range(1, 3):
            new = create(guarded.tokens, f"load-{k}", ["score"])
            wait_until(lambda new=new: statuses(guarded, new) == {200}, timeout_s=20, why="the new one is taken")
            before, current[0] = current[0], new
            time.sleep(0.3)  # what was begun with the old one
            revoke(guarded.tokens, f"load-{k - 1}")
            wait_until(lambda before=before: statuses(guarded, before) == {401}, timeout_s=20, why="the old one is not")
    assert failed == []


def test_certificates_are_rotated_under_load_and_no_request_fails(guarded: Secured) -> None:
    token = create(guarded.tokens, "rotating", ["score"])
    wait_until(lambda: statuses(guarded, token) == {200}, timeout_s=20, why="both workers know the token")

    def call_both() -> bool:
        with guarded.sdk(token) as sdk:
            sdk.score(SCORE["rows"])
        return guarded.ask(token, "POST", "/v1/score", SCORE).status_code == 200

    with load(call_both) as failed:
        for name in ("second", "third"):
            guarded.authority.sign(name).write(guarded.directory, "server")
            wait_until(
                lambda name=name: {guarded.served() for _ in range(8)} == {name}, timeout_s=20, why=f"{name} is shown"
            )
    assert failed == []


def test_no_token_is_in_any_log_or_file_of_the_system(guarded: Secured) -> None:
    token = create(guarded.tokens, "seen", ["score"])
    wait_until(lambda: statuses(guarded, token) == {200}, timeout_s=20, why="both workers know the token")
    guarded.ask(token, "POST", "/v1/score", {"nonsense": 1})
    guarded.ask(token, "POST", "/v1/events", [])
    written = [guarded.output, *(path for path in guarded.run_dir.rglob("*") if path.is_file()), guarded.tokens]
    assert re.findall(rb"lbd_[A-Za-z0-9_-]{8,}", b"".join(path.read_bytes() for path in written)) == []


def test_a_handshake_that_does_not_end_is_given_up_over_http_and_grpc(guarded: Secured) -> None:
    ports = (guarded.http_port, guarded.grpc_port)
    opened = [socket.create_connection(("127.0.0.1", port), timeout=HANDSHAKE_S + 5) for port in ports]
    for connection in opened:
        connection.sendall(b"\x16\x03\x01\x02\x00")  # the first bytes of a hello of 512
    for connection in opened:
        assert connection.recv(4096) in {b"", b"\x15\x03\x01\x00\x02\x02\x32"}  # closed; maybe with an alert
        connection.close()


def test_mtls_answers_who_has_a_certificate_and_nobody_else() -> None:
    with secured(mtls=True) as running:
        token = create(running.tokens, "mine", ["score"])
        url = ("--url", f"https://127.0.0.1:{running.http_port}", "--ca-file", str(running.ca_file), "--token", token)
        own = (
            "--client-cert",
            str(running.directory / "client.pem"),
            "--client-key",
            str(running.directory / "client.key"),
        )
        wait_until(
            lambda: cli("score", json.dumps(SCORE), *url, *own).returncode == 0, timeout_s=30, why="it is answered"
        )
        refused = cli("score", json.dumps(SCORE), *url)
        assert refused.returncode == 1
        assert "no answer from" in refused.stderr
        with running.sdk(token) as sdk, pytest.raises(CallError, match="unavailable"):
            sdk.score(SCORE["rows"])


@pytest.mark.parametrize(
    ("serving", "said"),
    [
        ({"host": ANYWHERE}, "there is no authentication: set tokens_file"),
        ({"host": ANYWHERE, "tokens_file": "tokens"}, "tokens would cross the network to '0.0.0.0' in clear text"),
        ({"tokens_file": "open"}, "got 'mode 0644', wanted a file that only its owner may use: chmod 600"),
        ({"tokens_file": "nowhere"}, "No such file or directory"),
        ({"tls": {"cert_file": "tokens", "key_file": "tokens"}}, "serving.tls.cert_file"),
    ],
)
def test_what_would_be_unsafe_is_refused_at_the_start_in_one_sentence(serving: dict[str, Any], said: str) -> None:
    with short_directory() as directory:
        create(directory / "tokens", "a", ["score"])
        (directory / "open").write_text("")
        (directory / "open").chmod(0o644)
        variables = {f"LIVEBED_SERVING__{name.upper()}": json.dumps(value) for name, value in serving.items()}
        variables |= {"LIVEBED_DATA_DIR": "data", "LIVEBED_RUN_DIR": "run"}
        configuration = Running(directory).configuration
        refused = subprocess.run(
            [sys.executable, "-m", "service.cli", "up", "-c", str(configuration)],
            env=os.environ | variables,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert refused.returncode == 2
        assert said in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        assert not (directory / "run").exists()


def peak_bytes(running: Running) -> int:
    """The most memory that the worker has ever had resident."""
    status = Path(f"/proc/{running.pid_of('-m service --worker')}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def test_a_gzip_bomb_costs_no_more_than_the_limit_of_a_body(plain: Running) -> None:
    bomb = gzip.compress(b" " * 2**30)
    assert len(bomb) < 2 * MIB
    before = peak_bytes(plain)
    for _ in range(5):
        headers = {"content_type": "application/json", "content_encoding": "gzip"}
        status, problem = plain.request("POST", "/v1/score", bomb, **headers)
        assert (status, problem["code"]) == (413, "too_large")
    assert peak_bytes(plain) - before < 16 * MIB


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_1_gb_is_cut_off_early_and_leaves_memory_flat(plain: Running, declared: bool) -> None:
    before = peak_bytes(plain)
    sent = 0
    chunk = b" " * MIB
    with socket.create_connection(("127.0.0.1", plain.http_port), timeout=20) as connection, suppress(OSError):
        framing = f"content-length: {2**30}" if declared else "transfer-encoding: chunked"
        connection.sendall(f"{HEAD}{framing}\r\n\r\n".encode())
        while sent < 2**30:
            connection.sendall(chunk if declared else b"100000\r\n" + chunk + b"\r\n")
            sent += len(chunk)
    assert sent < 64 * MIB
    assert peak_bytes(plain) - before < 16 * MIB
    assert plain.post("/v1/score", SCORE)[0] == 200


def test_headers_without_an_end_are_cut_off_by_their_bytes(plain: Running) -> None:
    before = peak_bytes(plain)
    sent = 0
    with socket.create_connection(("127.0.0.1", plain.http_port), timeout=20) as connection, suppress(OSError):
        connection.sendall(HEAD.encode())
        while sent < 256 * MIB:
            connection.sendall(b"x-more: " + b"x" * 65_536 + b"\r\n")
            sent += 65_546
    assert sent < 32 * MIB  # what the kernel has room for on both sides
    assert peak_bytes(plain) - before < 8 * MIB


SLOW = {
    "nothing at all": (b"", b""),
    "headers": (HEAD.encode(), b"x"),
    "empty lines": (b"\r\n", b"\r\n"),
    "empty lines after a request": (b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
    "a body": (HEAD.encode() + b"content-length: 100000\r\n\r\n", b" "),
    "chunks": (HEAD.encode() + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


def test_connections_that_trickle_are_given_up_and_others_are_answered_meanwhile(plain: Running) -> None:
    opened = {
        (name, k): socket.create_connection(("127.0.0.1", plain.http_port), 20) for name in SLOW for k in range(20)
    }
    for (name, _), connection in opened.items():
        connection.sendall(SLOW[name][0])
        connection.setblocking(False)
    deadline_s = time.monotonic() + HEAD_S + 10
    while opened:
        assert time.monotonic() < deadline_s, f"still open: {sorted({name for name, _ in opened})}"
        for key, connection in list(opened.items()):
            with suppress(BlockingIOError):
                try:
                    connection.send(SLOW[key[0]][1])
                    if connection.recv(4096):
                        continue
                except (ConnectionError, BrokenPipeError):
                    pass
                opened.pop(key).close()
        began_s = time.monotonic()
        assert plain.post("/v1/score", SCORE)[0] == 200
        assert time.monotonic() - began_s < 1.0
        time.sleep(0.1)  # a trickle
    status, metrics = plain.get("/metrics", admin=True)
    assert status == 200
    assert b'livebed_rejected_requests_total{reason="slow_client"}' in metrics


def test_connections_are_bounded_and_one_too_many_is_told_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))  # the worker allows half as many connections
    try:
        with system() as running:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            opened = [socket.create_connection(("127.0.0.1", running.http_port), 20) for _ in range(101)]
            reply = http.client.HTTPResponse(opened[-1])
            reply.begin()
            assert (reply.status, json.loads(reply.read())["code"]) == (503, "overloaded")
            assert reply.headers["retry-after"] == "1"
            for connection in opened:
                connection.close()
            running.wait_until(running.is_ready, "there is room again")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def load(call: Any, *, num_threads: int = 2) -> Iterator[list[str]]:
    """Call again and again on threads while inside; yields what failed."""
    failed: list[str] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                if not call():
                    failed.append("refused")
            except Exception as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
