"""Typed clients of our services: dataclasses in, dataclasses out; the only callers of generated stubs."""
