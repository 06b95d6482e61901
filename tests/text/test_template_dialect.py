"""Chat templates render here as Transformers renders them."""

import json
import shutil
from contextlib import closing

import pytest

from treetop.checkpoints.folder import resolve_folder
from treetop.text.chat_input import conversations_of
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.types.errors import CheckpointError, InputError

transformers = pytest.importorskip("transformers")
utils = pytest.importorskip("transformers.utils.chat_template_utils")

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be  <brief> & é."},
    {"role": "user", "content": "Two and three?\n"},
    {"role": "assistant", "content": " Five. ", "reasoning_content": "2 + 3"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
TEMPLATES = {
    "generation in ChatML": (
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'assistant' %}\n"
        "        {{- '<|im_start|>assistant\\n' }}{% generation %}"
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}\n"
        "    {%- else %}\n"
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "generation around blocks and white space": (
        "{% for message in messages %}\n"
        "  {% generation %}\n"
        "    {% if message.role == 'assistant' %}\n"
        "[{{ message.content }}]\n"
        "    {% else %}\n"
        "({{ message.content | trim }})\n"
        "    {% endif %}\n"
        "  {% endgeneration %}\n"
        " {%- generation -%}  x  {%- endgeneration -%}  \n"
        "{% endfor %}"
    ),
    "generation is a scope of its own": (
        "{% set ns = namespace(seen=0) %}{% set kept = 'before' %}{% for message in messages %}"
        "{% generation %}{% set kept = 'within' %}{% set ns.seen = ns.seen + 1 %}{{ loop.index }}{{ kept }}"
        "{% endgeneration %}{{ kept }}{{ ns.seen }}{% endfor %}"
    ),
    "generation in a macro and in generation": (
        "{% macro say(text) %}{% generation %}<{% generation %}{{ text }}{% endgeneration %}>{% endgeneration %}"
        "{% endmacro %}{% for message in messages %}{{ say(message.content) | length }}{{ say('&') }}{% endfor %}"
    ),
    "loop controls": (
        "{% for message in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.last %}{% break %}"
        "{% endif %}{{ message.content }}{% endfor %}"
    ),
    "tojson": (
        "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ 'é<' | tojson(true) }}{{ tools | tojson(false, 1) }}"
        "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é' | tojson(ensure_ascii=true) }}"
    ),
    "what is not given is none": (
        "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ other is defined }}{{ bos_token }}"
        "{{ unk_token is defined }}{{ add_generation_prompt }}"
    ),
    "dict": "{{ dict(a=1, b=2) | tojson }}{{ dict.fromkeys('ab', 1) }}{{ dict(messages[0], role='x') }}",
    "namespace from a dict": (
        "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b }}{{ ns.c }}"
    ),
    "raise_exception": "{{ raise_exception('roles must alternate') }}",
    "an option of tojson that is none": "{{ messages | tojson(default=1) }}",
    "what is undefined": "{{ messages[0].content + nothing }}",
    "a change of what it is given": "{{ messages.append(1) }}",
    "attributes of Python's": "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}",
    "the time": "{{ strftime_now('%d %B %Y|%z|%Z') }}{{ strftime_now(format='%Y') }}",
    "generation without an end": "{% generation %}{{ messages[0].content }}",
    "an end without generation": "{{ messages[0].content }}{% endgeneration %}",
}


def theirs(source, messages, options):
    """(text, None), or (None, the name of the error)."""
    try:
        texts, _ = utils.render_jinja_template(
            [messages], chat_template=source, **{"add_generation_prompt": True, **TOKENS, **options}
        )
    except Exception as error:
        return None, type(error).__name__
    return texts[0], None


def ours(template, messages, options):
    try:
        return template.render(messages, **options), None
    except InputError as error:
        return None, str(error).removeprefix("the chat template fails with these messages: ").split(":")[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_the_text_that_transformers_gives(name):
    """Or fails as there, whatever it is given."""
    (messages,) = conversations_of(TALK)
    with closing(ChatTemplate(TEMPLATES[name], TOKENS)) as template:
        for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": False, "other": 1}):
            expected = theirs(TEMPLATES[name], messages, options)
            assert ours(template, messages, options) == expected
            assert any(expected)


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace({'__class__': 1}) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ dict.mro() }}",
        "{{ dict.__class__.mro }}",
    ],
)
def test_no_name_of_pythons_own_is_reached_or_kept(template):
    """Whatever Transformers is installed, of which earlier ones allowed it."""
    with (
        closing(ChatTemplate(template, {})) as opened,
        pytest.raises(InputError, match=r"SecurityError|UndefinedError"),
    ):
        opened.render(TALK)


def test_messages_are_given_as_transformers_gives_them():
    """None says nothing, and reasoning has every name that a template may read."""
    given = [
        {"role": "assistant", "content": None, "reasoning": "a", "tool_calls": []},
        {"role": "assistant", "content": "b", "thinking": "c", "reasoning_content": None},
        {"role": "assistant", "content": "d", "thinking": "e", "reasoning_content": "f", "reasoning": "g"},
        {"role": "user", "content": "", "name": None},
    ]
    asked = {"role": "assistant", "thinking": "a", "reasoning_content": "a", "reasoning": "a", "tool_calls": []}
    second = {"role": "assistant", "content": "b", "thinking": "c", "reasoning_content": "c"}
    third = {**given[2], "thinking": "e", "reasoning_content": "f"}
    assert conversations_of(given) == [[asked, second, third, {"role": "user", "content": ""}]]
    assert given[0]["content"] is None


def test_chats_with_tools_have_a_template_of_their_own(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    listed = [{"name": "tool_use", "template": "{{ tools | length }} tools"}, {"name": "default", "template": "none"}]
    path.write_text(json.dumps({"chat_template": listed}))
    with closing(open_chat_template(tmp_path)) as template, closing(template.twin()) as twin:
        for each in (template, twin):
            assert each.render(TALK) == each.render(TALK, tools=None) == "none"
            assert each.render(TALK, tools=TOOLS) == "1 tools"
            assert each.reads("tools")
    path.write_text(json.dumps({"chat_template": listed[:1]}))
    assert open_chat_template(tmp_path) is None
    path.write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(CheckpointError, match=r"a list of \{name, template\}"):
        open_chat_template(tmp_path)


def test_templates_may_be_files_of_which_tokenizer_config_is_no_part(tmp_path):
    """As Transformers reads them, whose rendering is the oracle."""
    shutil.copy(resolve_folder("builtin:nestling") / "tokenizer.json", tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "of the configuration"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools | length }} tools")
    (folder / "rag.jinja").write_text("{% broken")
    (folder / "notes.txt").write_bytes(b"\xff")
    assert open_chat_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("of the file")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with closing(open_chat_template(tmp_path)) as template:
        for options in ({}, {"tools": TOOLS}):
            assert template.render(TALK, **options) == theirs.apply_chat_template(TALK, tokenize=False, **options)
    (folder / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"additional_chat_templates.tool_use\.jinja"):
        open_chat_template(tmp_path)


def test_a_template_for_tools_that_cannot_be_compiled_is_a_problem():
    with closing(ChatTemplate("{{ messages }}", {}, "{% if %}")) as template:
        assert "TemplateSyntaxError" in template.problem()


@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_are_those_that_transformers_reads(tmp_path, listed):
    """An older file has them, unless the configuration lists its tokens."""
    shutil.copy(resolve_folder("builtin:nestling") / "tokenizer.json", tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "pad_token": None}
    config |= {"added_tokens_decoder": {}} if listed else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|pad|>", "lstrip": False}, "sep_token": "<|endoftext|>"})
    )
    names = ("bos_token", "eos_token", "pad_token", "sep_token")
    source = "".join(f"{{{{ {name} if {name} is defined else '{name}' }}}}," for name in names)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TALK, chat_template=source, tokenize=False)
    with closing(open_chat_template(tmp_path, source)) as template:
        assert template.render(TALK) == expected
    assert ("<|pad|>" in expected) != listed
