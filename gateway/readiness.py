"""Whether this gateway can take a request now, and what it depends on."""

from __future__ import annotations

from typing import Any

from common.directory import Directory
from common.generation import DecodePort
from gateway.admission import Admission


def readiness(directory: Directory, decode: DecodePort, admission: Admission) -> tuple[bool, dict[str, Any]]:
    """Ready when some model has a tokenizer and a decode worker, and no drain has begun.

    A registry that does not answer is reported, and does not make the gateway unready: the last known truth serves.
    """
    models = {
        facts.name: {"num_tokenizers": len(directory.records("tokenizer", facts.name)),
                     "num_decode_workers": len(decode.workers(facts.name))}
        for facts in decode.models()
    }
    served = any(all(counts.values()) for counts in models.values())
    ready = served and not admission.draining
    return ready, {
        "status": "ready" if ready else "draining" if admission.draining else "not_ready", "models": models,
        "registry_reachable": directory.reachable, "num_requests": admission.num_running}
