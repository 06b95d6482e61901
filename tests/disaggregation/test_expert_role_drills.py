"""Groups of ranks with roles as servers, over NIXL: a rank of either is killed, and clients see a pause."""

import os
import signal
import time

import pytest

from support.addresses import addresses
from support.engines import greedy
from support.expert_pairs import TREE, build, save_glm_with_mtp
from support.expert_servers import OPTIONS, ranks_of
from support.nixl_peer import OVER_TCP
from support.serving import Server, serving
from support.threads import in_threads, joined
from support.tiny_models import Pair, copy_folder, save_tokenizer
from support.waiting import until
from treetop.types.kv_transfer.options import SECRET_VARIABLE

pytest.importorskip("nixl_cu12", reason="needs NIXL")
pytestmark = pytest.mark.slow
LENGTHS, MAX_TOKENS = [40, 150, 90, 120], 60
FLAGS = {
    "--ep-size": 2,
    "--device": "cpu",
    "--dtype": "float64",
    "--graphs": "sim",
    "--page-size": 4,
    "--context-length": 256,
    "--max-running-requests": 4,
    "--chunked-prefill-size": 16,
    "--disaggregation-slots": 4,
    "--disaggregation-slot-bytes": 1 << 14,
    "--disaggregation-lease": 6,
    "--speculative-algorithm": "MTP",
    "--speculative-eagle-topk": TREE[0],
    "--speculative-num-steps": TREE[1],
    "--speculative-num-draft-tokens": TREE[2],
}


class Site:
    """Servers of both roles, and what one process says after each of the prompts."""

    def __init__(self, model: str, prompts: list[list[int]], want: list[str], prefill: Server, decode: Server) -> None:
        self.model, self.prompts, self.want, self.prefill, self.decode = model, prompts, want, prefill, decode

    def served(self, strike) -> None:
        """All prompts are asked at once, and `strike` falls among them. Answers are whole all the same."""
        texts = {}

        def ask(index):
            options = {"max_tokens": MAX_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}, "stream": True}
            answer = self.decode.client().completions.create(model=self.model, prompt=self.prompts[index], **options)
            texts[index] = "".join(chunk.choices[0].text for chunk in answer)

        threads = in_threads(len(self.prompts), ask)
        strike()
        joined(threads)
        assert texts == dict(enumerate(self.want))

    def have_met(self) -> None:
        until(lambda: self.decode.metric("treetop:kv_transfer_num_peers") == 4, "peers have not met")

    def nothing_is_held(self) -> None:
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_transfer_num_requests_in_flight",
            "kv_transfer_num_slots_busy",
        )
        for server in (self.prefill, self.decode):
            for name in names:
                until(lambda s=server, n=name: s.metric(f"treetop:{n}") == 0, name)

    def kill(self, server: Server, rank: int) -> float:
        """Once pieces travel. Returns when."""
        pieces = self.decode.metric("treetop:kv_transfer_num_chunks")
        pid = ranks_of(server)[rank]
        until(lambda: self.decode.metric("treetop:kv_transfer_num_chunks") > pieces)
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()


@pytest.fixture
def site(tmp_path):
    place = copy_folder(save_glm_with_mtp(tmp_path / "glm"), tmp_path / "model")
    save_tokenizer(place, 12, lambda token: bytes([97 + token]))
    prompts = Pair(place, None).prompts(LENGTHS)
    llm = build(place, TREE, 1, **OPTIONS)
    want = [output.text for output in llm.generate(prompts, greedy(MAX_TOKENS))]
    llm.close()
    peers = addresses(2)
    flags = [str(place), *(str(each) for pair in FLAGS.items() for each in pair)]
    environment = {SECRET_VARIABLE: "a secret of the tests", "UCX_TLS": OVER_TCP}
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-listen", peers[0])
    decode = (
        "--disaggregation-mode",
        "decode",
        "--disaggregation-prefill-peers",
        ",".join(peers),
        "--disable-radix-cache",
    )
    with (
        serving(*flags, *prefill, environment=environment) as computes,
        serving(*flags, *decode, environment=environment) as asks,
    ):
        yield Site(str(place), prompts, want, computes, asks)


def test_a_rank_of_either_group_is_killed_and_no_answer_is_lost(site):
    """Its group ends, another takes its place, and requests are handed over again; all memory comes back."""
    site.have_met()
    site.served(lambda: site.kill(site.decode, 1))
    assert site.decode.metric("treetop:num_engine_restarts") == 1
    site.have_met()
    site.nothing_is_held()
    site.served(lambda: site.kill(site.prefill, 0))
    until(lambda: site.prefill.metric("treetop:num_engine_restarts") == 1)
    assert site.decode.metric("treetop:num_engine_restarts") == 1
    site.have_met()
    site.nothing_is_held()
    whole = site.decode.metric("treetop:kv_transfer_num_requests_done")
    site.served(lambda: None)
    until(lambda: site.decode.metric("treetop:kv_transfer_num_requests_done") == whole + len(LENGTHS))
    site.nothing_is_held()
