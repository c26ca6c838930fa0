"""Hosts and ports as one text. An IPv6 address has brackets before a port and nowhere else."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """`host:port`, `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """`::1` for `[::1]`; any other text as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_of(address: str) -> str:
    """The host of `host:port` or `[host]:port`; an address without a port is all host."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] or address
