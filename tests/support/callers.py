"""Requests of a thread to a core without `LLM`, and their updates as they come."""

from queue import SimpleQueue

from support.waiting import WAIT_S


class Caller:
    """submit: `CoreThread.add`, or `submit` of a client."""

    def __init__(self, submit) -> None:
        self._submit, self._queue = submit, SimpleQueue()

    def add(self, requests) -> None:
        self._submit(requests, self._queue.put)

    def get(self):
        return self._queue.get(timeout=WAIT_S)
