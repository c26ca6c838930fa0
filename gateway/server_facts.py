"""What this gateway tells of itself, its load, its models and their tokenizers: to autoscalers, routers and clients.

Counts of workers are as they last reported. Models that a caller's key is not for are left out, and nothing names an
address, a key or a tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from common.directory import Directory
from common.generation import DecodePort, ModelFacts, WorkerView
from common.service_record import ServiceRecord
from common.tokenized import TokenizerPort
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.readiness import readiness
from gateway.tenants.tenant import Caller

_SERVICES: Final = ("gateway", "tokenizer", "router", "prefill", "decode", "kvstore")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Each method is one endpoint's body. Field names of vLLM and SGLang where they have one."""

    tokenizer: TokenizerPort
    decode: DecodePort
    directory: Directory
    admission: Admission
    config: GatewayConfig
    version: str

    def load(self, caller: Caller) -> dict[str, Any]:
        """`server_load`: requests in work at this gateway."""
        return {
            "server_load": self.admission.num_running, "max_concurrent_requests": self.config.max_concurrent_requests,
            "draining": self.admission.draining,
            "models": {m.name: [_load(w) for w in self.decode.workers(m.name)]
                       for m in self.decode.models() if caller.may_use(m.name)}}

    def server(self, caller: Caller) -> dict[str, Any]:
        """Version, limits and every registered service with its state."""
        config = self.config
        _, report = readiness(self.directory, self.decode, self.admission)
        return {
            "version": self.version, "status": report["status"],
            "models": [m for m in report["models"] if caller.may_use(m)],
            "registry_reachable": report["registry_reachable"],
            "limits": {
                "max_concurrent_requests": config.max_concurrent_requests, "max_body_bytes": config.max_body_bytes,
                "request_timeout_s": config.request_timeout_s, "default_max_tokens": config.default_max_tokens},
            "services": [
                _service(r, caller) for service in _SERVICES for r in self.directory.all(service)]}

    async def model(self, facts: ModelFacts) -> dict[str, Any]:
        """Facts of weights and KV are null while no worker is there. Raises `Unavailable` without a tokenizer."""
        text = await self.tokenizer.describe(facts.name)
        workers = self.decode.workers(facts.name)
        made = workers[0].fingerprint if workers else None  # all workers of one model agree
        return {
            "model_path": facts.name, "tokenizer_path": facts.name, "is_generation": True,
            "has_image_understanding": False, "has_audio_understanding": False,
            "max_model_len": facts.max_model_len, "vocab_size": text.vocab_size,
            "bos_token_id": text.bos_token_id, "eos_token_ids": text.eos_token_ids,
            "revision": made.revision if made else None, "dtype": made.dtype if made else None,
            "block_size": made.block_size if made else None, "num_workers": len(workers)}

    async def tokenizer_of(self, facts: ModelFacts) -> dict[str, Any]:
        """What a client needs to prepare prompts as the server does. Raises `Unavailable` without a tokenizer."""
        text = await self.tokenizer.describe(facts.name)
        eos_id = text.eos_token_ids[0] if text.eos_token_ids else None
        return {
            "model": facts.name, "max_model_len": facts.max_model_len, "vocab_size": text.vocab_size,
            "bos_token": await self._token(facts.name, text.bos_token_id), "bos_token_id": text.bos_token_id,
            "eos_token": await self._token(facts.name, eos_id), "eos_token_id": eos_id,
            "eos_token_ids": text.eos_token_ids, "chat_template": text.chat_template or None}

    async def _token(self, model: str, token_id: int | None) -> str | None:
        return None if token_id is None else await self.tokenizer.decode(model, [token_id])


def _load(worker: WorkerView) -> dict[str, Any]:
    return {"worker_id": worker.worker_id, "num_running": worker.num_running, "num_waiting": worker.num_waiting,
            "max_num_seqs": worker.max_num_seqs, "num_blocks": worker.num_blocks,
            "num_free_blocks": worker.num_free_blocks}


def _service(record: ServiceRecord, caller: Caller) -> dict[str, Any]:
    return {"service": record.service, "service_id": record.service_id, "role": record.role or None,
            "state": record.state, "version": record.version, "models": [m for m in record.models if caller.may_use(m)],
            "started_at_unix_s": record.started_at_unix_s}
