"""The page at `/` in headless Chromium: somebody chats, stops, looks at trees and enters a key."""

import pytest

from support.browser import CHROMIUM, DRIVER, Browser, browsing
from support.serving import Server, mock, serving
from support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium (Debian: apt-get install chromium chromium-driver)"
    ),
]
PAIR = ("builtin:nestling", "--speculative-draft-model-path", "builtin:nestling-eagle3")


@pytest.fixture(scope="module")
def browser():
    with browsing() as running:
        yield running


@pytest.fixture(scope="module")
def server():
    with serving(*PAIR) as running:
        yield running


def opened(browser: Browser, server: Server) -> None:
    browser.size(1280, 820)
    browser.open(server.url + "/")
    until(lambda: browser.run("return document.activeElement.id") == "prompt", "the page has not connected")


def choose_settings(browser: Browser, **values: str) -> None:
    for name, value in values.items():
        browser.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input'))",
            name.replace("_", "-"),
            value,
        )


def ended(browser: Browser) -> bool:
    return browser.shown("#send") and browser.count(".answer, .completion") > 0


def ask(browser: Browser, text: str) -> None:
    before = browser.count(".turn h3")
    browser.type("#prompt", text)
    browser.press("Enter")
    until(lambda: browser.count(".turn h3") > before and ended(browser), "no answer")


def test_a_chat_by_keyboard_alone_shows_rounds_and_their_trees(browser, server):
    """Message, answer, rounds by arrow keys, the tree of each; nothing from another host, no error in the console."""
    opened(browser, server)
    choose_settings(browser, temperature="0", max_tokens="48")
    ask(browser, "def area(r): return 3 * r; def area(r): return 3 *")
    depths = browser.run("return [...document.querySelectorAll('.answer .t')].map(t => t.className)")
    assert len(depths) > 5
    assert depths[0] == "t first"
    assert {"t d0", "t d1"} <= {*depths}
    figures = browser.text(".answer .figures")
    assert figures.startswith(f"{len(depths)} tokens")
    rounds = browser.count(".answer .round") - 1
    assert f"{rounds} rounds" in figures
    assert "accept length" in figures
    assert "tokens/s" in figures

    browser.run("document.querySelector('.answer .round').focus()")
    browser.press("ArrowRight")
    for number in range(1, min(rounds, 4) + 1):
        assert browser.text("#round-title") == f"Round {number}"
        nodes, taken = browser.count("#tree rect"), browser.count("#tree g.taken")
        shown = browser.run("return document.querySelector('.round.now').children.length")
        assert nodes > taken >= 1
        assert browser.count("#tree g.bonus") == 1
        assert shown in (taken, 1 + taken - 1), "accepted drafts without the root, and the bonus"
        assert browser.count("#nodes-table tbody tr") == nodes - 1
        browser.press("ArrowRight")
    browser.press("ArrowLeft")
    browser.click("#next")
    assert "Round" in browser.text("#round-title")
    assert {address.split("/")[2] for address in browser.requests()} == {server.url.removeprefix("http://")}
    assert browser.complaints() == []


def test_the_conversation_goes_on_and_the_request_is_shown_as_it_was_sent(browser, server):
    opened(browser, server)
    choose_settings(browser, temperature="0", max_tokens="8", seed="7", system='Be short. It\'s "quoted".')
    ask(browser, "first")
    answer = browser.run("return document.querySelector('.answer .said').textContent")
    browser.type("#prompt", "second")
    shown = browser.text("#curl")
    assert f"curl -N {server.url}/v1/chat/completions" in shown
    for words in ("It'\\''s", '"seed": 7', '"max_tokens": 8', '"temperature": 0', '"content": "second"', "first"):
        assert words in shown
    assert "Authorization" not in shown
    assert answer.strip()
    browser.press("Enter")
    until(lambda: browser.count(".answer") == 2 and ended(browser))
    browser.click("#new")
    assert browser.count(".turn") == 0
    assert browser.shown("#empty")
    assert "first" not in browser.text("#curl")


def test_an_answer_can_be_stopped_and_the_engine_stops_too(browser):
    """By the button and by Escape; what came stays, and the next message is answered."""
    with mock(40, "1-4") as slow:
        opened(browser, slow)
        choose_settings(browser, max_tokens="900")
        for stop in (lambda: browser.click("#stop"), lambda: browser.press("Escape")):
            before = browser.count(".answer")
            browser.type("#prompt", "go on")
            browser.press("Enter")
            until(lambda before=before: browser.count(".answer") > before)
            until(lambda: browser.count(".answer:last-child .t") > 3)
            stop()
            until(lambda: browser.shown("#send"))
            assert "stopped" in browser.text(".answer:last-child .figures")
        until(lambda: slow.metric("treetop:num_requests_running") == 0, "the request goes on")
        until(lambda: "0 running" in browser.text("#load"))
        browser.run("document.querySelector('.answer .round:nth-child(2)').click()")
        assert "This server tells no trees" in browser.text("#round-words")
        assert not browser.shown("#tree")


def test_a_server_with_a_key_is_asked_with_the_one_that_is_entered(browser):
    """A wrong one is asked for again; the right one is kept for the tab, and never shown."""
    with mock(0, "4", "--api-key", "sesame") as locked:
        browser.size(1280, 820)
        browser.open(locked.url + "/")
        until(lambda: browser.shown("#key-form"))
        browser.type("#key", "sesam")
        browser.press("Enter")
        until(lambda: "wrong or missing API key" in browser.text("#key-error"))
        browser.run("document.getElementById('key').value = ''")
        browser.type("#key", "sesame")
        browser.press("Enter")
        until(lambda: not browser.shown("#key-form"))
        choose_settings(browser, max_tokens="8")
        ask(browser, "hi")
        assert browser.count(".answer .t") == 8
        assert "$TREETOP_API_KEY" in browser.text("#curl")
        assert "sesame" not in browser.run("return document.body.textContent")
        assert browser.run("return Object.keys(localStorage).length") == 0
        opened(browser, locked)


def test_a_server_without_a_template_completes_text_and_an_error_is_told(browser):
    with serving("tests/checkpoints/nestling-hybrid", "--mock-engine", "0,4") as plain:
        opened(browser, plain)
        choose_settings(browser, max_tokens="8")
        ask(browser, "def area")
        assert browser.text(".completion .given") == "def area"
        assert browser.count(".completion .t") == 8
        assert not browser.shown("#system-row")
        assert "/v1/completions" in browser.text("#curl")
        choose_settings(browser, temperature="-1")
        ask(browser, "again")
        assert "temperature" in browser.text(".error[role=alert]:not(:empty)")
        assert browser.run("return document.getElementById('prompt').value") == "again"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_screen_is_too_small(browser, server, width):
    """The page does not scroll sideways; what is wide scrolls in its own frame."""
    opened(browser, server)
    choose_settings(browser, temperature="0", max_tokens="24")
    ask(browser, "def area(r): return " + "a_long_name_without_any_space_" * 6)
    browser.run("document.querySelector('.answer .round:last-child').click()")
    browser.size(width, 700)
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_the_focus_goes_through_the_page_in_its_order(browser, server):
    """From the message by Tab to settings and request, and every stop has a name."""
    opened(browser, server)
    seen = []
    for _ in range(12):
        browser.press("Tab")
        seen.append(browser.run("const e = document.activeElement; return e.id || e.tagName"))
    order = ["send", "SUMMARY", "temperature", "max-tokens", "seed", "system"]
    assert [each for each in seen if each in order][: len(order)] == order
