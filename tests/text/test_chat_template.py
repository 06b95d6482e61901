"""What a chat template that is anybody's code does to a start."""

import json
import logging
import shutil
import sys
from contextlib import closing

import pytest

from treetop.api.api_state import check_files
from treetop.checkpoints.folder import resolve_folder
from treetop.serve_options import ServeOptions
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.types.errors import ConfigError, InputError

OVERRUNS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "it takes too long",
    "{{ messages[0].content * 10**10 }}": "it takes more than 1024 MiB of memory",
    "{{ messages[0].content * 2**23 }}": "it gives 41943040 characters, more than 16777216",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "it recurses too deep",
}
"""Templates, and the limits that they run into."""
LATER = {
    "a system message": "{% if messages[0].role == 'system' %}@{% endif %}",
    "tools": "{% if tools %}@{% endif %}",
    "a tool's result": "{% for m in messages if m.role == 'tool' %}@{% endfor %}",
}
"""What a chat must have for the template to do what stands for @."""
REFUSING = (
    "{{ raise_exception('a system message comes first') }}",
    "{{ messages[1].content }}",
    "{{ tools.names.first }}",
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}",
    "{{ raise_exception('no system message') if messages[0].role == 'system' else messages[1].content }}",
)
"""Of messages like the probe, for reasons of their own."""


@pytest.fixture
def folder(tmp_path):
    """Of a model; a test gives it a template."""
    shutil.copytree(resolve_folder("builtin:nestling"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("template", OVERRUNS)
def test_a_template_that_runs_into_a_limit_ends_the_start(folder, template):
    """Whose it is, it says; the process that met the limit is gone, or ready for the next."""
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError) as refused:
        check_files(str(folder), ServeOptions())
    said = f"with one message of a user {OVERRUNS[template]}"
    assert str(refused.value) == f"{folder}: its chat template: {said}; give another by --chat-template FILE"
    check_files(str(folder), ServeOptions(chat_template="{{ messages[0].content }}"))


def test_a_template_of_the_options_is_told_by_its_option():
    template = "{{ messages[0].content * 10**10 }}"
    with pytest.raises(ConfigError, match=r"^--chat-template: with one message of a user it takes more than 1024 MiB"):
        check_files("builtin:nestling", ServeOptions(chat_template=template))


@pytest.mark.parametrize("what", LATER)
def test_a_template_that_runs_into_a_limit_with_a_longer_chat_ends_the_start(folder, what):
    (folder / "chat_template.jinja").write_text(LATER[what].replace("@", "{{ messages[0].content * 10**10 }}"))
    with pytest.raises(ConfigError, match=f"its chat template: with {what} it takes more than 1024 MiB"):
        check_files(str(folder), ServeOptions())


@pytest.mark.parametrize("template", REFUSING)
def test_a_template_that_refuses_what_the_start_asks_serves(folder, caplog, template):
    """Whoever asks for the like is told its words."""
    (folder / "chat_template.jinja").write_text(template)
    check_files(str(folder), ServeOptions())
    check_files("builtin:nestling", ServeOptions(chat_template=template))
    assert not caplog.records
    with closing(open_chat_template(folder)) as opened, pytest.raises(InputError, match="fails with these messages"):
        opened.render([{"role": "system", "content": "Hello"}], tools=[{}])


def test_a_models_own_template_that_cannot_be_compiled_is_a_warning(folder, caplog):
    """Texts are completed all the same. The options' own would end the start."""
    (folder / "chat_template.jinja").write_text("{% if %}")
    with caplog.at_level(logging.WARNING, "treetop.server"):
        check_files(str(folder), ServeOptions())
    (record,) = caplog.records
    assert str(folder) in record.getMessage()
    assert "chats are refused: TemplateSyntaxError" in record.getMessage()


def test_a_template_whose_process_dies_ends_the_start(monkeypatch, tmp_path):
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nread header\nexit 7\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(ConfigError, match="its process ended with 7"):
        check_files("builtin:nestling", ServeOptions())


def test_a_request_is_told_which_limit_its_messages_met():
    with closing(ChatTemplate("{% for m in messages %}{{ m.content * 10**10 }}{% endfor %}", {})) as template:
        with pytest.raises(InputError, match="with these messages: it takes more than 1024 MiB of memory"):
            template.render([{"role": "user", "content": json.dumps("a")}])
        assert template.render([]) == ""


def test_words_of_a_template_that_are_no_text_are_told_as_text():
    """Or the answer that has them could not be encoded."""
    refusing = ChatTemplate(r"{{ raise_exception('\ud800 no') }}", {})
    with closing(refusing), pytest.raises(InputError, match=r"TemplateError: \\ud800 no"):
        refusing.render([])
