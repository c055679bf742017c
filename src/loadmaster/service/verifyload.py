"""The steps of the proof that load the service: many requests at once, the longest prompt, clients that leave."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack

from loadmaster.core.answers import names, spoken
from loadmaster.core.tables import load_toml
from loadmaster.render.units import plural
from loadmaster.service import verifypictures
from loadmaster.service.verifyclient import Answer, ServiceError
from loadmaster.service.verifysteps import (
    ANSWER_TOKENS,
    ONE_WORD,
    Outcome,
    Proof,
    failed,
    not_applicable,
    passed,
    quoted,
    said,
    says,
    shown,
)

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:]+)(?:\{[^\n]*\})? +(?P<value>\d[\d.]*(?:[eE][+-]?\d+)?)", re.MULTILINE)
_FREE_AGAIN_S = 5.0  # how long a service may take to notice that a client has left


async def longest_prompt(proof: Proof) -> Outcome:
    """Fill the context that the service claims: words are counted with two short prompts, then one long one is sent."""
    context = proof.limits.context
    if context is None:
        return not_applicable("the service does not say how long a prompt may be (no max_model_len in /v1/models)")
    answer_tokens = min(16, max(1, context // 8))
    few, more = max(1, context // 256), max(4, context // 32)

    async def send(words: int, timeout_s: float) -> Answer:
        prompt = said("Say hello after these words:" + " apple" * words)
        return await proof.service.chat([prompt], max_tokens=answer_tokens, timeout_s=timeout_s)

    first, second = [(await send(words, proof.service.timeout_s)).prompt_tokens for words in (few, more)]
    if first is None or second is None:
        return not_applicable("the service does not count the tokens of a prompt, so none can be made that fits")
    if second <= first:
        return failed(f"{few} words were counted as {first} tokens, {more} words as {second}")
    each = (second - first) / (more - few)
    words = more + int((context - answer_tokens - second) / each)
    try:
        answer = await send(words, 5 * proof.service.timeout_s)
    except ServiceError as error:
        if error.status not in (400, 413, 422) or not says(error.message, "too_long"):
            return failed(f"a prompt of about {context - answer_tokens:,} tokens: {error.message}")
        # counting was off by some tokens: a prompt of 97 % still shows that the claim holds
        answer = await send(int(words * 0.97), 5 * proof.service.timeout_s)
    count = answer.prompt_tokens or 0
    if count < 0.9 * (context - answer_tokens):
        return failed(f"of a prompt of about {context - answer_tokens:,} tokens the service counted {count:,}")
    rate = count / answer.seconds if answer.seconds else 0
    return passed(f"{count:,} of {context:,} tokens in {answer.seconds:.2f} s, {rate:,.0f} tokens/s")


async def concurrent(proof: Proof) -> Outcome:
    """As many requests at once as the service claims, each with a picture of its own if it can see any."""
    at_once = proof.limits.concurrency
    if at_once is None:
        return not_applicable("the service does not say how many requests it answers at once; --concurrency gives it")
    sees = proof.statuses.get("image-colour") == "passed"
    colours = [sorted(verifypictures.COLOURS)[n % len(verifypictures.COLOURS)] for n in range(at_once)]

    async def one(number: int) -> Answer:
        if sees:
            message = shown([verifypictures.one_colour(colours[number])], f"What colour is the disc? {ONE_WORD}")
        else:
            message = said(f"Say hello, visitor {number + 1}.")
        return await proof.service.stream([message], max_tokens=proof.tokens(ANSWER_TOKENS))

    begin = time.monotonic()
    results = await asyncio.gather(*(one(number) for number in range(at_once)), return_exceptions=True)
    seconds = time.monotonic() - begin
    faults: list[str] = []
    for number, result in enumerate(results):
        if isinstance(result, ServiceError):
            faults.append(result.message)
        elif isinstance(result, BaseException):
            raise result
        elif result.problems:
            faults.append(result.problems[0])
        elif sees and spoken(result.text) and not names("colour", colours[number], result.text):
            faults.append(f"shown {colours[number]}, answered {quoted(result.text)}: pictures are mixed up under load")
    if faults:
        return failed(f"{len(faults)} of {at_once} requests failed, the first: {faults[0]}")
    alone = f" (a short one alone took {proof.alone_s:.2f} s)" if proof.alone_s is not None else ""
    return passed(f"{at_once} at once{' with pictures' if sees else ''} in {seconds:.2f} s{alone}")


async def cancel(proof: Proof) -> Outcome:
    """Leave long answers in the middle; the service has to notice and be free for others."""
    at_once = proof.limits.concurrency or 1
    before = await _requests(proof)
    question = said("Count from 1 to 2000, one number in a line.")
    most = proof.tokens(2000)
    async with AsyncExitStack() as streams:
        opening = (
            streams.enter_async_context(proof.service.open_stream([question], max_tokens=most)) for _ in range(at_once)
        )
        for result in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
    left = time.monotonic()
    bound = _FREE_AGAIN_S + 4 * (proof.alone_s or 0.0)
    try:
        await proof.service.chat([said("Say hello.")], max_tokens=proof.tokens(8), timeout_s=bound)
    except ServiceError as error:
        return failed(f"after {plural(at_once, 'answer')} left in the middle, a short request failed: {error.message}")
    probe_s = time.monotonic() - left
    if before is not None:
        return await _freed(proof, at_once, before, left)
    if proof.limits.concurrency is None:
        return not_applicable(
            f"a request was answered {probe_s:.2f} s after one left, but the service tells neither how many run "
            "nor how many it takes at once"
        )
    return passed(f"{plural(at_once, 'answer')} left in the middle; the next request was answered in {probe_s:.2f} s")


async def _freed(proof: Proof, at_once: int, before: int, left: float) -> Outcome:
    """Whether the count of requests in the metrics falls back to what it was."""
    while True:
        now = await _requests(proof)
        waited = time.monotonic() - left
        if now is not None and now <= before:
            return passed(
                f"{plural(at_once, 'answer')} left in the middle; the service was free again within {waited:.2f} s"
            )
        if waited > _FREE_AGAIN_S:
            return failed(
                f"{waited:.0f} s after {plural(at_once, 'answer')} left in the middle, the service still counts "
                f"{now if now is not None else 'an unknown number of'} requests ({before} before)"
            )
        await asyncio.sleep(0.1)


async def _requests(proof: Proof) -> int | None:
    """Requests that run or wait: by the engine's own /metrics where they can be had, else by the service's."""
    wanted = load_toml("verify-phrases.toml")["requests"]
    for base in (proof.engine_url, proof.service.url):
        if base is None:
            continue
        try:
            status, raw = await proof.service.get("/metrics", base=base, timeout_s=10)
        except ServiceError:
            continue
        samples = _SAMPLE.finditer(raw.decode("utf-8", "replace") if status == 200 else "")
        found = [float(sample["value"]) for sample in samples if sample["name"] in wanted]
        if found:
            return round(sum(found))
    return None
