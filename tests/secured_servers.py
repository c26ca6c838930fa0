"""Real NATS and Valkey that ask for credentials, on free ports."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nkeys

from stack.ports import free_port
from stack.servers import nats_spec, valkey_spec

_START_TIMEOUT_S = 20.0


class SecuredServer(AbstractContextManager["SecuredServer"]):
    """The embedded server's command line with more arguments."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.port = free_port("127.0.0.1")
        self._log = folder / "server.log"
        self._argv = [*{"nats": nats_spec, "valkey": valkey_spec}[name](self.port, folder).argv, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        self.__exit__(None, None, None)
        raise TimeoutError(self._log.read_text())

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)


def nats_with_jwt(folder: Path) -> tuple[Sequence[str], Path]:
    """Arguments of a NATS server that knows users by an operator's JWT, and the creds file of one user."""
    folder.mkdir(parents=True, exist_ok=True)
    operator, account, system, user = (_key_pair(prefix) for prefix in (
        nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER))
    no_limit = dict.fromkeys(("subs", "data", "payload", "conn", "leaf", "imports", "exports"), -1)
    accounts = ", ".join(f"{_public(each)}: {_jwt(operator, each, 'account', {'limits': no_limit})}"
                        for each in (account, system))
    conf = folder / "nats.conf"
    conf.write_text(f"operator: {_jwt(operator, operator, 'operator', {})}\nresolver: MEMORY\n"
                    f"system_account: {_public(system)}\nresolver_preload: {{ {accounts} }}\n")
    creds = folder / "user.creds"
    user_jwt = _jwt(account, user, "user", {"subs": -1, "data": -1, "payload": -1})
    creds.write_text(f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
                     f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n")
    return ("-c", str(conf)), creds


def _key_pair(prefix: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), prefix))


def _public(pair: Any) -> str:
    return bytes(pair.public_key).decode()


def _jwt(issuer: Any, subject: Any, kind: str, claims: dict[str, Any]) -> str:
    body = {"iat": int(time.time()), "iss": _public(issuer), "name": kind, "sub": _public(subject),
            "nats": {**claims, "type": kind, "version": 2}}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    text = ".".join(_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return f"{text}.{_base64(issuer.sign(text.encode()))}"


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
