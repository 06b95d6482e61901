"""Calls side by side, each in a thread."""

import threading

from support.waiting import WAIT_S


def in_threads(count: int, work) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads


def joined(threads) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a client hangs"
