"""The command line: what it prints where, and its exit codes."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from support.command_line import PROMPT, lines, refused, run
from support.tiny_models import copy_folder
from treetop.checkpoints.gguf.architectures import ARCHITECTURES
from treetop.cli import build_parser
from treetop.cli.config_file import words_of
from treetop.cli.options import engine_options
from treetop.models.registry import FAMILIES
from treetop.types.errors import ConfigError
from treetop.types.layout import SpecShape
from treetop.version import __version__
from treetop.weights.registry import FORMATS

# ---------------------------------------------------------------------------------------------- generate


def test_generate_streams_text_and_closes_with_a_line_of_figures(capsys):
    """One prompt: the completion as it is, then one line in brackets with tokens, passes, accept length and reason."""
    code, out, err = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12)
    assert (code, err) == (0, "")
    *text, summary = lines(out)
    assert "".join(text).strip()
    for part in ("[12 tokens,", "target passes", "accept length", "tokens/s", "length]"):
        assert part in summary
    echoed = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--echo")[1]
    assert echoed.startswith(PROMPT + text[0])


def test_several_prompts_are_told_apart_and_summed_up_in_one_line(capsys, tmp_path):
    """--prompt repeats, --prompt-file adds its own, and results stand in the order of the prompts."""
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n")
    argv = ["generate", "--prompt", PROMPT, "--prompt", "class A:", "--prompt-file", file, "--max-tokens", 6]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert [line for line in lines(out) if line.startswith("---")] == [f"--- prompt {i}" for i in range(3)]
    assert "[18 tokens," in lines(out)[-1]


def test_json_is_one_object_a_prompt_with_exactly_the_documented_keys(capsys):
    """Nothing but the objects is on stdout; token counts, reason and metrics agree with each other."""
    argv = ["generate", "--json", "--max-tokens", 9, "--ignore-eos"]
    code, out, err = run(capsys, *argv, "--prompt", PROMPT, "--prompt", "class A:")
    assert (code, err) == (0, "")
    objects = [json.loads(line) for line in lines(out)]
    assert len(objects) == 2
    for each in objects:
        assert set(each) == {"text", "token_ids", "finish_reason", "usage", "metrics"}
        assert set(each["usage"]) == {"prompt_tokens", "completion_tokens"}
        assert set(each["metrics"]) == {"accept_length", "target_forwards", "tokens_per_second"}
        assert each["usage"]["completion_tokens"] == len(each["token_ids"]) == 9
        assert each["finish_reason"] == "length"
        forwards = each["metrics"]["target_forwards"]
        assert each["metrics"]["accept_length"] == pytest.approx(8 / forwards)
        assert each["metrics"]["tokens_per_second"] > 0
    (alone,) = lines(run(capsys, *argv, "--prompt", PROMPT)[1])
    assert json.loads(alone)["token_ids"] == objects[0]["token_ids"], "a prompt's tokens depend on the batch"
    (one,) = lines(run(capsys, "generate", "--json", "--max-tokens", 1, "--prompt", PROMPT)[1])
    assert json.loads(one)["metrics"]["accept_length"] is None


def test_a_seed_makes_sampling_reproducible(capsys):
    """The same seed, the same text; another seed, another."""
    argv = ["generate", "--json", "--prompt", PROMPT, "--max-tokens", 16, "--temperature", 1.5, "--ignore-eos"]

    def ids(seed):
        return json.loads(run(capsys, *argv, "--seed", seed)[1])["token_ids"]

    assert ids(7) == ids(7) != ids(8)


def test_a_model_without_a_draft_decodes_plainly_and_gives_the_same_tokens(capsys, weak_pair):
    """With the draft named, a tree; without it, plain decoding; sampled tokens are the same ones."""
    argv = ["generate", weak_pair.target, "--json", "--prompt", "def f", "--max-tokens", 24, "--temperature", 0.7]
    argv += ["--seed", 3, "--dtype", "float64", "--ignore-eos"]
    speculative, plain, forbidden = (
        json.loads(run(capsys, *argv, *more)[1])
        for more in (["--speculative-draft-model-path", weak_pair.head], [], ["--speculative-algorithm", "NONE"])
    )
    assert speculative["token_ids"] == plain["token_ids"] == forbidden["token_ids"]
    assert speculative["metrics"]["target_forwards"] < plain["metrics"]["target_forwards"] == 23
    assert plain["metrics"]["accept_length"] == 1


@pytest.mark.slow
def test_a_stop_string_ends_the_completion_and_is_cut_off(capsys):
    """The text ends before the stop, and the reason is stop."""
    argv = ["generate", "--json", "--prompt", PROMPT, "--max-tokens", 40, "--ignore-eos"]
    free = json.loads(run(capsys, *argv)[1])["text"]
    stop = free[5:8]
    stopped = json.loads(run(capsys, *argv, "--stop", stop, "--stop", "\x00never")[1])
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.slow
def test_comparing_with_plain_decoding_says_that_outputs_are_equal(capsys):
    code, out, _ = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--compare-plain")
    assert code == 0
    assert "the speed of plain decoding" in lines(out)[-1]
    assert "outputs equal" in lines(out)[-1]
    code, out, err = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--compare-plain", "--json")
    assert code == 0
    assert len(lines(out)) == 1
    assert "outputs equal" in err


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version") == (0, f"treetop {__version__}\n", "")


@pytest.mark.parametrize("command", ["generate", "bench", "trace", "doctor"])
def test_help_names_every_option_of_the_engine(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    for option in ("--speculative-num-steps", "--speculative-eagle-topk", "--page-size", "--check-level", "--graphs"):
        assert option in out


def test_help_shows_what_an_option_is_without_being_given(capsys):
    text = " ".join(run(capsys, "generate", "--help")[1].split())
    for part in ("(default 16)", "(default 0.88)", "(default auto)", "(default 128)", "output is wrong", "same seed"):
        assert part in text


@pytest.mark.parametrize("command", ["generate", "serve", "bench", "trace", "doctor", "inspect"])
def test_every_command_takes_the_engines_options_in_the_words_of_vllm_and_sglang(command):
    """One line of flags can be tried with any command; the prefix cache can be asked for and be refused."""
    trace = ["--prompt", PROMPT, "--output", "x.html"] if command == "trace" else []
    words = ["--max-model-len", "64", "--tensor-parallel-size", "2", "--enforce-eager", "--enable-prefix-caching"]
    args = build_parser().parse_args([command, *trace, *words])
    assert (args.context_length, args.tp_size, args.graphs) == (64, 2, "off")
    assert engine_options(args)["disable_radix_cache"] is False
    args = build_parser().parse_args([command, *trace, "--no-enable-prefix-caching"])
    assert engine_options(args)["disable_radix_cache"] is True


@pytest.mark.parametrize(("name", "value"), [("enable-prefix-caching", False), ("disable-radix-cache", True)])
def test_a_file_can_switch_the_prefix_cache_off(name, value):
    """`false` of a flag that has an opposite is that opposite, not nothing."""
    args = build_parser().parse_args(["serve", *words_of({name: value}, "a file")])
    assert engine_options(args)["disable_radix_cache"] is True


def test_a_file_can_leave_every_flag_out_and_names_one_that_is_none():
    """`false` of what is misspelt, or takes a value, is not passed over."""
    (parsers,) = (each.choices for each in build_parser()._actions if isinstance(each.choices, dict))
    actions = [each for each in parsers["serve"]._actions if each.nargs == 0 and each.dest != "help"]
    for name in (name[2:] for each in actions for name in each.option_strings if name.startswith("--")):
        if not name.startswith("no-") or name == "no-enable-prefix-caching":
            build_parser().parse_args(["serve", *words_of({name: False}, "a file")])
    for name in ("disable-radix-cash", "port"):
        with pytest.raises(ConfigError, match=f"a file: {name} is no flag that can be false"):
            words_of({name: False}, "a file")


def test_verbose_puts_the_start_up_block_on_stderr_and_nothing_else_changes(capsys):
    """Model, pools, backend and graphs, where a reader of --json does not stumble over them."""
    try:
        code, out, err = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 3, "--json", "--verbose")
    finally:
        logging.getLogger("treetop").setLevel(logging.NOTSET)
        logging.getLogger("treetop").handlers.clear()
    assert code == 0
    assert len(lines(out)) == 1
    for part in ("treetop is up", "pool full:", "attention torch", "--mem-fraction-static 0.88"):
        assert part in err


def test_the_results_of_several_prompts_come_as_they_end_and_in_order(capsys, monkeypatch):
    """A result waits for those before it and for no other."""
    from treetop.cli import generate

    shown = []
    monkeypatch.setattr(generate, "_show", lambda args, output, index, prompt: shown.append((index, output)))
    monkeypatch.setattr("treetop.llm.LLM", FakeLLM)
    FakeLLM.seen = shown
    assert run(capsys, "generate", "--prompt", "a", "--prompt", "b", "--prompt", "c")[0] == 0
    assert [index for index, _ in shown] == [0, 1, 2]
    assert FakeLLM.progress == [[], [], [0, 1], [0, 1, 2]]


class FakeLLM:
    """Three prompts; the second ends first, then the first, then the third."""

    seen: list
    progress: list

    def __init__(self, *_, **__):
        pass

    def stream(self, prompts, params):
        from treetop.llm import RequestMetrics, RequestOutput, TextDelta

        assert len(prompts) == len(params) == 3
        done = RequestOutput((1,), (2,), "x", "stop", RequestMetrics(1.0, 1, 1.0, (0,)))
        FakeLLM.progress = []
        for index in (1, 0, 2):
            FakeLLM.progress.append([i for i, _ in FakeLLM.seen])
            yield TextDelta(index, "x", done)
        FakeLLM.progress.append([i for i, _ in FakeLLM.seen])


# ---------------------------------------------------------------------------------------------- bench and doctor


def test_bench_compares_before_it_times_and_prints_one_object(capsys):
    """Equal outputs, exit code 0, and figures that agree with the shape."""
    argv = ["bench", "--json", "--num-prompts", 2, "--max-tokens", 12, "--repeats", 1, "--context-length", 512]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    (line,) = lines(out)
    report = json.loads(line)
    assert report["outputs_equal"] is True
    assert report["prompts"] == 2
    assert report["shape"] == [5, 4, 16]
    assert 1 <= report["accept_length"] <= 6
    assert len(report["acceptance_by_depth"]) == 5
    assert 0 < report["target_forwards_per_token"] <= 1
    for rate in (report["plain"], report["speculative"]):
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]


@pytest.mark.slow
def test_a_bench_whose_outputs_differ_exits_1(capsys, monkeypatch):
    """A fault that changes tokens is a failed benchmark, whatever the speed."""
    from treetop.bench import compare, equality

    monkeypatch.setattr(equality, "margin_of", lambda llm, ids: 1.0)
    monkeypatch.setattr(
        compare,
        "equal_outputs",
        lambda plain, expected, got, real=compare.equal_outputs: real(plain, expected, got[::-1]),
    )
    argv = ["bench", "--num-prompts", 2, "--max-tokens", 6, "--repeats", 1, "--json", "--context-length", 512]
    code, out, _ = run(capsys, *argv)
    assert code == 1
    assert json.loads(out)["outputs_equal"] is False


def test_doctor_shows_machine_backends_capacity_and_conformance(capsys):
    """Exit code 0, every dimension with its formula, and as many cases as were asked for."""
    shape = SpecShape(3, 4, 12)
    argv = ["doctor", "--cases", 3, "--page-size", 4, "--context-length", 100, "--speculative-eagle-topk", 3]
    argv += ["--speculative-num-steps", 4, "--speculative-num-draft-tokens", 12]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for part in ("torch", "flashinfer", "why not", "page_columns", "verify_tail", "pages.full", "pages.draft"):
        assert part in out
    flat = " ".join(out.replace("│", " ").split())
    assert f"{-(-(100 + shape.commit_width) // 4)} " in flat
    assert "ceil((context 100 +" in flat
    assert "conformance: 3 of 3 cases agree" in out


@pytest.mark.slow
def test_overlap_is_a_flag_with_its_opposite(capsys):
    """The capacity table has positions for the steps in flight, and the text is the same either way."""
    small = ("--device", "cpu", "--context-length", 256)
    argv = ("--prompt", "def f", "--max-tokens", 12, "--dtype", "float64", "--json", *small)
    said = [json.loads(run(capsys, "generate", *argv, given)[1]) for given in ("--overlap", "--no-overlap")]
    assert said[0]["token_ids"] == said[1]["token_ids"]
    for given, max_in_flight in (("--overlap", 2), ("--no-overlap", 1)):
        _, out, _ = run(capsys, "doctor", "--cases", 1, *small, given)
        assert f" {256 + max_in_flight * 6} " in out


def test_trace_refuses_overlap(capsys, tmp_path):
    code, _, err = run(capsys, "trace", "--prompt", "x", "--output", tmp_path / "t.html", "--overlap")
    assert code == 2
    assert "--overlap" in err


def test_doctor_looks_at_the_backend_dtype_and_checkpoint_that_were_asked_for(capsys, weak_pair, monkeypatch, tmp_path):
    """No draft with NONE, tensors by name and shape alone, memory before loading, and refusals for the given dtype."""
    from treetop.checkpoints import checkpoint

    monkeypatch.setattr(checkpoint, "_finite", lambda *args: pytest.fail("a weight was read"))
    monkeypatch.setattr("treetop.doctor.run._conformance", lambda *args: 0)
    argv = ["doctor", weak_pair.target, "--device", "cpu", "--dtype", "float64"]
    code, out, err = run(capsys, *argv, "--speculative-algorithm", "NONE")
    assert (code, err) == (0, "")
    assert "backends, float64" in out
    assert "torch (serves)" in out
    assert "pages.draft" not in out
    assert "memory: total" in out
    assert re.search(r"target: \S+: \d+ tensors of the right names and shapes", out)
    assert "pages.draft" in run(capsys, "doctor", "--device", "cpu")[1]
    assert "pages.draft" not in run(capsys, "doctor", "--device", "cpu", "--speculative-algorithm", "NONE")[1]
    refused(capsys, ["doctor", "--device", "cpu", "--attention-backend", "triton"], "triton")
    bad = copy_folder(weak_pair.target, tmp_path / "t", tensors={"model.norm.weight": torch.zeros(3)})
    refused(capsys, ["doctor", bad], "model.norm.weight", "(3,)", "(64,)")


def test_a_doctor_that_finds_a_difference_exits_1(capsys, monkeypatch):
    """A failed case is printed with its values, and the exit code says so."""
    from treetop.doctor import run as doctor
    from treetop.doctor.conformance import CaseResult

    monkeypatch.setattr(
        doctor.Conformance, "run", lambda self, case, device: CaseResult(case, 1, 0, "tree after 3 tokens: something")
    )
    code, out, _ = run(capsys, "doctor", "--cases", 2)
    assert code == 1
    assert out.count("FAILED ConformanceCase(") == 2
    assert "0 of 2 cases agree" in out


def test_the_table_of_models_is_that_of_the_registry_and_of_the_docs(capsys):
    """Every architecture that loads; as a list it has the same rows."""
    code, printed, _ = run(capsys, "models")
    assert code == 0
    known = {*FAMILIES}
    architectures, methods, files = printed.split("\n\n")
    assert {line.split("`")[1] for line in architectures.splitlines()[2:]} == known
    assert [line.split("`")[1] for line in methods.splitlines()[2:]] == list(FORMATS)
    assert {line.split("`")[1] for line in files.splitlines()[2:]} == {*ARCHITECTURES}
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert printed in page
    rows = json.loads(run(capsys, "models", "--json")[1])
    assert [row["architecture"] for row in rows] == sorted(known)


def test_the_table_of_what_is_refused_is_that_of_the_code_and_of_the_docs(capsys, tmp_path):
    """And what stands there is refused for what stands there."""
    code, printed, _ = run(capsys, "models", "--refused")
    assert code == 0
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert printed in page
    for why, names in json.loads(run(capsys, "models", "--refused", "--json")[1]).items():
        for name in names:
            assert f"{name}ForCausalLM" not in FAMILIES
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"{name}ForCausalLM"]}))
            code, out, _ = run(capsys, "inspect", tmp_path)
            assert code == 2
            assert f"{name}ForCausalLM is not supported: {why}" in out
