"""What kernels are given where whole engines launch them: a tensor whose numbers do not lie side by side comes with its
strides. No answer shows that a kernel reads past a tensor as long as what lies there happens to do.

On a GPU or in the interpreted session.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy, tokens
from support.expert_pairs import save_glm_with_mtp
from support.families import FAMILIES
from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, on_gpu_or_interpreted
from support.tiny_models import Pair, save_copying_head, save_weak_llama
from treetop import LLM
from treetop.kernels.table import Ops, operations
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.errors import InvariantError

OPTIONS = {"context_length": 64, "chunked_prefill_size": 16, "page_size": 4, "check_level": 0, "graphs": "off"}


def not_told(tensor, given):
    """Strides of a tensor that nobody could know who sees it as contiguous, or has these integers beside it."""
    if tensor.is_contiguous():
        return []
    packed, missing = 1, []
    for size, stride in reversed([*zip(tensor.shape, tensor.stride(), strict=True)]):
        if size == 1:
            continue
        if stride == packed:
            packed *= size
        else:
            packed = None
            missing += [stride] if stride not in given else []
    return missing


class Audited:
    """A kernel that looks at what it is launched with. seen: names of those that were."""

    def __init__(self, kernel, seen):
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            name = getattr(self._kernel, "fn", self._kernel).__name__
            self._seen.add(name)
            given = [each for each in arguments if isinstance(each, int)]
            for tensor in arguments:
                if isinstance(tensor, torch.Tensor) and not_told(tensor, given):
                    raise InvariantError(f"{name} gets {tuple(tensor.shape)}, of strides {tensor.stride()}")
            return self._kernel[grid](*arguments, **options)

        return launch


@contextmanager
def audited(monkeypatch):
    """Engines that are made inside launch their kernels, on a CPU too. Yields the names of those that were launched."""
    seen, real = set(), Ops.__init__

    def init(self, context, *more, **options):
        real(self, context, *more, **options)
        asked = replace(context, device=torch.device("cuda"))
        serving = {name: op.on(gpu_traits(DEVICE)) for name, op in operations().items() if op.applies(asked)}
        vars(self).update(serving)

    with monkeypatch.context() as patch:
        for op in operations().values():
            for kernel in op.launches:
                function = getattr(kernel, "fn", kernel)
                patch.setattr(sys.modules[function.__module__], function.__name__, Audited(kernel, seen))
        if DEVICE.type == "cpu":
            patch.setattr(Ops, "__init__", init)
        yield seen


def test_a_tensor_that_is_seen_several_times_is_not_contiguous():
    """The root and the nodes of one row's tree: so the audit can fail."""
    one = torch.ones(1, dtype=torch.bool)[:, None].expand(-1, 6)
    assert not_told(one.reshape(-1), [6]) == [0]
    assert not_told(one.reshape(-1).contiguous(), []) == not_told(one, [0]) == []
    columns = torch.zeros(2, 3, 8)[:, :, :4]
    assert not_told(columns, []) == [8, 24]
    assert not_told(columns, [8]) == [24]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launches")
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    return {
        "llama": Pair(weak, save_copying_head(folder / "head", weak, draft_vocab=188)),
        "experts": Pair(save_glm_with_mtp(folder), None),
        "latents": FAMILIES["deepseek v3"].save(folder / "latents", seed=5).pair,
        "sparse": FAMILIES["glm 5.2"].save(folder / "sparse", seed=5).pair,
    }


def made(pair, **options):
    if pair.head is None:
        tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
        return LLM(str(pair.target), speculative_algorithm="MTP", **tree, **OPTIONS, **options)
    return build(pair, (2, 2, 4), **OPTIONS, **options)


def answers(llm, pair):
    """Two requests, the second of which is soon alone."""
    try:
        return tokens(llm.generate(pair.prompts([3, 9]), [greedy(2), greedy(3)]))
    finally:
        llm.close()


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", few_of(["experts", "sparse", "llama", "latents"], *((0, 1) if ON_GPU else (0,))))
def test_a_kernel_is_told_how_its_tensors_lie(pairs, monkeypatch, name):
    pair = pairs[name]
    want = answers(made(pair, device="cpu", dtype="float64"), pair)
    with audited(monkeypatch) as seen:
        options = {"device": DEVICE.type, "dtype": "float32", "attention_backend": "triton"}
        assert answers(made(pair, **options), pair) == want
    expected = {"_attention_kernel", "_grow_kernel", "_accept_kernel", "_commit_kernel"}
    if name in ("latents", "sparse"):  # the head's attention is of the usual kind
        expected |= {"_latent_attention_kernel", "_write_latent_kernel"}
    if name == "sparse":
        expected |= {"_scores_kernel", "_select_kernel", "_rotate_index_heads_kernel", "_write_index_keys_kernel"}
    assert expected | ({"_choose_kernel", "_grouped_kernel"} if name == "experts" else set()) <= seen
