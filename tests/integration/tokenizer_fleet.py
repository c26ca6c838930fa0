"""Tokenizer replicas in this process: real gRPC on free ports, one in-memory registry, one client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.bus import MemoryBus
from common.clients.tokenizer import TokenizerClient
from common.directory import Directory
from common.registry import MemoryRegistry
from common.service_host import Deps
from common.tokenized import TextStream
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.service import TokenizerService, build

TEXT = "the quick 🙂 fox 日本 👨‍👩‍👧 jumps over 🇩🇪 the lazy dog é " * 3


class Fleet:
    """Replicas in this process and one client of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.registry = folder, MemoryRegistry()
        self.directory = Directory(self.registry, poll_s=0.05, grace_s=0.3)
        self.services: list[TokenizerService] = []
        self.client = TokenizerClient(self.directory, call_timeout_s=5, attempt_timeout_s=1, text_timeout_s=5)

    async def start_replica(self, models: str = "", **changes: Any) -> TokenizerService:
        config = TokenizerConfig(models=models or f"m={self.folder}", drain_timeout_s=1, **changes)
        service = build(config, Deps(MemoryBus(), self.registry))
        await service.start()
        self.services.append(service)
        await self.directory.refresh()
        return service

    async def kill(self, service: TokenizerService) -> None:
        """As SIGKILL: calls break, and the record stays for a while."""
        await service._host.server.stop(grace=None)

    async def ids(self, text: str = TEXT) -> tuple[int, ...]:
        return (await self.client.tokenize_text("m", text, add_special_tokens=False)).token_ids

    def num_streams(self, service: TokenizerService) -> int:
        assert service._detokenizer is not None
        return service._detokenizer.num_streams


async def one_by_one(stream: TextStream, ids: tuple[int, ...]) -> str:
    return "".join([(await stream.push([i])).text for i in ids])
