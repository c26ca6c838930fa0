"""`shoal smoke`: the main job from end to end, one line for each check."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ShoalError
from stack.api_client import ApiClient, Json, error_message
from stack.own_stack import running_or_own_stack
from stack.scrape import scrape
from stack.state_file import StackState

_FREED_WITHIN_S = 5.0
_WRITTEN_WITHIN_S = 5.0
_REUSE_TRIES = 4  # another worker may take a repeat


class CheckFailed(Exception):
    """What was seen instead of what was right."""


@dataclass(frozen=True, slots=True)
class _Target:
    api: ApiClient
    model: str
    state: StackState | None  # None: a gateway given by URL only

    def ask(self, path: str, body: Json) -> Json:
        status, answer = self.api.call("POST", path, {"model": self.model, "temperature": 0, **body})
        _expect(status == 200, f"status {status}: {error_message(answer)}")
        return answer


def smoke(url: str, api_key: str, state_dir: Path | None) -> bool:
    """Run all checks; True when all passed. Starts a stack, and stops it, when no URL is given and none runs."""
    began = time.monotonic()
    with running_or_own_stack(url, state_dir) as (at, state), ApiClient(at, api_key) as api:
        models = api.models()
        if not models:
            print(f"✗ {at} lists no model")
            return False
        target = _Target(api, models[0], state)
        passed = [_run(name, check, target) for name, check in _CHECKS]
    print(f"{sum(passed)} of {len(passed)} checks passed in {time.monotonic() - began:.1f} s")
    return all(passed)


def _run(name: str, check: Callable[[_Target], str], target: _Target) -> bool:
    began = time.monotonic()
    try:
        said = check(target)
    except (CheckFailed, ShoalError, LookupError, TypeError) as error:
        print(f"✗ {name}: {type(error).__name__ + ' ' if isinstance(error, LookupError | TypeError) else ''}{error}")
        return False
    finally:
        sys.stdout.flush()
    print(f"✓ {name} ({time.monotonic() - began:.2f} s){': ' + said if said else ''}", flush=True)
    return True


def _expect(met: bool, otherwise: str) -> None:
    if not met:
        raise CheckFailed(otherwise)


_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def _models(target: _Target) -> str:
    return ", ".join(target.api.models())


def _chat(target: _Target) -> str:
    answer = target.ask("/v1/chat/completions", {"messages": _QUESTION, "max_tokens": 16})
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    _expect(bool(text.strip()), "empty answer")
    _expect(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], f"usage {usage}")
    return repr(text)


def _stream(target: _Target) -> str:
    body = {"model": target.model, "temperature": 0, "messages": _QUESTION, "max_tokens": 16,
            "stream_options": {"include_usage": True}}
    whole = target.ask("/v1/chat/completions", {"messages": _QUESTION, "max_tokens": 16})
    events = list(target.api.stream("/v1/chat/completions", body))
    _expect(events[-1] is None, "no [DONE]")
    chunks = [event for event in events if event is not None]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    _expect(text == whole["choices"][0]["message"]["content"], f"streamed {text!r}, whole {whole['choices'][0]}")
    usage = chunks[-1].get("usage") or {}
    _expect(usage.get("completion_tokens") == whole["usage"]["completion_tokens"], f"usage {usage}")
    return f"{len(chunks)} chunks, same text as without streaming, usage and [DONE]"


def _completion(target: _Target) -> str:
    answer = target.ask("/v1/completions", {"prompt": "One, two, three,", "max_tokens": 8})
    return repr(answer["choices"][0]["text"])


def _reuse(target: _Target) -> str:
    prompt = f"Notes {uuid.uuid4()}. " + "The quick brown fox jumps over the lazy dog. " * 20
    texts, cached = set(), 0
    for _ in range(_REUSE_TRIES):
        answer = target.ask("/v1/completions", {"prompt": prompt, "max_tokens": 4})
        texts.add(answer["choices"][0]["text"])
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if cached:
            break
    _expect(cached > 0, f"cached_tokens is 0 after {_REUSE_TRIES} times the same prompt")
    _expect(len(texts) == 1, f"the same prompt gave {texts}")
    return f"{cached} of {answer['usage']['prompt_tokens']} prompt tokens cached"


def _routed(target: _Target) -> str:
    routers = _metrics_of(target, "router")
    if not routers:
        return "skipped: no router can be seen"
    decided = sum(scrape(address).get("shoal_router_decisions_total", 0) for address in routers)
    _expect(decided > 0, "no request was placed by a router")
    return f"{decided:.0f} placements"


def _stored(target: _Target) -> str:
    stores = _metrics_of(target, "kvstore")
    if not stores:
        return "skipped: no store can be seen"
    asked = time.monotonic()
    while not (blocks := sum(scrape(address)["shoal_kvstore_blocks"] for address in stores)):
        _expect(time.monotonic() - asked < _WRITTEN_WITHIN_S, f"no block was written back in {_WRITTEN_WITHIN_S:g} s")
        time.sleep(0.05)
    return f"{blocks:.0f} blocks"


def _refused(path: str, body: Json, status: int, needle: str) -> Callable[[_Target], str]:
    def check(target: _Target) -> str:
        got, answer = target.api.call("POST", path, {"model": target.model, **body})
        error = answer.get("error")
        _expect(got == status and isinstance(error, dict), f"status {got}, body {str(answer)[:200]}")
        _expect(needle in str(error), f"{needle!r} is not in {error}")
        return error_message(answer)

    return check


def _disconnect(target: _Target) -> str:
    workers = _metrics_of(target, "decode", "mixed")
    if not workers:
        return "skipped: the workers of a gateway given by URL cannot be seen"
    before = _held(workers)
    body = {"model": target.model, "prompt": "Count to one thousand: 1, 2, 3,", "max_tokens": 512, "ignore_eos": True}
    with contextlib.closing(target.api.stream("/v1/completions", body)) as events:
        for _ in range(3):
            next(events)
        during = _held(workers)
    left = time.monotonic()
    _expect(during[0] > before[0], f"the stream was never seen running: {during}")
    while (after := _held(workers))[0] > before[0] or after[1] > before[1]:
        _expect(time.monotonic() - left < _FREED_WITHIN_S, f"running, blocks: {before} before, {after} after")
        time.sleep(0.05)
    return f"{during[1]:.0f} blocks held, freed {time.monotonic() - left:.2f} s after the hang-up"


def _metrics_of(target: _Target, *kinds: str) -> list[str]:
    """Where the metrics of these processes are; none for a gateway given by URL only."""
    processes = {} if target.state is None else target.state.processes
    return [process.metrics_address for name, process in processes.items() if name.rsplit("-", 1)[0] in kinds]


def _held(workers: list[str]) -> tuple[float, float]:
    """Running requests and blocks in use, over all workers."""
    seen = [scrape(address) for address in workers]
    return (sum(each["shoal_requests_running"] for each in seen),
            sum(each["shoal_kv_blocks"] - each["shoal_kv_free_blocks"] for each in seen))


_CHECKS: tuple[tuple[str, Callable[[_Target], str]], ...] = (
    ("models", _models),
    ("chat", _chat),
    ("chat, streamed", _stream),
    ("completion", _completion),
    ("prefix reuse", _reuse),
    ("router places requests", _routed),
    ("store takes blocks", _stored),
    ("bad request is 400", _refused("/v1/chat/completions", {"messages": []}, 400, "messages")),
    ("unknown model is 404", _refused("/v1/completions", {"model": "nope", "prompt": "x"}, 404, "model_not_found")),
    ("hang-up frees blocks", _disconnect),
)
