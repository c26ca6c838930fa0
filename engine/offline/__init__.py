"""The engine without services: prompts in, texts out, in this process. Field names are vLLM's."""
