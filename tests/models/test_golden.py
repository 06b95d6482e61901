"""The target is the model that `transformers` runs: logits and greedy tokens agree, on the engine's own path.

The reference runs in float64, so how far float32 may be off follows from the lengths of its sums, whatever kernels a
CPU picks. On a GPU both run there, without TF32, on either backend; logits are those of eager rounds, for a replay
calls no Python that could record them, and tokens are those of captured rounds.
"""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines import greedy
from support.examples import fewer
from support.grids import few_of
from support.logits import record_logits
from support.tiny_models import LLAMA3_ROPE, copy_folder, save_random_llama, save_random_qwen3
from support.tolerance import gamma
from treetop import LLM
from treetop.models.config import ModelConfig

CONFIGS = {
    "grouped queries": {},
    "one head a query": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 2},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention and mlp biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "wide heads": {"head_dim": 24},
    "narrow heads": {"hidden_size": 96, "head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 3},
    "another norm": {"rms_norm_eps": 0.5},
}
QWEN3_CONFIGS = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 0.2},
    "qwen3 biases": {"attention_bias": True, "head_dim": 16},
}
PROMPT_LENGTHS = (1, 7, 16, 41)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLACES = [
    pytest.param({"device": "cpu"}, id="cpu"),
    pytest.param({"device": "cuda", "attention_backend": "torch"}, id="cuda-torch", marks=needs_gpu),
    pytest.param({"device": "cuda", "attention_backend": "triton"}, id="cuda-triton", marks=needs_gpu),
]


@pytest.fixture(params=PLACES)
def place(request) -> Iterator[dict[str, str]]:
    """ModelRunner and backend; TF32 stays off."""
    assert torch.get_float32_matmul_precision() == "highest"
    yield request.param
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture(scope="module", params=[*CONFIGS, *QWEN3_CONFIGS], ids=lambda name: name.replace(" ", "-"))
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("golden") / "model"
    if request.param in QWEN3_CONFIGS:
        return save_random_qwen3(place, seed=7, **QWEN3_CONFIGS[request.param])
    return save_random_llama(place, seed=7, **CONFIGS[request.param])


def reference(folder: Path, device: str = "cpu") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval().to(device)


def prompts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def float32_error(spec: ModelConfig, context: int) -> float:
    """How far float32 logits may be off, as a share of the largest: by the lengths of all sums on the way to one."""
    hidden, attention = spec.hidden_size, spec.layers[0].attention
    inner, dim = spec.layers[0].feed_forward.inner_size, attention.head_dim
    layer = 4 * hidden + 3 * dim + context + attention.num_heads * dim + inner
    return gamma(len(spec.layers) * layer + 2 * hidden)


def assert_close_logits(llm: LLM, model: PreTrainedModel, prompts, max_tokens: int) -> None:
    """Logits of every prompt position and of every decoded token are the reference's, as float32 can give them."""
    seen = record_logits(llm)
    for prompt in prompts:
        seen.clear()
        (output,) = llm.generate([prompt], greedy(max_tokens, whole=True))
        ours = torch.cat([logits[0] for logits in seen])
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *output.token_ids[:-1]]], device=model.device)
            theirs = model(ids).logits[0]
        assert ours.shape == theirs.shape
        error = float32_error(llm.engine.spec, len(theirs)) * float(theirs.abs().max())
        print("RATIO", float((ours.double() - theirs).abs().max()) / error, error)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=error)


def assert_greedy_tokens(llm: LLM, model: PreTrainedModel, prompts, max_tokens: int) -> None:
    """Every token is the reference's choice after what came before it, but for near ties of its two best logits.

    So they are the tokens of the reference's own greedy loop, in one forward of a prompt and its output.
    """
    outputs = llm.generate(prompts, greedy(max_tokens, whole=True))
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == max_tokens
        ids = torch.tensor([[*prompt, *output.token_ids]], device=model.device)
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        behind = logits.amax(1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        for at in behind.nonzero()[:, 0].tolist():
            error = float32_error(llm.engine.spec, len(prompt) + at) * float(logits[at].abs().max())
            assert float(behind[at]) < 2 * error, f"token {at} differs, and is no near tie"
            ties += 1
    assert ties <= max(1, 1e-4 * max_tokens * len(prompts))


@pytest.mark.parametrize("chunk", few_of([512, 6], 1))
def test_logits_equal_those_of_transformers(folder, place, chunk):
    """float32: prompt positions in one chunk and in many, then decoded positions, agree."""
    options = {"dtype": "float32", "graphs": "off", **place}
    llm = LLM(model=str(folder), draft=None, chunked_prefill_size=chunk, page_size=4, **options)
    assert_close_logits(llm, reference(folder, place["device"]), prompts_of(llm.engine.spec.vocab_size), 12)


def test_greedy_tokens_equal_those_of_transformers(folder, place):
    """float32: a batch of ragged prompts gives the reference's own greedy choices, 64 in `make test-all`."""
    llm = LLM(model=str(folder), draft=None, dtype="float32", page_size=4, **place)
    assert_greedy_tokens(llm, reference(folder, place["device"]), prompts_of(llm.engine.spec.vocab_size), fewer(64))


def test_rope_of_the_older_spelling_means_the_same(tmp_path):
    """`rope_scaling` + `rope_theta` of earlier transformers and `rope_parameters` of version 5 give equal logits."""
    new = save_random_llama(tmp_path / "new", rope_parameters=LLAMA3_ROPE)
    old = copy_folder(
        new,
        tmp_path / "old",
        rope_parameters=None,
        rope_theta=LLAMA3_ROPE["rope_theta"],
        rope_scaling={key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
    )
    logits = []
    for folder in (new, old):
        llm = LLM(model=str(folder), draft=None, device="cpu")
        seen = record_logits(llm)
        llm.generate([prompts_of(211)[3]], greedy(2))
        logits.append(seen[0])
    assert torch.equal(logits[0], logits[1])
    plain = copy_folder(new, tmp_path / "plain", rope_parameters=None)
    llm = LLM(model=str(plain), draft=None)
    seen = record_logits(llm)
    llm.generate([prompts_of(211)[3]], greedy(2))
    assert not torch.allclose(seen[0], logits[0], atol=1e-2), "the rope does not matter here, so nothing was tested"


# ---------------------------------------------------------------------------------------------- the embedded target


@pytest.fixture(scope="module")
def embedded() -> Path:
    folder = Path(str(resources.files("treetop") / "assets" / "nestling"))
    if not (folder / "model.safetensors").is_file():
        pytest.fail("the embedded target is missing: src/treetop/assets/nestling/model.safetensors")
    return folder


@pytest.fixture(scope="module")
def embedded_prompts(embedded) -> list[list[int]]:
    llm_tokenizer = LLM(model="builtin:nestling", draft=None, max_running_requests=1, device="cpu").tokenizer
    path = Path(str(resources.files("treetop") / "assets" / "prompts.jsonl"))
    lines = path.read_text(encoding="utf-8").splitlines()[:4]
    return [llm_tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def test_the_embedded_target_has_the_logits_of_transformers(embedded, embedded_prompts, place):
    """float32: every prompt position and decoded position of the embedded target agrees."""
    options = {"dtype": "float32", "graphs": "off", **place}
    llm = LLM(model="builtin:nestling", draft=None, chunked_prefill_size=50, **options)
    assert_close_logits(llm, reference(embedded, place["device"]), embedded_prompts[:2], 8)


@pytest.mark.slow
def test_the_embedded_target_gives_the_greedy_tokens_of_transformers(embedded, embedded_prompts, place):
    """float32: 64 tokens of the embedded target are the reference's own greedy choices."""
    llm = LLM(model="builtin:nestling", draft=None, dtype="float32", **place)
    assert_greedy_tokens(llm, reference(embedded, place["device"]), embedded_prompts, 64)
