"""Text and token ids: tokenizer loading, chat templates, incremental detokenizing. Wire-free, torch-free."""
