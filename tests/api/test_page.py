"""The page at `/`, without a browser: routes, headers, what its files may load, keys, `--no-ui`."""

import re

import pytest

from support.serving import mock, serving
from treetop.api.page import page_files

FILES = page_files()
LARGEST = 48 * 1024


@pytest.fixture(scope="module")
def server():
    with mock(0, "4", "--api-key", "sesame") as running:
        yield running


@pytest.mark.parametrize("path", FILES)
def test_each_file_is_served_without_a_key_under_a_strict_policy(server, path):
    """The page asks for the key itself; nothing of it tells anything of the model."""
    answer = server.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path][0]
    assert answer.headers["content-type"] == FILES[path][1]
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert {"base-uri", "form-action", "frame-ancestors"} <= {key for key, value in policy.items() if value == "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert server._http.head(server.url + path).status_code == 200


def test_what_is_asked_of_the_model_needs_the_key(server):
    assert server.get("/v1/models").status_code == 401
    assert server.get("/ui/other.js").status_code == 401
    assert server.get("/ui/other.js", headers={"X-Api-Key": "sesame"}).status_code == 404
    assert server.post("/", {}, headers={"X-Api-Key": "sesame"}).status_code == 405


def test_no_file_names_another_host_or_needs_what_the_policy_forbids():
    """Every address is a path of this server; no script or style stands in the markup."""
    assert {"/", "/ui/app.js", "/ui/style.css"} <= {*FILES}
    for path, (content, _) in FILES.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody loads
        assert not re.search(r"https?:|//[a-z0-9-]+\.|@import|\burl\(", text), path
        assert "eval(" not in text
        assert "innerHTML" not in text, "text of a model is never markup"
        assert len(content) < LARGEST
    page = FILES["/"][0].decode()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son[a-z]+=|\sstyle=|javascript:", page, re.I)
    for address in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert f"/{address}" in FILES, "relative, for it may be served under a path of a proxy"
    for path in FILES:
        for name in re.findall(r'from "\./([^"]+)"', FILES[path][0].decode()):
            assert f"/ui/{name}" in FILES


def test_every_control_of_the_page_has_a_name():
    """A label, or words of its own."""
    page = FILES["/"][0].decode()
    labelled = set(re.findall(r'<label[^>]*\bfor="([^"]+)"', page))
    assert labelled == set(re.findall(r'<(?:input|textarea|select)[^>]*\bid="([^"]+)"', page))
    for attributes, words in re.findall(r"<button([^>]*)>(.*?)</button>", page):
        assert "aria-label=" in attributes or words.strip(" &;")
    assert 'lang="en"' in page


@pytest.fixture(scope="module")
def without_page():
    with serving("tests/checkpoints/nestling-hybrid", "--mock-engine", "0,4", "--no-ui") as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/ui/app.js"])
def test_without_the_page_its_paths_are_as_unknown_as_others(without_page, path):
    """`--no-ui`: not even the path is known."""
    answer, other = without_page.get(path), without_page.get("/other")
    assert answer.status_code == other.status_code == 404
    assert answer.json()["error"]["message"] == other.json()["error"]["message"].replace("/other", path)
    assert "content-security-policy" not in answer.headers


def test_a_server_without_a_template_says_so(without_page):
    """To the page, which then offers completions."""
    assert without_page.get("/v1/models").json()["data"][0]["treetop"] == {"chat": False, "draft_trees": False}
