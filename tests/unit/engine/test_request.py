import pytest

from common.errors import FingerprintMismatch
from engine.outputs import FinishReason
from engine.request import Request
from tests.unit.engine.builders import ask, prompt, scheme


def test_hashes_of_the_tokenizer_are_accepted_when_equal() -> None:
    tokens = prompt(40)
    hashes = scheme().chain(scheme().root("a", "s"), tokens)
    request = Request(ask("r", tokens, block_hashes=hashes, adapter="a", cache_salt="s"), scheme())
    assert request.block_hashes == hashes
    assert len(hashes) == 2


def test_a_hash_mismatch_is_refused_and_names_both_values() -> None:
    tokens = prompt(40)
    ours = scheme().chain(scheme().root(), tokens)
    with pytest.raises(FingerprintMismatch) as caught:
        Request(ask("r", tokens, block_hashes=[ours[0], bytes(16)]), scheme())
    assert bytes(16).hex() in caught.value.message
    assert ours[1].hex() in caught.value.message
    with pytest.raises(FingerprintMismatch, match="1 sent, but the prompt has 2"):
        Request(ask("r", tokens, block_hashes=ours[:1]), scheme())


def test_hashes_grow_over_output_as_one_chain_with_the_prompt() -> None:
    tokens = prompt(20)
    request = Request(ask("r", tokens[:10]), scheme(4))
    request.token_ids.extend(tokens[10:])
    request.grow_hashes(scheme(4), 5)
    assert request.block_hashes == scheme(4).chain(request.root, tokens)


def test_a_chain_that_starts_in_output_starts_at_the_root() -> None:
    tokens = prompt(8)
    request = Request(ask("r", tokens[:2]), scheme(4))
    request.token_ids.extend(tokens[2:])
    request.grow_hashes(scheme(4), 2)
    assert request.block_hashes == scheme(4).chain(request.root, tokens)


def test_an_output_carries_the_counts_of_its_moment() -> None:
    request = Request(ask("r", [5, 6, 7]), scheme())
    request.append(9)
    output = request.output((9,), FinishReason.LENGTH)
    assert (output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens) == (3, 1, 0)
    assert request.num_pending_tokens == 4


def test_hashes_of_the_tokenizer_cover_the_prompt_of_a_resumed_request_and_its_own_go_on() -> None:
    tokens = prompt(40)
    hashes = scheme().chain(scheme().root(), tokens)
    request = Request(ask("r", tokens[:20], output_token_ids=tokens[20:], block_hashes=hashes[:1]), scheme())
    assert request.block_hashes == hashes
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_pending_tokens) == (20, 20, 40)


def test_progress_stays_as_tokens_are_drawn() -> None:
    request = Request(ask("r", [5, 6, 7]), scheme())
    request.set_computed(3)
    request.append(9)
    assert (request.num_computed_tokens, request.num_pending_tokens, request.num_tokens) == (3, 1, 4)
