"""The gateway: the OpenAI API over HTTP in front of tokenizers and workers. `pipeline.py` tells one request's life."""
