"""Configuration of a service: frozen, flat and loud.

Layers, weakest first: defaults, file (`--config FILE`, YAML), environment (`SHOAL_<FIELD>`, then
`SHOAL_<SERVICE>_<FIELD>`), flags (`--field-name`). A wrong or unknown value stops the start with one line
that names the field, its value, where it came from and the limit.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from common.errors import ConfigError
from common.host_port import without_brackets

_SECRET = re.compile("url|token|keys")  # fields whose values are never shown


class ServiceConfig(BaseSettings):
    """What every service has. Subclasses add their own fields; every field carries a description."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    service: ClassVar[str] = "shoal"
    tls_fields: ClassVar[str] = "tls_cert, tls_key and tls_ca"  # that secure the main port
    serves_grpc: ClassVar[bool] = True

    service_id: str = Field("", description="name of this replica; drawn at random when empty", max_length=64)
    host: str = Field("127.0.0.1", description="address to bind; loopback by default")
    port: int = Field(0, ge=0, le=65535, description="port to bind; 0 takes a free one and registers it")
    advertise_host: str = Field(
        "", description="address other services reach this one at; empty: `host`, or the one towards Redis if all")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0 takes a free one and registers it")
    metrics_host: str = Field("", description="address of the Prometheus port, which speaks plaintext; empty: `host`")
    health_port: int = Field(
        0, ge=0, le=65535, description="a second gRPC port, in plaintext, for health checks alone; 0: none")
    insecure: bool = Field(
        False, description="allow plaintext beyond loopback: own ports, NATS, Redis, calls that carry the token")
    tls_cert: str = Field("", description="PEM file with this service's certificate; its ports then speak TLS")
    tls_key: str = Field("", description="PEM file with the key of tls_cert")
    tls_ca: str = Field("", description="PEM file of the CA that services are known by; calls then use TLS")
    tls_client_auth: bool = Field(False, description="take calls only from holders of a certificate of tls_ca")
    tls_server_name: str = Field(
        "", description="name that certificates of services must carry; empty: the address that is called")
    service_token: str = Field(
        "", description="secret that services show each other with every call; empty: none", repr=False)
    service_token_file: str = Field(
        "", description="file with one such secret a line: the first is sent, each is accepted; # starts a comment")
    nats_url: str = Field(
        "nats://127.0.0.1:4222", repr=False,
        description="NATS server; tls:// for TLS; user:password@, token@ or ?creds=FILE for credentials")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", repr=False,
        description="Redis or Valkey server; rediss:// for TLS; user:password@ for credentials")
    servers_ca: str = Field(
        "", description="PEM file of the CA that NATS and Redis are known by; empty: tls_ca, else the system's")
    connect_timeout_s: float = Field(10.0, gt=0, le=600, description="how long the start waits for NATS and Redis")
    lease_ttl_s: float = Field(6.0, ge=1, le=600, description="registration ends this long after the last heartbeat")
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="how long SIGTERM lets running work finish")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="least level that is logged")
    log_format: str = Field("json", pattern="^(json|console)$", description="json, or console for people")

    @field_validator("host", "advertise_host", "metrics_host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        """An IPv6 address may be written as in a URL."""
        return without_brackets(host)

    def named(self) -> Self:
        """Itself, with a `service_id` drawn at random where it has none."""
        drawn = {"service_id": f"{self.service}-{secrets.token_hex(3)}"}
        return self if self.service_id else self.model_copy(update=drawn)

    @property
    def servers_ca_file(self) -> str:
        """Of NATS and Redis; empty: the system's CAs."""
        return self.servers_ca or self.tls_ca

    @property
    def has_server_tls(self) -> bool:
        """Whether the main port speaks TLS."""
        return bool(self.tls_cert)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_a: Any, **_k: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` merges the layers itself, to know each value's origin

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Self:
        """Merge the layers and validate; `--help` prints every field and exits 0. Raises `ConfigError`."""
        flags, file = _parse_flags(cls, argv)
        layers = {f"file {file}": _read_file(cls, file), **_env_layers(cls, os.environ if environ is None else environ)}
        layers["flag"] = flags
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for name, layer in layers.items():
            values.update(layer)
            origin.update({field: f"{name} --{_kebab(field)}" if name == "flag" else name for field in layer})
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error, origin)) from None

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From arguments of a Python call. Raises `ConfigError` as `load` does."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error, dict.fromkeys(values, "argument"))) from None


def load_or_exit(cls: type[ServiceConfig], argv: Sequence[str]) -> Any:
    """`cls.load`, but a `ConfigError` becomes one line on stderr and exit code 2."""
    try:
        return cls.load(argv)
    except ConfigError as error:
        print(f"{cls.service}: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None


def _kebab(field: str) -> str:
    return field.replace("_", "-")


def _parse_flags(cls: type[ServiceConfig], argv: Sequence[str]) -> tuple[dict[str, str], str | None]:
    parser = argparse.ArgumentParser(prog=f"python -m {cls.service}", description=cls.__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with the same field names")
    for name, field in cls.model_fields.items():
        text = f"{field.description} (default: {field.default!r})".replace("%", "%%")
        # `--insecure` alone is true
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(f"--{_kebab(name)}", dest=name, default=argparse.SUPPRESS, help=text, **bare)
    flags = vars(parser.parse_args(argv))
    return flags, flags.pop("config")


def _read_file(cls: type[ServiceConfig], file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        loaded = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {file}: must be a mapping of field names to values")
    for key in loaded:
        _known(cls, str(key), f"file {file}")
    return loaded


def _env_layers(cls: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    own = f"SHOAL_{cls.service.upper()}_"
    layers: dict[str, dict[str, str]] = {}
    for field in cls.model_fields:
        for variable in (f"SHOAL_{field.upper()}", own + field.upper()):
            if variable in environ:
                layers[f"environment {variable}"] = {field: environ[variable]}
    for variable in environ:
        if variable.startswith(own):
            _known(cls, variable.removeprefix(own).lower(), f"environment {variable}")
    return layers


def _known(cls: type[ServiceConfig], field: str, origin: str) -> None:
    if field not in cls.model_fields:
        near = difflib.get_close_matches(field, cls.model_fields, n=1)
        raise ConfigError(f"unknown field {field!r} (from {origin})" + (f"; did you mean {near[0]!r}?" if near else ""))


def _explain(cls: type[ServiceConfig], error: ValidationError, origin: dict[str, str]) -> str:
    parts = []
    for item in error.errors():
        field = ".".join(str(p) for p in item["loc"]) or cls.service
        shown = "" if _SECRET.search(field) else f"={item['input']!r}"
        parts.append(f"{field}{shown} (from {origin.get(field, 'default')}): {item['msg']}")
    return "; ".join(parts)
