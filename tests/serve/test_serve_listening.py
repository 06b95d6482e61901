"""Where a server listens: HTTPS, a Unix socket, and a path under which a proxy has it."""

import asyncio
import json
import shutil
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from support.certificates import Authority, needs_openssl
from support.serving import Server, replayed
from support.waiting import WAIT_S
from treetop.serve.listening import listening_socket, renew_certificate, tls_context
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError


def trusting(authority: str, pair: tuple[str, str] | None = None) -> ssl.SSLContext:
    """What a client of an authority says, with a certificate of its own or without one."""
    context = ssl.create_default_context(cafile=authority)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


@needs_openssl
def test_https_streams_under_a_path_and_asks_clients_for_certificates(tmp_path):
    """Whoever brings no certificate, or another authority's, is refused and harms nobody."""
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    certificate, key = ours.certificate("server")
    client, stranger = ours.certificate("client"), other.certificate("stranger")
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", ours.file)
    server = Server("--mock-engine", "1,2", "--root-path", "/llm", "--api-key", "sesame", *flags)
    try:
        url = server.wait_for(r"on (https://\S+:\d+/llm) ")[1]
        bare = url.removesuffix("/llm")
        with pytest.raises(httpx.HTTPError):
            httpx.get(bare.replace("https", "http") + "/health", timeout=WAIT_S)
        for context in (trusting(ours.file), trusting(ours.file, stranger)):
            with pytest.raises(httpx.HTTPError), httpx.Client(verify=context, timeout=WAIT_S) as refused_client:
                refused_client.get(f"{url}/health", timeout=WAIT_S)
        server.wait_for("no TLS with client")
        with httpx.Client(verify=trusting(ours.file, client), timeout=WAIT_S) as http:
            for begin in (url, bare):  # a proxy that leaves its path on, and one that takes it off
                http.headers = {}
                assert http.get(f"{begin}/health/ready").status_code == 200
                assert http.get(f"{begin}/").status_code == 200, "the page"
                assert http.get(f"{begin}/v1/models").status_code == 401
                http.headers = {"X-Api-Key": "sesame"}
                body = {"prompt": [5, 6, 7], "max_tokens": 9, "stream": True}
                events = http.post(f"{begin}/v1/completions", json=body).text.split("\n\n")
                pieces = [json.loads(each[6:])["choices"][0]["text"] for each in events if each.startswith("data: {")]
                assert "".join(pieces) == replayed(3, 9)
            assert isinstance(http.post(f"{url}/api/chat", json={}).json()["error"], str), "in Ollama's shape"
            assert http.get(f"{url}/llm/health").status_code == 404
            assert http.get(f"{bare}/llmhealth").status_code == 404
            assert http.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert server.end() == 0
    finally:
        server.kill()


def test_a_unix_socket_serves_and_is_gone_at_the_end(tmp_path):
    """By two API processes. One that a dead server left is replaced, one in use is not, and neither is another file."""
    path = tmp_path / "treetop.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = Server("--mock-engine", "0,4", "--api-workers", "2", "--uds", str(path), "--access-log")
    try:
        server.wait_for(rf"on unix:{path} ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=WAIT_S) as http:
            answer = http.post("http://treetop/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9})
            assert answer.json()["choices"][0]["text"] == replayed(3, 9)
        in_use = pytest.raises(ConfigError, match=r"--uds .*treetop.sock: Address already in use")
        with in_use, listening_socket(ServeOptions(uds=str(path))):
            pass
        assert server.end() == 0
    finally:
        server.kill()
    assert not path.exists()
    path.write_text("somebody's")
    with pytest.raises(ConfigError, match="Address already in use"), listening_socket(ServeOptions(uds=str(path))):
        pass
    assert path.read_text() == "somebody's"
    with pytest.raises(ConfigError, match="too long"), listening_socket(ServeOptions(uds="/tmp/" + "x" * 200)):
        pass


@needs_openssl
def test_files_of_tls_that_cannot_be_used_are_told_before_anything_is_loaded(tmp_path):
    """A missing file, no certificate, a key of another, an encrypted one: nobody is asked for a password."""
    ours = Authority(tmp_path, "ours")
    one, two = ours.certificate("one"), ours.certificate("two")
    encrypted = ours.certificate("encrypted", "-passout", "pass:secret")
    text = tmp_path / "text.pem"
    text.write_text("nothing")
    for certificate, key, words in (
        (str(tmp_path / "none.pem"), None, "--ssl-certfile .*none.pem: No such file"),
        (str(text), None, "--ssl-certfile .*text.pem: "),
        (one[0], two[1], "--ssl-certfile .* --ssl-keyfile .*two.key: .*(?i:mismatch)"),
        (*encrypted, "the key is encrypted"),
    ):
        with pytest.raises(ConfigError, match=words):
            tls_context(ServeOptions(ssl_certfile=certificate, ssl_keyfile=key))
    with pytest.raises(ConfigError, match=r"--ssl-ca-certs .*text.pem"):
        tls_context(ServeOptions(ssl_certfile=one[0], ssl_keyfile=one[1], ssl_ca_certs=str(text)))
    optional = ServeOptions(ssl_certfile=one[0], ssl_keyfile=one[1], ssl_ca_certs=ours.file, ssl_cert_reqs=1)
    context = tls_context(optional)
    assert context is not None
    assert context.verify_mode is ssl.CERT_OPTIONAL


@needs_openssl
def test_a_certificate_that_is_renewed_is_given_to_whoever_comes_next(tmp_path, caplog):
    """A pair that does not fit yet is not taken; the old one goes on meanwhile. The handshake runs in memory."""
    ours = Authority(tmp_path, "ours")
    first, second = ours.certificate("first"), ours.certificate("second")
    used = str(tmp_path / "used.pem"), str(tmp_path / "used.key")
    for source, target in zip(first, used, strict=True):
        shutil.copy(source, target)
    options = ServeOptions(ssl_certfile=used[0], ssl_keyfile=used[1])
    context = tls_context(options)

    def given() -> bytes:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting(ours.file).wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return client.getpeercert(True)

    def certificate_of(pair: tuple[str, str]) -> bytes:
        return ssl.PEM_cert_to_DER_cert(Path(pair[0]).read_text())

    async def run() -> None:
        looking = asyncio.ensure_future(renew_certificate(context, options, 0.01))
        await asyncio.sleep(0)  # it has looked once
        assert given() == certificate_of(first)
        shutil.copy(second[0], used[0])
        while "cannot be used yet" not in caplog.text:
            await asyncio.sleep(0.01)
        assert given() == certificate_of(first)
        shutil.copy(second[1], used[1])
        while given() != certificate_of(second):
            await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "key.pem"}, "only with --ssl-certfile"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "--ssl-cert-reqs: only with --ssl-ca-certs"),
        ({"root_path": "/v1"}, "--root-path /v1: the server has paths of its own"),
        ({"root_path": "/a/"}, "--root-path must be a path such as /llm"),
        ({"root_path": "a"}, "--root-path must be a path such as /llm"),
    ],
)
def test_options_that_say_nothing_together_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ServeOptions(**options)
