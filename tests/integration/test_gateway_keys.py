"""The API key at the door, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http_gateway import http_gateway


@pytest.mark.parametrize("header", [
    [], [("authorization", "Bearer wrong-key")], [("authorization", "Bearer")],
    [("authorization", "bearer right-key")], [("authorization", "right-key")],
    [("authorization", "Bearer right-key"), ("authorization", "Bearer right-key")]])
async def test_every_route_but_the_open_list_wants_the_key(header: list[tuple[str, str]]) -> None:
    async with http_gateway(api_keys="other-key,right-key") as gateway:
        document = await gateway.client.get("/openapi.json", headers={"authorization": "Bearer right-key"})
        paths = [*document.json()["paths"], "/openapi.json", "/nope", "/v1/models/", "//v1/models", "/V1/models",
                 "/v1%2Fmodels", "/health/", "//health", "/HEALTH", "/health/../v1/models", "/docs",
                 "/ready?verbose", "/ready?%76erbose"]
        assert len(paths) > 18
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                answer = await gateway.client.request(method, gateway.url + path, headers=header)
                if path in ("/health", "/live", "/ping", "/ready"):
                    assert answer.status_code in (200, 405), path
                else:
                    assert answer.status_code == 401, (method, path)
                    assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_api_key"


async def test_any_of_the_keys_opens_the_door(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nfrom-file\n")
    async with http_gateway(api_keys="one-key, two-key", api_key_file=str(file)) as gateway:
        for key in ("one-key", "two-key", "from-file"):
            assert (await gateway.chat(headers={"authorization": f"Bearer {key}"})).status_code == 200
