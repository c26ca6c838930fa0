"""The engine in a process of its own: no asyncio, no gRPC, one message per turn each way."""
