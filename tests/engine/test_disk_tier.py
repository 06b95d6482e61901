"""The tier of K/V on disk: a restarted engine has what one before it wrote, and nobody can tell by the tokens."""

import json
import os
import random
import signal
import sys
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from support.engines import build, hold_core_thread, rest
from support.loras import save_lora
from support.offloading import POOL, ask, ask_salted, on_a_cpu, stats, turns, with_tier
from support.recurrent_models import known_family
from support.recurrent_models import save_pair as recurrent_pair
from support.refusing import refused
from support.waiting import WAIT_S
from treetop.cache.disk_store import DiskStore
from treetop.cache.disk_tier import Wanted
from treetop.engine.offloading.disk_pages import DiskPages
from treetop.engine.offloading.host_pages import page_sum, page_sums
from treetop.types.errors import ConfigError

ASKED = [*turns(random.Random(4))]
FIRST, SECOND = ASKED[:5], ASKED[5:]


@contextmanager
def engine(pair, folder, mib=4, **options):
    with on_a_cpu():
        disk = {"kv_offloading_folder": str(folder), "kv_offloading_disk_size": 1}
        llm = with_tier(pair, mib=mib, **{**POOL, **disk, **options})
        try:
            yield llm
        finally:
            llm.close()


@pytest.fixture(scope="module")
def want(strong_pair):
    """Of an engine that evicts nothing."""
    return ask(build(strong_pair, (3, 3, 8), **{**POOL, "max_total_tokens": 4096}), ASKED)


def written(llm):
    """All that was to be is."""
    rest(llm)
    return stats(llm)


def pages_in(folder):
    return sorted(Path(folder).glob("engine-*/*.page"))


def test_a_restarted_engine_has_what_the_one_before_wrote(strong_pair, tmp_path, want):
    """Tokens and accept lengths are those of computing; what is read is counted as cached, and told."""
    with engine(strong_pair, tmp_path) as llm:
        assert ask(llm, FIRST) == want[:5]
        saw = written(llm)
        assert saw.disk_saved_tokens >= 5 * 80
        assert saw.disk_bytes == sum(each.stat().st_size for each in pages_in(tmp_path))
        llm.scheduler.check_integrity()
    with engine(strong_pair, tmp_path) as llm:
        assert ask(llm, SECOND) == want[5:]
        saw = written(llm)
        assert saw.disk_loaded_tokens >= 5 * 80
        assert (saw.disk_damaged_pages, saw.failed_loads) == (0, 0)
        llm.scheduler.check_integrity()


def test_first_pages_of_a_prompt_are_the_last_used_after_a_restart(strong_pair, tmp_path):
    """Written, read and written behind those, or read: the next engine evicts those behind them first."""

    def times(llm, prompt):
        tier = llm.scheduler._disk
        keys = [key for key in tier._keys(Wanted(prompt, ""), len(prompt) // 16) if tier.store.holds(key)]
        assert len(keys) > 3
        return [tier.store._path(key).stat().st_mtime_ns for key in keys]

    for asked in (FIRST[:1], SECOND[:1], SECOND[:1]):
        with engine(strong_pair, tmp_path) as llm:
            ask(llm, asked)
            assert bool(written(llm).disk_loaded_tokens) == (asked != FIRST[:1])
            found = times(llm, asked[0][1])
            assert found == sorted(set(found), reverse=True)
        for number, path in enumerate(pages_in(tmp_path)):
            os.utime(path, (number, number))


def test_what_the_host_has_given_up_comes_from_disk(strong_pair, tmp_path, want):
    """Of a host that holds one conversation or two, without a restart."""
    with engine(strong_pair, tmp_path, mib=0.6) as llm:
        for each, wanted in zip(ASKED, want, strict=True):
            assert ask(llm, [each]) == [wanted]
            rest(llm)  # a slow disk has no longer what the host has given up meanwhile
        assert written(llm).disk_loaded_tokens >= 3 * 80
        llm.scheduler.check_integrity()


def test_damaged_files_are_computed_again(strong_pair, tmp_path, want, caplog):
    """As far as pages before them are whole these are used; nothing else is forgotten."""
    with engine(strong_pair, tmp_path) as llm:
        ask(llm, FIRST)
        written(llm)
    rng = random.Random(1)
    for path in pages_in(tmp_path)[::2]:
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1
        path.write_bytes(content)
    with engine(strong_pair, tmp_path) as llm:
        assert ask(llm, SECOND) == want[5:]
        saw = written(llm)
        assert saw.disk_damaged_pages > 0
        assert saw.failed_loads == 0
        assert "damaged, and computed again" in caplog.text
        llm.scheduler.check_integrity()


def test_what_is_not_what_left_the_device_is_not_written(strong_pair, tmp_path):
    """A number that changed on the host is told by the checksum that was taken before it came there."""

    views = DiskPages.sums

    def damaged(self, pages):
        for group, columns in pages.items():
            self._memory(group, columns[-1])[5] ^= 1
        return views(self, pages)

    with engine(strong_pair, tmp_path) as llm:
        with patch.object(DiskPages, "sums", damaged):
            ask(llm, FIRST[:1])
            written(llm)
        assert len(pages_in(tmp_path)) == stats(llm).disk_saved_tokens // 16 < stats(llm).saved_tokens // 16


@pytest.mark.parametrize(
    "other", [{"kv_cache_dtype": "fp8_e4m3"}, {"page_size": 8}, {"dtype": "float32"}, "weights", "salt"], ids=str
)
def test_pages_of_anything_else_are_never_used(strong_pair, tmp_path, other):
    """Other formats, layouts, weights that only the time of their file tells apart, and other salts."""
    with engine(strong_pair, tmp_path) as llm:
        ask(llm, FIRST[:2])
        assert written(llm).disk_saved_tokens
    if other == "weights":
        (strong_pair.target / "model.safetensors").touch()
    options = other if isinstance(other, dict) else {}
    with engine(strong_pair, tmp_path, **options) as llm:
        assert ask_salted(llm, FIRST[:1], "another" if other == "salt" else "") == [0]
        assert stats(llm).disk_loaded_tokens == 0


def test_a_disk_that_fails_harms_no_request(strong_pair, tmp_path, want):
    full = patch("treetop.cache.disk_store._write", side_effect=OSError(28, "No space left on device"))
    with full as write, engine(strong_pair, tmp_path) as llm:
        assert ask(llm, FIRST) == want[:5]
        assert written(llm).disk_saved_tokens == 0
        assert write.call_count == 1
        llm.scheduler.check_integrity()


def test_books_that_begin_anew_wait_for_the_disk_and_go_on(strong_pair, tmp_path, want):
    """Pages that were on their way are of the books before; none is written from memory that is another's now."""
    with engine(strong_pair, tmp_path) as llm:
        ask(llm, FIRST)
        written(llm)
        hold_core_thread(llm)
        llm.scheduler.fail("a step failed")
        assert ask(llm, SECOND) == want[5:]
        assert written(llm).disk_loaded_tokens >= 5 * 80
        llm.scheduler.check_integrity()


def test_what_cannot_be_is_refused_by_name(strong_pair, tmp_path):
    name = "--kv-offloading-folder"
    with on_a_cpu():
        both = {"kv_offloading_folder": str(tmp_path), "kv_offloading_disk_size": 1}
        for options, words in (
            ({"kv_offloading_folder": "x"}, ["--kv-offloading-disk-size"]),
            ({**both, "tp_size": 2}, ["--tp-size 2"]),
        ):
            refused(ConfigError, lambda options=options: with_tier(strong_pair, **{**POOL, **options}), name, *words)
        refused(ConfigError, lambda: build(strong_pair, (3, 3, 8), **both), name, "--kv-offloading-size")
        lora = save_lora(tmp_path / "lora", strong_pair.target, 4, 8.0, 1)
        given = {**both, "lora_modules": {"a": str(lora)}}
        refused(ConfigError, lambda: with_tier(strong_pair, **{**POOL, **given}), name, "adapters")
        with known_family():
            pair = recurrent_pair(tmp_path / "pair", "sum", "delta", "full")
            refused(ConfigError, lambda: with_tier(pair, (2, 3, 6), **{**POOL, **both}), name, "recurrent")
    with engine(strong_pair, tmp_path / "kv") as llm:
        refused(ConfigError, lambda: llm.update_weights(str(strong_pair.target)), "update_weights", name)


LIVES = 5
LIVE = "import sys; from support.offloading import live; live(*sys.argv[1:4], int(sys.argv[4]), 3, float(sys.argv[5]))"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_full_disks_and_damage_of_every_kind_change_no_token(strong_pair, tmp_path, seed):
    """Engines follow one another on one folder, killed at any moment; between them files are flipped, cut, emptied,
    swapped and added. The last one ends by itself, with files left to read, within its bound, and nothing beside them.
    """
    asked, rng, most = [*turns(random.Random(4), count=3)], random.Random(seed), 2**20
    plain = ask(build(strong_pair, (3, 3, 8), **{**POOL, "max_total_tokens": 4096}), asked)
    want, loaded, damaged = json.loads(json.dumps(plain)), 0, 0
    for number in range(LIVES):
        left = -1 if number == LIVES - 1 else rng.randrange(1, len(asked))
        given = [strong_pair.target, strong_pair.head, tmp_path, number, most / 2**30]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        command = [sys.executable, "-c", LIVE, *map(str, given)]
        with Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment) as engine:
            for line in engine.stdout:
                said = json.loads(line)
                if isinstance(said, dict):
                    loaded, damaged = said["disk_loaded_tokens"], said["disk_damaged_pages"]
                    assert said["failed_loads"] == 0
                else:
                    at, *found = said
                    assert found == want[at], (number, at)
                left -= 1
                if left == 0:
                    engine.kill()
                    break
            engine.stdout.close()
            complaint = engine.stderr.read()
        assert engine.returncode == (0 if number == LIVES - 1 else -signal.SIGKILL), complaint
        assert sum(each.stat().st_size for each in pages_in(tmp_path)) <= most
        if number < LIVES - 1:
            spoil(rng, pages_in(tmp_path))
    assert loaded > 0
    assert damaged > 0
    assert {each.suffix for each in tmp_path.glob("engine-*/*")} == {"", ".page"}
    assert len([*tmp_path.iterdir()]) == 1, "each had the folder of the one before"


def spoil(rng, pages):
    """Some of the files, each in another way."""
    for path in rng.sample(pages, len(pages) // 3):
        content = bytearray(path.read_bytes())
        match rng.randrange(6):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                del content[rng.randrange(len(content)) :]
            case 2:
                content.clear()
            case 3:
                content += b"more"
            case 4:
                content[:] = rng.choice(pages).read_bytes()
            case 5:
                path.with_suffix(".part").write_bytes(content)
        path.write_bytes(content)


@pytest.mark.parametrize("size", [4, 2**16, 2**16 + 4, 5 * 2**16 + 12])
def test_a_pages_checksum_on_the_host_is_the_one_that_the_device_took(size):
    """In parts, of sizes that are a part, more and less; of numbers that overflow."""
    generator = torch.Generator().manual_seed(size)
    page = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    for each in (page, torch.full_like(page, 255)):
        assert page_sum(each) == int(page_sums(each[None])[0])


def test_a_reader_that_fails_is_told_once_no_other_writes_to_pages(strong_pair, tmp_path, monkeypatch):
    """Pages of a read are given back as it ends, and would be another's."""
    last, goes_on = threading.Event(), threading.Event()

    def read(store, key, views):
        if key == keys[0]:
            raise OSError("no such disk")
        last.set()
        assert goes_on.wait(WAIT_S)
        return True

    with engine(strong_pair, tmp_path) as llm:
        tier = llm.scheduler._disk
        keys = [bytes([each]) for each in range(3)]
        pages = {group: [0, 1, 2] for group in llm.engine.layout.token_groups}
        job = SimpleNamespace(keys=keys, begin=0, pages=pages)
        monkeypatch.setattr(DiskStore, "read", read)
        ends = tier._threads["read"].submit(tier._read, job)
        assert last.wait(WAIT_S)
        ended = wait([ends], 0.05).done
        goes_on.set()
        assert not ended
        with pytest.raises(OSError, match="no such disk"):
            ends.result(WAIT_S)
