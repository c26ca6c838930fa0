from __future__ import annotations

from collections.abc import AsyncIterator

from decode_svc.service import _read_commands
from decode_svc.worker import DecodeWorker
from proto import decode_pb2


async def test_a_stream_of_commands_that_breaks_in_whatever_way_closes_its_session() -> None:
    async def broken() -> AsyncIterator[decode_pb2.GenerateCommand]:
        yield decode_pb2.GenerateCommand()
        raise ValueError("not a command")

    session = DecodeWorker("m", lambda _: None, lambda _: None).open_session()
    await _read_commands(broken(), session)
    assert session.closed
