"""Tokenizer replicas that are full or away, and those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.clients.tokenizer import TokenizerClient
from common.errors import ModelNotFound, Overloaded, Unavailable
from common.service_record import ServiceRecord
from tests.integration.tokenizer_fleet import TEXT, Fleet
from tests.unit.common.text import folders
from tokenizer_svc.detokenizer import Opening, Session


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folders.write_folder(tmp_path))
    await fleet.directory.start()
    yield fleet
    await fleet.client.stop()
    await fleet.directory.stop()
    for service in fleet.services:
        await service.stop()


async def test_texts_beyond_the_bound_hold_up_no_other_call_and_end_as_overloaded(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start_replica(max_text_streams=1)
    client = TokenizerClient(fleet.directory, call_timeout_s=1, text_timeout_s=2)
    first = client.open_text("m")
    await first.push([70])
    failed: list[object] = []
    mark = client._replicas.mark_failed
    monkeypatch.setattr(client._replicas, "mark_failed", lambda replica: (failed.append(replica), mark(replica)))
    num_refused, open_text = 0, Session._open

    def count(session: Session, stream_id: int, opening: Opening) -> None:
        nonlocal num_refused
        num_refused += 1
        open_text(session, stream_id, opening)

    monkeypatch.setattr("tokenizer_svc.detokenizer.Session._open", count)
    beyond = [asyncio.create_task(client.open_text("m").push([70])) for _ in range(3)]
    while not all(task.done() for task in beyond):
        assert (await client.tokenize_text("m", "x")).token_ids
        assert (await first.push([71])).text
        await asyncio.sleep(0.01)
    for task in beyond:
        with pytest.raises(Overloaded, match="texts are open already"):
            await task
    assert not failed
    assert 3 * 2 <= num_refused <= 3 * 6
    await client.stop()


async def test_a_text_that_finds_only_full_replicas_goes_on_when_one_has_room(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.start_replica(max_text_streams=1)
    first, second, third = (fleet.client.open_text("m") for _ in range(3))
    await first.push([70])
    await second.push([70])
    waiting = asyncio.create_task(third.push([70, 71]))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    second.close()
    assert (await waiting).num_tokens == 2


async def test_a_full_replica_is_left_for_one_with_room_and_a_dead_one_beside_it_is_no_end(fleet: Fleet) -> None:
    await fleet.registry.register(ServiceRecord("tokenizer", "aaa", "1", "127.0.0.1:1", models=("m",)), ttl_s=5)
    await fleet.start_replica(max_text_streams=1)
    first, second = fleet.client.open_text("m"), fleet.client.open_text("m")
    await first.push([70])
    waiting = asyncio.create_task(second.push([70]))
    await asyncio.sleep(0.3)
    first.close()
    assert (await waiting).num_tokens == 1


async def test_a_model_whose_only_tokenizer_restarts_is_waited_for_while_another_models_is_listed(
    fleet: Fleet
) -> None:
    first = await fleet.start_replica()
    await fleet.start_replica(models=f"other={fleet.folder}")
    ids = await fleet.ids()
    stream = fleet.client.open_text("m")
    text = (await stream.push(ids[:10])).text
    await first.stop()
    async with asyncio.timeout(5):
        while len(fleet.directory.all("tokenizer")) > 1:
            await asyncio.sleep(0.01)
    client = TokenizerClient(fleet.directory, call_timeout_s=0.2)  # it has never called for the model
    with pytest.raises(Unavailable):
        await client.tokenize_text("m", "x")
    with pytest.raises(ModelNotFound):
        await client.tokenize_text("never", "x")
    going_on, calling = asyncio.create_task(stream.push(ids[10:])), asyncio.create_task(fleet.ids())
    await asyncio.sleep(0.2)
    await fleet.start_replica()
    assert text + (await going_on).text + (await stream.finish()).text == TEXT
    assert await calling == ids
    await client.stop()
