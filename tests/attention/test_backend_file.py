"""A backend that only this file knows, and its name: from the option to the tokens of a tree."""

import sys
from types import SimpleNamespace
from typing import Literal, get_args

import pytest
import torch

from support.engines import build, greedy, tokens
from support.refusing import refused
from support.scenes import assert_close, dense_answer, scene
from treetop.attention import registry
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import Capabilities, Need
from treetop.attention.contract import BackendSpec
from treetop.doctor.report import backends
from treetop.engine.startup.plan import plan_engine
from treetop.types import options
from treetop.types.config import Backend, EngineConfig
from treetop.types.errors import ConfigError

CPU = torch.device("cpu")
NAME = "by-row"
ABLE = Capabilities((torch.float64, torch.float32), captures=False)
calls = []


class ByRow:
    """Each row and query alone, over the keys that it sees, one list after another."""

    name, capabilities = NAME, ABLE

    def begin(self, metadata):
        return metadata

    def plan(self, begun, metadata):
        return metadata

    def prefix_tail(self, q, kv, plan, tail, scale, sinks=None):
        calls.append(plan.phase)
        return self.attend(q, kv, plan, tail, scale, sinks)

    def causal(self, q, kv, plan, scale, sinks=None):
        calls.append(plan.phase)
        return self.attend(q, kv, plan, None, scale, sinks)

    def attend(self, q, kv, plan, tail, scale, sinks):
        out = torch.zeros_like(q)
        group, size = q.shape[2] // kv.data.shape[2], plan.page_size
        for row, (own, length) in enumerate(zip(plan.rows.tolist(), plan.kv_len.tolist(), strict=True)):
            real = length - int(plan.positions[row, 0]) if tail is None else None  # a chunk's others are padding
            for query, position in enumerate(plan.positions[row].tolist()[:real]):
                first = 0 if plan.window is None else max(int(plan.oldest[row, query]), 0)
                seen = range(first, length if tail is not None else min(length, position + 1))
                slots = [int(plan.table.data[own, at // size]) * size + at % size for at in seen]
                keys = [kv.data[slots]]
                if tail is not None:
                    near = plan.tail_positions[row] >= first
                    keys.append(tail.data[row, : len(near)][plan.mask[row, query] & near])
                k, v = torch.cat(keys).unbind(1)
                if len(k) == 0:
                    continue  # padding
                k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
                scores = torch.einsum("hd,thd->ht", q[row, query], k) * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None].to(q.dtype)], dim=1)
                weights = scores.softmax(dim=1)[:, : len(k)]
                out[row, query] = torch.einsum("ht,thd->hd", weights, v)
        return out


BACKEND = BackendSpec(ABLE, lambda need: ByRow())


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The file, and the line in the registry."""
    monkeypatch.setitem(sys.modules, f"treetop.attention.{NAME}_backend", SimpleNamespace(BACKEND=BACKEND))
    monkeypatch.setitem(EngineConfig.__annotations__, "attention_backend", Literal[*get_args(Backend), NAME])
    monkeypatch.setitem(registry.BACKENDS, NAME, registry.load(NAME))
    options._table.cache_clear()
    calls.clear()
    yield
    monkeypatch.undo()
    options._table.cache_clear()


CHANGES = [{}, {"window": 6}, {"window": 6, "chunked": True}, {"causal": True, "n": 9}, {"causal": True, "window": 5}]


@pytest.mark.parametrize("changes", CHANGES)
def test_it_answers_the_question(changes):
    s = scene(**changes)
    backend = make_backend(NAME, Need(s.q.dtype, CPU))
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    causal = "causal" in changes
    got = backend.causal(s.q, s.kv, plan, s.scale) if causal else backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    want = dense_answer(s, with_tail=not causal)[0]
    assert_close(got[s.real], want[s.real], s)


def test_a_tree_on_it_gives_what_the_own_backends_give(weak_pair):
    """All four phases ask it, and the engine, its options and the doctor's list know it by its name alone."""
    prompts = ["def area(radius):", "import os"]
    made = {}
    for name in (NAME, "torch"):
        llm = build(weak_pair, (3, 2, 6), dtype="float64", attention_backend=name)
        assert llm.engine.runner.backend.name == name
        made[name] = tokens(llm.generate(prompts, greedy(12)))
        llm.close()
    assert made[NAME] == made["torch"]
    assert {phase.value for phase in calls} == {"prefill", "draft", "verify", "extend"}
    plan = plan_engine(EngineConfig(str(weak_pair.target), dtype="float64", attention_backend=NAME))
    assert [row.name for row in backends(plan) if row.chosen] == [NAME]


def test_its_limits_are_refused_by_name(weak_pair):
    refused(
        ConfigError,
        lambda: build(weak_pair, (3, 2, 6), dtype="bfloat16", attention_backend=NAME),
        f"--attention-backend {NAME}: it computes in float64 and float32, not in bfloat16; use --dtype float64",
    )
