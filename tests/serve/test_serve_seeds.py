"""Requests that bring no seed are independent, whichever API process of whichever start takes them."""

import asyncio

import httpx
import pytest

from support.serving import serving
from support.waiting import WAIT_S
from treetop.serve.run import first_seed

PAIR = ("--device", "cpu", "--max-running-requests", "4")
ASKED = {"prompt": "def area(r):", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}


def answers(server, count: int, at_a_time: int = 1) -> list[tuple[int, ...]]:
    """Of requests that are alike, each on a connection of its own."""

    async def one(turns: asyncio.Semaphore) -> tuple[int, ...]:
        async with turns, httpx.AsyncClient(timeout=WAIT_S) as client:
            answer = await client.post(server.url + "/v1/completions", json=ASKED)
        return tuple(answer.json()["choices"][0]["token_ids"])

    async def all_of() -> list[tuple[int, ...]]:
        turns = asyncio.Semaphore(at_a_time)
        return await asyncio.gather(*(one(turns) for _ in range(count)))

    return asyncio.run(all_of())


def test_workers_draw_different_answers():
    """16 requests to two API processes: no answer twice."""
    with serving(*PAIR, "--api-workers", "2") as server:
        assert len({*answers(server, 16, at_a_time=4)}) == 16


@pytest.mark.slow
def test_another_start_draws_other_answers():
    """Two starts, 8 requests each: no answer twice."""
    seen = []
    for _ in range(2):
        with serving(*PAIR) as server:
            seen += answers(server, 8)
    assert len({*seen}) == 16


@pytest.mark.slow
def test_a_given_seed_gives_the_same_answers_again():
    """Of one API process: its requests draw one after another."""
    seen = []
    for _ in range(2):
        with serving(*PAIR, "--seed", "7") as server:
            seen.append(answers(server, 4))
    assert seen[0] == seen[1]
    assert len({*seen[0]}) == 4


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_no_client_of_an_engine_begins_as_another(seed):
    """By the number that no two have had: one that takes another's place has a number of its own."""
    firsts = [first_seed(seed, client) for client in range(100)]
    assert len({*firsts}) == 100
    assert all(0 <= each < 2**63 for each in firsts)
    assert firsts == [first_seed(seed, client) for client in range(100)]
    assert firsts[0] == seed  # as `LLM(seed=...)` draws


def test_without_a_seed_it_is_drawn_anew():
    assert len({first_seed(None, client) for client in (0, 0, 1, 1)}) == 4
