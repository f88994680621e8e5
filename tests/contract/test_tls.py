"""TLS and mTLS over HTTP and gRPC, and certificates that change while connections are made; real sockets."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import CallError, Client, Tls
from tests.certificates import Authority, Pair
from tests.contract.conftest import settings_in
from tests.contract.running import RunningTrainer, RunningWorker, wait_until
from trainer.broker import Broker

ROW = {"user_id": "u1", "item_id": "i1"}


class Secured:
    """A worker with mTLS, its authority's files, and a client's certificate."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority, self.clients = Authority("servers"), Authority("clients")
        self.cert_file, self.key_file = self.authority.sign("first").write(directory, "server")
        self.client_ca_file = directory / "clients.pem"
        self.client_ca_file.write_bytes(self.clients.certificate)
        self.pair = self.clients.sign("caller")
        self.client_files = self.pair.write(directory, "client")
        self.tls = {"cert_file": str(self.cert_file), "key_file": str(self.key_file)}

    worker: RunningWorker

    def context(self, authority: Authority | None = None, files: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=(authority or self.authority).certificate.decode())
        if files is not None:
            context.load_cert_chain(*files)
        return context

    def http(self, **more: Any) -> httpx.Client:
        context = self.context(more.get("authority"), more.get("files", self.client_files))
        return httpx.Client(base_url=f"https://127.0.0.1:{self.worker.http_port}", verify=context, timeout=20)

    def sdk(self, authority: Authority | None = None, pair: Pair | None = None) -> Client:
        root = (authority or self.authority).certificate
        own = pair or self.pair
        return Client(self.worker.grpc_target, timeout_s=5, tls=Tls(root, own.key, own.certificate))

    def served(self, authority: Authority | None = None) -> str:
        """The common name that a new connection is shown."""
        with self.http(authority=authority) as http, http.stream("GET", "/livez") as reply:
            subject = reply.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()["subject"]
            return str(subject[0][0][1])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    found = Secured(directory)
    serving: dict[str, Any] = {"http_port": 0, "admin_port": 0, "grpc_port": 0}
    serving["tls"] = found.tls | {"client_ca_file": str(found.client_ca_file)}
    settings = settings_in(directory, broker.url, serving=serving)
    with RunningTrainer(settings), RunningWorker(settings) as worker:
        found.worker = worker
        wait_until(lambda: worker.admin.get("/readyz").status_code == 200, within_s=60)
        yield found


def test_http_and_grpc_answer_a_client_with_a_certificate(secured: Secured) -> None:
    with secured.http() as http, secured.sdk() as sdk:
        reply = http.post("/v1/score", json={"candidates": [ROW], "time_ms": 1})
        assert reply.json()["scores"] == pytest.approx(sdk.score([ROW], time_ms=1).scores.tolist(), rel=1e-6)


def test_a_client_without_a_certificate_or_with_anothers_gets_no_answer(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority("strangers").sign("caller")
    for files in (None, stranger.write(tmp_path, "stranger")):
        with secured.http(files=files) as http, pytest.raises(httpx.TransportError):
            http.get("/livez")
    for tls in (
        Tls(secured.authority.certificate),
        Tls(secured.authority.certificate, stranger.key, stranger.certificate),
    ):
        with Client(secured.worker.grpc_target, timeout_s=5, tls=tls) as sdk, pytest.raises(CallError) as refused:
            sdk.score([ROW])
        assert refused.value.code == "unavailable"


def test_a_client_in_clear_text_gets_no_answer(secured: Secured) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secured.worker.http_port}/livez")
    with Client(secured.worker.grpc_target, timeout_s=5) as sdk, pytest.raises(CallError):
        sdk.score([ROW])


def test_a_client_that_does_not_know_the_authority_does_not_connect(secured: Secured) -> None:
    other = Authority("others")
    with secured.http(authority=other) as http, pytest.raises(httpx.ConnectError):
        http.get("/livez")
    with secured.sdk(authority=other) as sdk, pytest.raises(CallError):
        sdk.score([ROW])


def test_old_protocols_are_refused(secured: Secured) -> None:
    context = secured.context(files=secured.client_files)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    url = f"https://127.0.0.1:{secured.worker.http_port}/livez"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, verify=context)


def test_the_admin_port_on_loopback_stays_in_clear_text(secured: Secured) -> None:
    assert secured.worker.admin.get("/livez").status_code == 200


def test_a_new_certificate_is_taken_for_new_connections_and_open_ones_go_on(secured: Secured) -> None:
    assert secured.served() == "first"
    with secured.http() as http, secured.sdk() as sdk:
        assert http.get("/livez").status_code == 200
        sdk.score([ROW])
        secured.authority.sign("second").write(secured.directory, "server")
        wait_until(lambda: secured.served() == "second")
        assert http.get("/livez").status_code == 200
        sdk.score([ROW])


def test_a_certificate_of_another_authority_is_shown_over_grpc_too(secured: Secured) -> None:
    secured.authority = Authority("servers, the second")
    secured.authority.sign("third").write(secured.directory, "server")

    def known() -> bool:
        try:
            return secured.served() == "third"
        except httpx.ConnectError:
            return False

    wait_until(known)
    with secured.sdk() as sdk:
        sdk.score([ROW])


def test_a_certificate_without_its_key_changes_nothing(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    before = secured.served()
    secured.cert_file.write_bytes(secured.authority.sign("unfinished").certificate)
    wait_until(lambda: any("stays in force" in record.getMessage() for record in caplog.records))
    assert secured.served() == before
    with secured.sdk() as sdk:
        sdk.score([ROW])
    secured.authority.sign("after").write(secured.directory, "server")
    wait_until(lambda: secured.served() == "after")


def test_an_authority_of_clients_that_is_taken_out_is_refused_from_then_on(secured: Secured, tmp_path: Path) -> None:
    new = Authority("clients, the second")
    files = new.sign("caller").write(tmp_path, "client")
    secured.client_ca_file.write_bytes(new.certificate)

    def answers(files: tuple[Path, Path]) -> bool:
        try:
            with secured.http(files=files) as http:
                return http.get("/livez").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(lambda: answers(files))
    assert not answers(secured.client_files)
    with secured.sdk() as sdk, pytest.raises(CallError):
        sdk.score([ROW])
