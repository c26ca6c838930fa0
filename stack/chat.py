"""`shoal chat`: a conversation in the terminal.

States: waiting for a line ⇄ answering. Ctrl-C while answering closes the HTTP stream, which cancels the request, and
keeps what was said so far; at the prompt it only clears the line. Ctrl-D or /quit leaves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ShoalError, Unavailable
from stack.api_client import ApiClient, Json, gateway_url
from stack.model_fetch import default_cache_dir

_HELP = "/system TEXT  /reset  /stats  /save FILE  /quit; Ctrl-C cancels an answer"


@dataclass(slots=True)
class Turn:
    """One answer as it arrives. Times in seconds since the request; token counts from the usage."""

    text: str = ""
    ttft_s: float = 0.0
    last_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    cancelled: bool = False

    def take(self, event: Json, since_start_s: float) -> str:
        """The new text of one chunk."""
        for choice in event.get("choices", ()):
            if content := choice["delta"].get("content"):
                self.ttft_s = self.ttft_s or since_start_s
                self.last_s = since_start_s
                self.text += content
                return str(content)
        if usage := event.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_output_tokens = usage["completion_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return ""

    @property
    def tokens_per_s(self) -> float:
        """After the first token; 0 where there was no second."""
        decoding_s = self.last_s - self.ttft_s
        return (self.num_output_tokens - 1) / decoding_s if decoding_s > 0 and self.num_output_tokens > 1 else 0.0

    def line(self) -> str:
        if self.cancelled:
            return f"[cancelled after {self.last_s:.2f} s, TTFT {self.ttft_s:.3f} s; what was said is kept]"
        return (f"[TTFT {self.ttft_s:.3f} s, {self.tokens_per_s:.1f} tok/s, prompt {self.num_prompt_tokens} "
                f"(cached {self.num_cached_tokens}), output {self.num_output_tokens} tokens]")


@dataclass(slots=True)
class Conversation:
    """The history that is sent with each turn, and what the turns cost."""

    api: ApiClient
    model: str
    system: str = ""
    temperature: float = 0.0
    messages: list[Json] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str, write: Callable[[str], object]) -> Turn:
        """Stream the answer into `write`. A turn that fails or is cancelled before any text leaves no trace."""
        turn = Turn()
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*system, *self.messages, question],
                "temperature": self.temperature, "top_p": 0.9, "stream_options": {"include_usage": True}}
        events = self.api.stream("/v1/chat/completions", body)
        began = time.monotonic()
        try:
            for event in events:
                if event is not None:
                    write(turn.take(event, time.monotonic() - began))
        except KeyboardInterrupt:
            turn.cancelled = True
            turn.last_s = time.monotonic() - began
        finally:
            events.close()
        if turn.text:
            self.messages += [question, {"role": "assistant", "content": turn.text}]
        self.turns.append(turn)
        return turn

    def reset(self) -> None:
        self.messages.clear()

    def stats(self) -> str:
        done = [turn for turn in self.turns if not turn.cancelled]
        prompt, cached, output = (sum(getattr(turn, f"num_{kind}_tokens") for turn in done)
                                  for kind in ("prompt", "cached", "output"))
        ttft_s = sum(turn.ttft_s for turn in done) / max(1, len(done))
        return (f"{len(done)} answers, {len(self.turns) - len(done)} cancelled; mean TTFT {ttft_s:.3f} s; "
                f"tokens: prompt {prompt} (cached {cached}), output {output}")

    def save(self, path: Path) -> None:
        kept = {"model": self.model, "system": self.system, "messages": self.messages}
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def chat(url: str, model: str, system: str, temperature: float, api_key: str, state_dir: Path | None) -> None:
    """Talk until /quit or the end of the input. Raises `NotFound` and `Unavailable` before the first prompt only."""
    with ApiClient(gateway_url(url, state_dir), api_key) as api:
        models = api.models()
        if not (model or models):
            raise Unavailable(f"{api.url} lists no model")
        conversation = Conversation(api, model or models[0], system, temperature)
        print(f"{conversation.model} at {api.url}. {_HELP}")
        read = _line_reader()
        while (line := read()) is not None:
            if line.startswith("/"):
                if not command(conversation, line):
                    return
            elif line:
                _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        turn = conversation.ask(line, write)
    except ShoalError as error:
        print(f"\n[{error.message}]")
        return
    print(f"\n{turn.line()}", flush=True)


def command(conversation: Conversation, line: str) -> bool:
    """Do one /command; False means leave."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/system":
            conversation.system = rest.strip()
            print("[system prompt set]" if rest.strip() else "[system prompt removed]")
        case "/reset":
            conversation.reset()
            print("[history cleared]")
        case "/stats":
            print(f"[{conversation.stats()}]")
        case "/save" if rest.strip():
            try:
                conversation.save(Path(rest.strip()).expanduser())
                print(f"[saved to {rest.strip()}]")
            except OSError as error:
                print(f"[cannot save: {error}]")
        case _:
            print(f"[{_HELP}]")
    return True


def _line_reader() -> Callable[[], str | None]:
    """Reads one stripped line; None at the end of the input. Editing and history on a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: line.strip() if (line := sys.stdin.readline()) else None
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    default_cache_dir().mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(default_cache_dir() / "chat_history")))

    def read() -> str | None:
        try:
            return session.prompt("> ").strip()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None

    return read
