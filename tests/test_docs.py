"""What README and docs name exists: links, headings, files, commands and options.

The changelog and the log of measurements speak of what was, so only their links are checked.
"""

import ast
import builtins
import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from treetop.api.keys.administration import ADMIN_PATHS
from treetop.cli import build_parser
from treetop.types.sampling import SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import reference  # noqa: E402

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w.-]+/|[\w-]+\.(py|md)")
MADE = {"build/", ".venv/bin/python"}
"""What `make` writes."""
MOST_WORDS = 18_000
"""Of pages that people write: more are not read."""


@cache
def text_of(page):
    return page.read_text(encoding="utf-8")


def headings(page):
    """How links name them, as GitHub does."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def spans_and_commits(page):
    """Text in backticks, outside blocks, and the commit that is said to have it, or "". A line may end within it."""
    joined = re.sub(r"(?<!\n)\n(?!\n)", " ", BLOCK.sub("", text_of(page)))
    return re.findall(r"`([^`\n]+)`(?: at ([0-9a-f]{7})\b)?", joined)


def spans(page):
    """Text in backticks, but for what an earlier commit has."""
    return [span for span, commit in spans_and_commits(page) if not commit]


def lost_files(page):
    """Paths in backticks that do not exist. They start at the top; a name alone may also be a test."""
    names = [word for span in spans(page) for word in span.split() if FILE.fullmatch(word) and word not in MADE]
    return [name for name in names if not ((ROOT / name).exists() or any(ROOT.glob(f"tests/**/{name}")))]


def lost_tests(page):
    """Tests in backticks, `file::name`, that do not exist."""
    named = [span.split("::") for span in spans(page) if re.fullmatch(r"tests/\S+\.py::\w+", span)]
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in text_of(ROOT / file)
    ]


def dead_links(page):
    """Relative links whose file, or whose heading in it, does not exist."""
    dead = []
    for target in LINK.findall(text_of(page)):
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if "://" not in target and not (file.exists() and (not heading or heading in headings(file))):
            dead.append(target)
    return dead


def commands(page):
    """Lines of blocks, and text in backticks, that run treetop or a script of ours; as words, without comments."""
    lines = [line for block in BLOCK.findall(text_of(page)) for line in block.replace("\\\n", " ").splitlines()]
    ours = re.compile(r"(treetop|python (benchmarks|scripts|recipes)/\S+)( |$)")
    found = [line.partition(" > ")[0] for line in [*lines, *spans(page)] if ours.match(line)]
    return [shlex.split(line, comments=True) for line in found]


def subparsers():
    (found,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    return found


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks/log.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    assert not dead_links(page)


def test_the_readme_leads_to_every_page():
    """To those of `docs/` itself; `docs/decisions.md` and the like lead to those of the folder of their name."""
    for page in PAGES[2:]:
        leads = ROOT / "README.md" if page.parent.parent == ROOT else page.parent.with_suffix(".md")
        assert page in {(leads.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text_of(leads))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    assert not lost_files(page)
    assert not lost_tests(page)


def test_files_of_earlier_commits_are_in_them():
    """`benchmarks/x.py --option` at COMMIT: what took a figure, and is no more."""
    named = {f"{commit}:{span.split()[0]}" for page in PAGES for span, commit in spans_and_commits(page) if commit}
    files = sorted(name for name in named if FILE.fullmatch(name.partition(":")[2]))
    assert files

    def git(*words):
        said = subprocess.run(
            ["git", *words], input="\n".join(files), cwd=ROOT, capture_output=True, text=True, check=False
        )
        return said.stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no clone with its history")
    assert [line.split()[1] for line in git("cat-file", "--batch-check").splitlines()] == ["blob"] * len(files)


@pytest.mark.parametrize(
    "words", [words for page in PAGES for words in commands(page)], ids=lambda words: " ".join(words)[:70]
)
def test_commands_are_taken_by_what_they_call(words):
    """treetop's parser takes the line, and nothing runs. A script is there and knows the line's options.

    Two words name a command without a line to type. Capitals stand for what a reader fills in; N for a number.
    """
    if words[0] == "treetop":
        if len(words) > 2 or (len(words) == 2 and words[1] not in subparsers()):
            build_parser().parse_args(["1" if word == "N" else word for word in words[1:]])
        return
    source = text_of(ROOT / words[1])
    known = {option for option in words if option.startswith("--") and option not in source}
    if "parse_known_args" in source:  # hands the rest to `treetop bench`
        known -= {option for action in subparsers()["bench"]._actions for option in action.option_strings}
    assert not known


def test_options_that_are_named_exist():
    """`--option` in backticks is treetop's or a script's, unless the text is another tool's command."""
    known = {o for parser in subparsers().values() for action in parser._actions for o in action.option_strings}
    scripts = "".join(text_of(path) for folder in ("benchmarks", "scripts") for path in (ROOT / folder).glob("*.py"))
    for page in PAGES:
        for span in spans(page):
            if not re.match(r"(pip|pytest|python|serve) ", span):
                named = re.findall(r"(?<!\S)--[a-z][a-z-]+", span)
                assert not [option for option in named if option not in known and f'"{option}"' not in scripts], span


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/sampling.md"])
def test_the_python_of_a_page_compiles_and_imports_what_it_names(page):
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(ROOT / page), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        nodes = [*ast.walk(compile(block, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))]
        bound = {each.name for each in nodes if isinstance(each, ast.alias)} | {*dir(builtins)}
        bound |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        assert {each.id for each in nodes if isinstance(each, ast.Name)} <= bound
        for module, names in re.findall(r"^from (treetop[\w.]*) import (.*)$", block, re.MULTILINE):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name)


def test_what_is_wrong_is_found(tmp_path):
    """A dead link, a heading that is not there, a lost file, and an option that treetop lacks."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[a](no.md) [b](#a-title) [c](#b) `src/treetop/no.py` `README.md`\n\n"
        "`tests/test_docs.py::test_no` `tests/test_docs.py::test_what_is_wrong_is_found`\n\n"
        "```\ntreetop generate --nothing # x\n```\n",
        encoding="utf-8",
    )
    assert dead_links(page) == ["no.md", "#b"]
    assert lost_files(page) == ["src/treetop/no.py"]
    assert lost_tests(page) == ["tests/test_docs.py::test_no"]
    assert commands(page) == [["treetop", "generate", "--nothing"]]
    with pytest.raises(SystemExit):
        test_commands_are_taken_by_what_they_call(commands(page)[0])


def num_words(text):
    """Tables, code and links counted; bars and dashes alone are no words."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def test_pages_that_people_write_are_few_words():
    """README.md and docs/, without the pages that scripts/reference.py writes. Whoever adds, cuts."""
    assert num_words("| a | `b c` | - |\n|---|---|---|\n# d") == 4
    written = {reference.DOCS / name for name in reference.PAGES}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert written <= {*pages}
    words = {page.relative_to(ROOT).as_posix(): num_words(text_of(page)) for page in pages if page not in written}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


TESTS_OF_OPTIONS = {
    "temperature top_k top_p min_p": (
        "test_exactness.py::test_sampled_speculative_equals_sampled_plain_for_the_same_seeds"
    ),
    "seed": "test_exactness.py::test_the_tokens_of_a_seed_do_not_depend_on_the_other_requests",
    "presence_penalty frequency_penalty repetition_penalty logit_bias min_tokens allowed_token_ids": (
        "test_processors.py::test_trees_equal_the_oracle"
    ),
    "bad_words": "test_bad_words.py::test_greedy_tokens_are_those_of_the_oracle",
    "structured_output": "test_tree_masks.py::test_random_structures_along_trees_equal_plain_masked_decoding",
    "logprobs": "test_logprobs.py::test_every_token_has_the_logprobs_of_its_own_row",
    "prompt_logprobs": "test_prompt_logprobs.py::test_every_prompt_token_has_its_own",
    "max_tokens": "test_stops.py::test_max_tokens_cuts_an_accepted_chain_anywhere",
    "stop_token_ids": "test_stops.py::test_a_stop_token_cuts_the_rest_of_an_accepted_chain",
    "stop": "test_stops.py::test_stop_strings_end_the_request_and_are_never_shown",
    "include_stop_str_in_output": "test_serve_fields.py::test_a_stop_string_may_stay_in_the_text",
    "skip_special_tokens": "test_serve_fields.py::test_special_tokens_may_be_shown",
    "truncate_prompt_tokens": "test_serve_fields.py::test_a_prompt_is_cut_to_its_last_tokens",
    "speculative": "test_no_draft.py::test_no_draft_of_it_is_accepted_and_others_go_on",
    "return_draft_trees": "test_told_trees.py::test_trees_spell_the_output_and_change_none",
    "return_routed_experts": "test_routed_experts.py::test_ids_are_those_of_the_models_own_routers",
    "ignore_eos": "test_stops.py::test_the_end_of_sequence_token_ends_a_request_unless_ignored",
}
"""Which test compares a sampling option, with trees, with plain decoding or an oracle."""


def test_every_sampling_option_has_a_test_with_trees():
    """docs/sampling.md says that all work with trees. An option without a test here, or a test that is gone, fails."""
    assert {name for names in TESTS_OF_OPTIONS for name in names.split()} == {
        field.name for field in fields(SamplingParams)
    }
    for named in TESTS_OF_OPTIONS.values():
        file, _, test = named.partition("::")
        (path,) = ROOT.glob(f"tests/**/{file}")
        assert f"def {test}(" in text_of(path), named


def test_the_page_on_the_admin_key_names_all_routes_that_ask_for_it():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.partition("\n### The admin key\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"`(/\S+)`", section)) == set(ADMIN_PATHS)
