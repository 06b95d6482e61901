"""`treetop bench serve`: load on a server over HTTP, and how fast it answers. Any server with OpenAI's API will do."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treetop.bench.arrivals import ARRIVALS
from treetop.bench.http_client import Address, HttpClient, HttpError
from treetop.bench.lengths import lengths_of, read_lengths
from treetop.bench.workload import Conversation, conversations, conversations_of_ids
from treetop.types.errors import ConfigError, EngineError

PERCENTILES = (50, 90, 95, 99)
LIMITS = ("ttft", "tpot", "itl", "e2e")
"""What a latency target may limit."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Under the flags' names. Raises ConfigError with all problems at once.

    model: None for the first of /v1/models.
    request_rate: conversations begun in a second, None for all at once.
    max_concurrency: conversations at a time; each is a run of its own. Empty is one run without a limit.
    goodput: most milliseconds, by name of `LIMITS`.
    num_prompts: conversations of a run.
    output_len: tokens of an answer.
    prompts_per_client: conversations of a run for each of those at a time, instead.
    input_len: tokens of a prompt of random ids, as `bench/lengths.py` says.
    lengths: a file of the lengths of prompts and answers.
    return_token_ids: tells tokens that are no text, as of a server without a tokenizer.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 64
    num_turns: int = 1
    shared_prefix_words: int = 0
    input_words: int | None = None
    prompts: str | None = None
    output_len: int = 128
    ignore_eos: bool = False
    return_token_ids: bool = False
    temperature: float = 0.0
    request_rate: float | None = None
    arrivals: str = "poisson"
    burst_size: int = 8
    max_concurrency: tuple[int, ...] = ()
    prompts_per_client: int | None = None
    input_len: str | None = None
    lengths: str | None = None
    goodput: dict[str, float] = field(default_factory=dict)
    request_timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("num_prompts", "num_turns", "output_len", "burst_size")
        rules = [(getattr(self, name) < 1, f"--{name.replace('_', '-')} must be at least 1") for name in counts]
        rules += [
            (self.endpoint not in ("completions", "chat"), "--endpoint must be completions or chat"),
            (self.arrivals not in ARRIVALS, f"--arrivals must be one of {', '.join(ARRIVALS)}"),
            (self.shared_prefix_words < 0, "--shared-prefix-words must be at least 0"),
            (self.input_words is not None and self.input_words < 1, "--input-words must be at least 1"),
            (
                sum(each is not None for each in (self.input_words, self.prompts, self.input_len, self.lengths)) > 1,
                "--input-words, --prompts, --input-len and --lengths: give one",
            ),
            (
                (self.input_len is not None or self.lengths is not None)
                and (self.num_turns > 1 or self.shared_prefix_words > 0 or self.endpoint == "chat"),
                "--input-len and --lengths are prompts of ids: without --num-turns, --shared-prefix-words, and chat",
            ),
            (
                self.prompts_per_client is not None and (self.prompts_per_client < 1 or not self.max_concurrency),
                "--prompts-per-client must be at least 1, and needs --max-concurrency",
            ),
            (self.request_rate is not None and not 0 < self.request_rate < 10**6, "--request-rate must be above 0"),
            (any(each < 1 for each in self.max_concurrency), "--max-concurrency must be at least 1"),
            (not 0 < self.request_timeout < 10**6, "--request-timeout must be a number of seconds above 0"),
            (not self.temperature >= 0, "--temperature must be at least 0"),
            (
                any(name not in LIMITS or not maximum > 0 for name, maximum in self.goodput.items()),
                f"--goodput must be NAME:MILLISECONDS with a name of {', '.join(LIMITS)}",
            ),
        ]
        problems = [text for bad, text in rules if bad]
        if problems:
            raise ConfigError("; ".join(problems))
        if self.input_len is not None:
            lengths_of(self.input_len, "--input-len")

    def talks(self, most: int | None, rng: random.Random) -> list[Conversation]:
        """Those of a run of `most` at a time."""
        count = self.num_prompts
        if self.prompts_per_client is not None and most is not None:
            count = self.prompts_per_client * most
        if self.lengths is not None:
            pairs = read_lengths(Path(self.lengths))
            first = rng.randrange(len(pairs))
            return conversations_of_ids([pairs[(first + index) % len(pairs)] for index in range(count)], rng)
        if self.input_len is not None:
            draw = lengths_of(self.input_len, "--input-len")
            return conversations_of_ids([(draw(rng), None) for _ in range(count)], rng)
        return conversations(count, self.num_turns, self.shared_prefix_words, self.input_words, self.prompts, rng)


@dataclass(slots=True)
class TimedAnswer:
    """One request. Times in seconds from its beginning; event_s: when text came. num_tokens: as the server counts."""

    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    text: list[str] = field(default_factory=list)
    error: str | None = None

    def times_ms(self) -> dict[str, list[float]]:
        """First text; a token after the first, on average; between two events; all of it."""
        after = [1000 * (self.event_s[-1] - self.event_s[0]) / (self.num_tokens - 1)] if self.num_tokens > 1 else []
        gaps = [1000 * (b - a) for a, b in zip(self.event_s, self.event_s[1:], strict=False)]
        return {"ttft": [1000 * self.event_s[0]], "tpot": after, "itl": gaps, "e2e": [1000 * self.end_s]}


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    times_ms: name -> mean and percentiles.
    goodput: requests a second that kept to the target.
    tokens_per_s: of all answers.
    tokens_per_s_user: of one answer after its first text, on average.
    """

    max_concurrency: int | None
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    goodput: float | None
    tokens_per_s: float
    tokens_per_s_user: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    times_ms: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """options: without the key."""

    options: dict[str, Any]
    model: str
    points: list[Point]

    @property
    def failed(self) -> int:
        return sum(point.num_failed for point in self.points)


def run(options: LoadOptions, tell: Callable[[str], None] = lambda text: None) -> LoadReport:
    """Measure. tell: given a line for each run. Raises UserError, and EngineError if the server cannot be reached."""
    return asyncio.run(_run(options, tell))


async def _run(options: LoadOptions, tell: Callable[[str], None]) -> LoadReport:
    client = HttpClient(Address.of(options.base_url), options.api_key)
    try:
        return await _measured(client, options, tell)
    finally:
        await client.close()


async def _measured(client: HttpClient, options: LoadOptions, tell: Callable[[str], None]) -> LoadReport:
    try:
        listed = await client.get("/v1/models")
        model = options.model or str(listed["data"][0]["id"])
    except (OSError, HttpError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"--base-url {options.base_url}: /v1/models: {type(error).__name__}: {error}") from None
    points = []
    for maximum in options.max_concurrency or (None,):
        points.append(await LoadRun(client, options, model).run(maximum))
        tell(point_text(points[-1]))
    shown = asdict(options)
    shown.pop("api_key")
    return LoadReport(shown, model, points)


class LoadRun:
    """One run: conversations that begin when they should, each turn after the answer to the one before."""

    def __init__(self, client: HttpClient, options: LoadOptions, model: str) -> None:
        self._client, self._options = client, options
        self._path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
        self._common = {
            "model": model,
            "max_tokens": options.output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.return_token_ids:
            self._common["return_token_ids"] = True
        if options.ignore_eos:
            self._common["ignore_eos"] = True

    async def run(self, maximum: int | None) -> Point:
        options, rng = self._options, random.Random(self._options.seed)
        talks = options.talks(maximum, rng)
        at_s = [0.0] * len(talks)
        if options.request_rate is not None:
            at_s = ARRIVALS[options.arrivals](len(talks), options.request_rate, options.burst_size, rng)
        gate, started_s = asyncio.Semaphore(maximum or len(talks)), time.perf_counter()

        async def talk(conversation: Conversation, begins_s: float) -> list[TimedAnswer]:
            await asyncio.sleep(max(begins_s - (time.perf_counter() - started_s), 0))
            async with gate:
                return await self._talk(conversation)

        listed = await asyncio.gather(*map(talk, talks, at_s))
        answers = [answer for each in listed for answer in each]
        return point_of(answers, time.perf_counter() - started_s, maximum, options.goodput)

    async def _talk(self, conversation: Conversation) -> list[TimedAnswer]:
        answers = []
        while not conversation.ended:
            prompt = conversation.ask(self._options.endpoint == "chat")
            if conversation.output_len is not None:
                prompt["max_tokens"] = conversation.output_len
            answer = await self.ask(prompt)
            answers.append(answer)
            if answer.error is not None:
                break
            conversation.texts.append("".join(answer.text))
        return answers

    async def ask(self, prompt: dict[str, Any]) -> TimedAnswer:
        answer, started_s = TimedAnswer(), time.perf_counter()
        try:
            async with asyncio.timeout(self._options.request_timeout):
                async with aclosing(self._client.events(self._path, {**self._common, **prompt})) as events:
                    async for event in events:
                        _take(answer, event, time.perf_counter() - started_s)
        except TimeoutError:
            answer.error = "no end within --request-timeout"
        except (OSError, HttpError, ValueError, LookupError, TypeError, AttributeError) as error:
            answer.error = str(error) or type(error).__name__
        answer.end_s = time.perf_counter() - started_s
        if answer.error is None and not answer.event_s:
            answer.event_s.append(answer.end_s)  # its tokens were no text
        return answer


def _take(answer: TimedAnswer, event: dict[str, Any], now_s: float) -> None:
    for choice in event.get("choices", ()):
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if text or choice.get("token_ids"):
            answer.event_s.append(now_s)
            answer.text.append(text or "")
    usage = event.get("usage")
    if usage:
        answer.num_tokens, answer.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def point_of(answers: Sequence[TimedAnswer], elapsed_s: float, maximum: int | None, target: dict[str, float]) -> Point:
    """The figures of a run. A request that failed counts as one that missed the target."""
    good = [answer for answer in answers if answer.error is None]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    each_ms = [answer.times_ms() for answer in good]
    times = {name: [value for each in each_ms for value in each[name]] for name in LIMITS}
    kept = sum(all(max(each[name], default=0) <= limit for name, limit in target.items()) for each in each_ms)
    tokens, tpot = sum(answer.num_tokens for answer in good), times["tpot"]
    return Point(
        max_concurrency=maximum,
        num_requests=len(answers),
        num_failed=len(answers) - len(good),
        errors=errors,
        elapsed_s=elapsed_s,
        requests_per_s=len(good) / elapsed_s,
        goodput=kept / elapsed_s if target else None,
        tokens_per_s=tokens / elapsed_s,
        tokens_per_s_user=1000 / statistics.fmean(tpot) if tpot and sum(tpot) else None,
        prompt_tokens=sum(answer.num_prompt_tokens for answer in good),
        cached_tokens=sum(answer.num_cached_tokens for answer in good),
        output_tokens=tokens,
        times_ms={name: summary(values) for name, values in times.items() if values},
    )


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, and percentiles: the smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[max(-(-share * len(ordered) // 100) - 1, 0)] for share in PERCENTILES}
    return {"mean": statistics.fmean(ordered), **ranks}


def point_text(point: Point) -> str:
    """A few lines for a reader."""
    limit = "no limit" if point.max_concurrency is None else f"{point.max_concurrency} at a time"
    user = "" if point.tokens_per_s_user is None else f", {point.tokens_per_s_user:.1f} a user"
    goodput = "" if point.goodput is None else f", goodput {point.goodput:.2f} requests/s"
    lines = [
        f"{limit}: {point.num_requests} requests in {point.elapsed_s:.2f} s, {point.num_failed} failed;"
        f" {point.requests_per_s:.2f} requests/s{goodput}; {point.tokens_per_s:.1f} tokens/s{user};"
        f" {point.prompt_tokens} prompt tokens, {point.cached_tokens} of them cached"
    ]
    for name, each in point.times_ms.items():
        shown = ", ".join(f"{key} {value:.2f}" for key, value in each.items())
        lines.append(f"  {name:4} ms: {shown}")
    lines += [f"  failed {count} times: {error}" for error, count in point.errors.items()]
    return "\n".join(lines)
