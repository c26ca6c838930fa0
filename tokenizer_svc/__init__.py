"""The tokenizer service: text to token ids with block hashes, and back, incrementally."""
