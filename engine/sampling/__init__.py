"""Logits to tokens, for all rows of a step at once. Torch-free.

A row's token is a pure function of its logits, its sequence's parameters and tokens, its mask and its output position:
never of its batch mates. The order of the changes is vLLM V1's (`vllm/v1/sample/sampler.py`):

1. log-probabilities are taken from the model's own logits;
2. tokens are ruled out: allowed_token_ids, grammar, bad_words, min_tokens;
3. logit_bias is added;
4. repetition, frequency and presence penalties;
5. temperature; min_p, then top_k, then top_p over what is left; the draw.

Where step 2 leaves nothing, the grammar alone holds, or without one allowed_token_ids alone.
"""
