"""API keys with names and limits: their file, what they may have, and what is told of it."""

import json
import signal
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from support.examples import some_of
from support.holding import LONG_MINUTES, Held
from support.scripted import scripted
from support.serving import mock
from support.waiting import WAIT_S, until
from treetop.api.api_state import ApiState
from treetop.api.keys.administration import ADMIN_PATHS, administration
from treetop.api.keys.api_keys import Keys, all_keys
from treetop.api.keys.rate_limits import MAX_NAMES, Limits, RateLimits
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError

OPTIONS = ServeOptions(api_keys_file="keys.yaml", api_key=("plain",))
KEYS = """
keys:
  - name: busy
    key: sk-busy
    requests_per_minute: 3
    tokens_per_minute: 1000
    max_rows: 2
    max_bodies_bytes: 100000
    cache_salt: s
  - {name: free, key: sk-free}
"""


def refusals(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        all_keys(OPTIONS, text)
    return str(caught.value).split("; ")


# ---------------------------------------------------------------------------------------------- the file


def test_a_file_has_keys_in_yaml_or_json():
    """Both say the same; keys of the command line come first, named by their place."""
    plain, busy, free = all_keys(OPTIONS, KEYS)
    assert (plain.name, plain.key, plain.max_rows) == ("key-1", "plain", None)
    assert (busy.requests_per_minute, busy.tokens_per_minute, busy.max_rows, busy.max_bodies_bytes) == (
        3,
        1000,
        2,
        10**5,
    )
    assert (free.name, free.key, free.cache_salt) == ("free", "sk-free", None)
    listed = {"keys": [{"name": "free", "key": "sk-free"}]}
    for text in (json.dumps(listed), json.dumps(listed, indent="\t")):
        assert all_keys(OPTIONS, text)[1:] == [free]
    assert len({each.owner for each in (plain, busy, free)}) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["1: no keys"]),
        ("keys: 3", ["1: keys: must be a list"]),
        ("[1]", ["1: the file: must be an object with keys"]),
        ("keys: []", ["1: keys: the list is empty"]),
        ("keys:\n  - name: a\n  - key: b", ["2: keys[0].key: missing", "3: keys[1].name: missing"]),
        ("keys:\n  - name: a\n    key: 12345", ["3: keys[0].key: must be text, put it in quotes"]),
        ("keys:\n- {name: a b, key: c}", ["2: keys[0].name: up to 64"]),
        ("keys:\n- {name: a, key: 'secret word'}", ["2: keys[0].key: up to 512 visible"]),
        ("keys:\n- name: a\n  key: x\n  max_rows: 0", ["4: keys[0].max_rows: must be a whole number"]),
        ("keys:\n- name: a\n  key: x\n  tokens_per_minute: 1e6", ["4: keys[0].tokens_per_minute: must be"]),
        ("keys:\n- name: a\n  key: x\n  requests_per_minute: true", ["4: keys[0].requests_per_minute: must be"]),
        ("keys:\n- name: a\n  key: x\n  max_row: 3", ["4: keys[0]: an unknown member, there are name, key"]),
        ("keys:\n- name: a\n  key: x\n  name: b", ["4: keys[0].name: given twice"]),
        ("keys:\n- {name: a, key: x}\n- {name: a, key: y}", ["3: keys[1].name: the same as that of line 2"]),
        ("keys:\n- {name: a, key: x}\n- {name: b, key: x}", ["3: keys[1].key: the same as that of line 2"]),
        ("keys:\n- {name: key-1, key: x}", ["2: keys[0].name: the same as that of --api-key"]),
        ("keys:\n- {name: a, key: plain}", ["2: keys[0].key: the same as that of --api-key"]),
        ("keys:\n- {name: a, key: [x]}", ["2: keys[0].key: must be text"]),
        ("keys:\n- {name: a, key: x, cache_salt: ''}", ["2: keys[0].cache_salt: from 1 to 256"]),
        ("keys:\n- [\n  }", ["3: "]),
        ("keys:\n- {name: a, 'secret': x}", ["2: keys[0]: an unknown member"]),
        ("keys:\n- {name: a, key: *secret}", ["2: neither YAML"]),
        ("keys: &a [*a]", ["1: keys[0]: must be an object"]),
        ("[" * 3000, ["1: "]),
    ],
)
def test_each_bad_line_is_told_with_its_path_and_number_and_no_key_is(text, told):
    found = refusals(text)
    assert len(found) == len(told), found
    for line, begins in zip(found, told, strict=True):
        assert line.startswith(f"keys.yaml:{begins}")
        assert "secret" not in line


VALUES = st.recursive(
    st.text(max_size=5) | st.integers(),
    lambda each: st.lists(each) | st.dictionaries(st.sampled_from(["keys", "name", "key", "max_rows"]), each),
)


@some_of(200, 5000)
@given(st.text(max_size=60) | VALUES.map(json.dumps))
def test_any_text_is_a_file_of_keys_or_is_refused(text):
    keys, refused = [], ""
    try:
        keys = all_keys(OPTIONS, text)
    except ConfigError as error:
        refused = str(error)
    assert len(keys) >= 2 or refused.startswith("keys.yaml:")


def test_keys_are_found_by_either_header_and_replaced_whole_or_not_at_all():
    keys = Keys(OPTIONS, KEYS)
    assert keys.of_request(Headers({"Authorization": "bearer  sk-busy "})).name == "busy"
    assert keys.of_request(Headers({"x-api-key": "sk-free"})).name == "free"
    for wrong in ({}, {"Authorization": "Basic sk-busy"}, {"x-api-key": ""}, {"x-api-key": "sk-busyx"}):
        assert keys.of_request(Headers(wrong)) is None
    with pytest.raises(ConfigError):
        keys.replace("keys:\n- {name: new}")
    assert keys.of_request(Headers({"x-api-key": "sk-busy"})) is not None
    keys.replace("keys:\n- {name: busy, key: turned}")
    assert keys.of_request(Headers({"x-api-key": "sk-busy"})) is None
    assert keys.of_request(Headers({"x-api-key": "turned"})).name == "busy"
    assert keys.of_request(Headers({"x-api-key": "plain"})).name == "key-1"


def test_salts_of_a_key_and_of_its_requests_are_never_those_of_another():
    """A key without a salt cannot reach prefixes of a key with one by what its requests say."""
    text = 'keys:\n- {name: a, key: x, cache_salt: s}\n- {name: b, key: y, cache_salt: "s1"}\n- {name: c, key: z}'
    _, *named, free = all_keys(OPTIONS, text)
    salts = [key.salt(asked) for key in named for asked in (None, "1", "11", "s1")]
    assert free.salt(None) == ""
    assert len(set(salts)) == len(salts)


# ---------------------------------------------------------------------------------------------- limits


def test_a_minutes_requests_come_back_evenly(tmp_path):
    """Three at once, then one each 20 s; what is told says so; two processes count together."""
    now = [1000.0]
    one, two = (RateLimits(tmp_path / "limits", lambda: now[0]) for _ in range(2))
    for each in (one, two):
        each.replace({"busy": Limits(requests=3)})
    for number, limits in enumerate((one, two, one)):
        told = limits.take("busy")
        assert told.refused is None
        assert told.headers["x-ratelimit-limit-requests"] == "3"
        assert told.headers["x-ratelimit-remaining-requests"] == str(2 - number)
    for limits in (one, two):
        refused = limits.take("busy")
        assert (refused.refused, refused.headers["Retry-After"]) == ("requests", "20")
        assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    now[0] += 19.5
    assert one.take("busy").headers["Retry-After"] == "1"
    now[0] += 0.5
    assert two.take("busy").refused is None
    assert one.take("busy").refused == "requests"
    now[0] += 600
    assert two.take("busy").headers["x-ratelimit-remaining-requests"] == "2"
    for each in (one, two):
        each.close()


def test_tokens_that_were_used_are_owed(tmp_path):
    """Debt grows by all that was used, after times without any, too, and is paid by the limit in a minute."""
    now = [5.0]
    limits = RateLimits(None, lambda: now[0])
    limits.replace({"a": Limits(tokens=600), "b": Limits()})
    assert limits.take("a").headers["x-ratelimit-remaining-tokens"] == "600"
    now[0] += 1000
    limits.used("a", 1200)
    limits.used("b", 10**9)
    refused = limits.take("a")
    assert (refused.refused, refused.headers["Retry-After"]) == ("tokens", "61")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert limits.take("b").headers == {}
    now[0] += 61
    assert limits.take("a").refused is None
    limits.replace({"a": Limits(tokens=60_000)})
    assert int(limits.take("a").headers["x-ratelimit-remaining-tokens"]) > 59_000


def test_names_that_come_and_go_are_bounded():
    limits = RateLimits()
    limits.replace({f"n{i}": Limits(requests=1) for i in range(MAX_NAMES)})
    limits.replace({"n3": Limits(requests=1)})
    with pytest.raises(ConfigError, match="names since the server's start"):
        limits.replace({"one more": Limits(requests=1)})
    assert limits.take("n3").refused is None


def test_a_key_over_its_limits_gets_429_and_when_to_come_again(tmp_path, monkeypatch):
    """In OpenAI's and in Anthropic's shape, with OpenAI's headers; reads cost nothing; others are served."""
    monkeypatch.setattr(RateLimits.__init__, "__defaults__", (None, lambda: 100.0))  # however long it takes
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    with scripted(lambda _: "word " * 40, api_keys_file=str(file)) as (url, core):
        ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "cache_salt": "t"}
        busy, free = ({"Authorization": f"Bearer sk-{name}"} for name in ("busy", "free"))
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            assert client.post("/v1/chat/completions", json=ask).status_code == 401
            assert client.get("/v1/models", headers=busy).status_code == 200
            for left in (2, 1, 0):
                answer = client.post("/v1/chat/completions", json=ask, headers=busy)
                assert answer.status_code == 200
                assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000
            refused = client.post("/v1/chat/completions", json=ask, headers=busy)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["Retry-After"]) <= 20
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert "'busy'" in refused.json()["error"]["message"]
            assert client.post("/v1/messages", json=ask, headers=busy).json()["error"]["type"] == "rate_limit_error"
            answer = client.post("/v1/chat/completions", json=ask, headers=free)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
            large = {**ask, "user": "x" * 200_000}
            assert client.post("/v1/chat/completions", json=large, headers=free).status_code == 200
            page = client.get("/metrics").text
        assert "sk-" not in page
        assert 'key_requests_total{key="busy",model_name="scripted"} 5.0' in page
        assert 'key_requests_refused_total{key="busy",limit="requests",model_name="scripted"} 2.0' in page
        assert 'key_generation_tokens_total{key="free",model_name="scripted"}' in page
        asked = core.asked[0]
        assert (asked.tenant.name, asked.tenant.max_rows, asked.cache_salt) == ("busy", 2, "\x001:st")


def test_only_an_admin_key_changes_the_server_for_everybody(tmp_path):
    """Every route of it, also one that is added: with an admin's key, or without any key where there is none; a body
    is not read before."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)

    def statuses(client, key=None, **body):
        headers = {} if key is None else {"x-api-key": key}
        return {client.post(path, headers=headers, **(body or {"json": {}})).status_code for path in ADMIN_PATHS}

    with scripted(lambda _: "a", api_keys_file=str(file), admin_api_key="boss") as (url, _):
        assert {route.path for route in administration(ApiState).routes} == set(ADMIN_PATHS)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for body in ({"json": {}}, {"content": b"{"}):
                assert statuses(client, **body) == statuses(client, "wrong", **body) == {401}
                assert statuses(client, "sk-free", **body) == {403}
            for path in ("/sleep%0a", "/sleep/", "/wake_up%0A"):
                assert client.post(path, headers={"x-api-key": "sk-free"}).status_code in (403, 404)
            refused = client.post("/sleep", headers={"x-api-key": "sk-free"}).json()["error"]
            assert refused["code"] == "permission_denied"
            assert "--admin-api-key" in refused["message"]
            told = {
                client.post(path, headers={"x-api-key": "boss"}, json={}).json()["error"]["message"]
                for path in ADMIN_PATHS
            }
            assert not [each for each in told if "admin" in each]
            assert client.get("/v1/models", headers={"x-api-key": "boss"}).status_code == 200
            assert client.get("/is_sleeping", headers={"x-api-key": "sk-free"}).status_code == 200
    with (
        scripted(lambda _: "a", api_key=("plain",), enable_sleep_mode=True) as (url, _),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):
        assert statuses(client, "plain") == {403}
        assert "--admin-api-key" in client.post("/sleep", headers={"x-api-key": "plain"}).json()["error"]["message"]
    with (
        scripted(lambda _: "a", admin_api_key="boss") as (url, _),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):
        assert statuses(client) == {401}
        assert client.get("/v1/models").status_code == 200


def test_an_admin_key_is_no_other_key():
    for options, problem in (
        ({"admin_api_key": ""}, "must not be empty"),
        ({"admin_api_key": "a", "api_key": ("a",)}, "none of --api-key"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ServeOptions(**options)
    with pytest.raises(ConfigError, match=r"keys.yaml:4: keys\[0\].key: the same as that of --admin-api-key") as caught:
        all_keys(ServeOptions(api_keys_file="keys.yaml", admin_api_key="sk-busy"), KEYS)
    assert "sk-busy" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"keys\[0\].name: the same as that of --admin-api-key"):
        all_keys(
            ServeOptions(api_keys_file="keys.yaml", admin_api_key="boss"), KEYS.replace("name: busy", "name: admin")
        )


def test_a_body_of_a_key_comes_out_of_its_own_budget(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    with scripted(lambda _: "word", api_keys_file=str(file)) as (url, _):
        large = {"messages": [{"role": "user", "content": "hi"}], "user": "x" * 100_001}
        answer = httpx.post(url + "/v1/chat/completions", json=large, headers={"x-api-key": "sk-busy"}, timeout=WAIT_S)
        assert answer.status_code == 413
        assert "max_bodies_bytes" in answer.text


# ---------------------------------------------------------------------------------------------- a server


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(tmp_path, workers):
    """Each API process goes by the new file; a bad one is told with its line, and the old keys hold."""
    file: Path = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    held = Held(tmp_path, LONG_MINUTES)
    flags = ("--api-keys-file", str(file), "--api-workers", workers)
    with mock(1, "1-4", *flags, environment=held.environment) as server:

        def statuses(key: str) -> set[int]:
            """Of connections that any process may take."""
            close = {"x-api-key": key, "Connection": "close"}
            return {server.get("/v1/models", headers=close).status_code for _ in range(8)}

        assert statuses("sk-busy") == {200}
        file.write_text(KEYS.replace("sk-busy", "sk-other").replace("max_rows: 2", "max_rows: many"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(r"keys.yaml:7: keys\[0\].max_rows: must be .*the keys from before hold")
        assert statuses("sk-busy") == {200}
        file.write_text(KEYS.replace("sk-busy", "sk-other"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("2 keys hold from now on")
        until(lambda: statuses("sk-other") == {200} and statuses("sk-busy") == {401}, "the new keys hold")
        close = {"x-api-key": "sk-other", "Connection": "close"}
        codes = [server.post("/tokenize", {"prompt": "a"}, headers=close).status_code for _ in range(5)]
        assert codes == [200] * 3 + [429] * 2, "all processes count together"
        assert "sk-" not in "".join(server.said)


def test_a_stream_waits_for_no_choices_of_another_request():
    """Of 64 rows that 128 long choices hold, a new stream has one before any of them ends."""
    with mock(20, "1") as server:
        flood = {"prompt": "a", "n": 128, "max_tokens": 1500, "stream": True, "timeout": 600}
        with server._http.stream("POST", server.url + "/v1/completions", json=flood) as many:
            lines = many.iter_lines()
            next(lines)
            until(lambda: server.metric("treetop:num_requests_running") == 64, "the choices have all rows")
            got = server.post("/v1/completions", {"prompt": "b", "max_tokens": 1})
            assert got.status_code == 200
            assert server.metric("treetop:request_success_total", finished_reason="length") == 1
            until(lambda: server.metric("treetop:num_gave_way") == 1, "one choice was put back")
