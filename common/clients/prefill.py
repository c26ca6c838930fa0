"""Prefill workers as a decode worker calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import grpc.aio

from common import rpc
from common.clients.channels import ChannelPool
from common.clients.fingerprint import fingerprint_to_proto
from common.errors import ShoalError
from common.hand_off import Done, Grant, Landed, PrefillEvent, PrefillOrder, Progress, Ticket
from common.service_record import Fingerprint
from proto import prefill_pb2, prefill_pb2_grpc

GRANT_TIMEOUT_S = 2.0
ABORT_TIMEOUT_S = 1.0


class PrefillClient:
    """`common.hand_off.PrefillPort` over gRPC."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def grant(
        self, address: str, transfer_id: str, *, model: str, num_prompt_tokens: int, fingerprint: Fingerprint
    ) -> Grant:
        answer = await self._stub(address).Grant(prefill_pb2.GrantRequest(
            transfer_id=transfer_id, model=model, num_prompt_tokens=num_prompt_tokens,
            fingerprint=fingerprint_to_proto(fingerprint)), timeout=GRANT_TIMEOUT_S)
        return Grant(
            granted=answer.granted, lease_s=answer.lease_s, queued_requests=answer.queued_requests,
            queued_tokens=answer.queued_tokens, incarnation=answer.incarnation,
            refusal=rpc.error_from_proto(answer.refusal) if answer.HasField("refusal") else None)

    async def prefill(self, address: str, order: PrefillOrder) -> AsyncIterator[PrefillEvent]:
        call = self._stub(address).Prefill(order_to_proto(order), timeout=order.timeout_s or None)
        try:
            async for message in call:
                yield _event_from(message)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            call.cancel()

    async def abort(self, address: str, transfer_id: str, epoch: int) -> None:
        request = prefill_pb2.AbortTransferRequest(transfer_id=transfer_id, epoch=epoch, reason="receiver gave up")
        with suppress(ShoalError):  # a sender that is gone writes nothing; its landing area is forgotten here anyway
            await self._stub(address).AbortTransfer(request, timeout=ABORT_TIMEOUT_S)

    def _stub(self, address: str) -> prefill_pb2_grpc.PrefillStub:
        return prefill_pb2_grpc.PrefillStub(self._channels.get(address))


def order_to_proto(order: PrefillOrder) -> prefill_pb2.PrefillRequest:
    ticket = order.ticket
    return prefill_pb2.PrefillRequest(
        transfer_id=order.transfer_id, epoch=order.epoch, model=order.model, prompt_token_ids=order.token_ids,
        block_hashes=b"".join(order.block_hashes), send_from=order.send_from, timeout_s=order.timeout_s,
        adapter=order.adapter, cache_salt=order.cache_salt,
        ticket=prefill_pb2.TransferTicket(
            transport=ticket.transport, receiver_worker_id=ticket.receiver_worker_id,
            receiver_incarnation=ticket.receiver_incarnation, address=ticket.address, segment=ticket.segment,
            block_bytes=ticket.block_bytes, num_blocks=ticket.num_blocks))


def order_from_proto(message: prefill_pb2.PrefillRequest, hashes: tuple[bytes, ...]) -> PrefillOrder:
    ticket = message.ticket
    return PrefillOrder(
        transfer_id=message.transfer_id, epoch=message.epoch, model=message.model,
        token_ids=tuple(message.prompt_token_ids), block_hashes=hashes, send_from=message.send_from,
        timeout_s=message.timeout_s, adapter=message.adapter, cache_salt=message.cache_salt,
        ticket=Ticket(
            transport=ticket.transport, receiver_worker_id=ticket.receiver_worker_id,
            receiver_incarnation=ticket.receiver_incarnation, address=ticket.address, segment=ticket.segment,
            block_bytes=ticket.block_bytes, num_blocks=ticket.num_blocks))


def event_to_proto(transfer_id: str, epoch: int, event: PrefillEvent) -> prefill_pb2.PrefillEvent:
    message = prefill_pb2.PrefillEvent(transfer_id=transfer_id, epoch=epoch)
    if isinstance(event, Landed):
        message.landed.CopyFrom(prefill_pb2.ChunkLanded(
            first_block=event.first_block, num_blocks=event.num_blocks, num_valid=event.num_valid,
            num_tokens_computed=event.num_tokens_computed))
    elif isinstance(event, Progress):
        message.progress.CopyFrom(prefill_pb2.PrefillProgress(num_tokens_computed=event.num_tokens_computed))
    else:
        message.done.CopyFrom(prefill_pb2.PrefillDone(
            num_tokens_computed=event.num_tokens_computed, num_tokens_cached=event.num_cached_tokens,
            bytes_sent=event.bytes_sent, queue_s=event.queue_s))
    return message


def _event_from(message: prefill_pb2.PrefillEvent) -> PrefillEvent:
    kind = message.WhichOneof("event")
    if kind == "landed":
        landed = message.landed
        return Landed(landed.first_block, landed.num_blocks, landed.num_valid, landed.num_tokens_computed)
    if kind == "done":
        done = message.done
        return Done(done.num_tokens_computed, done.num_tokens_cached, done.bytes_sent, done.queue_s)
    if kind == "failed":
        raise rpc.error_from_proto(message.failed)
    return Progress(message.progress.num_tokens_computed)
