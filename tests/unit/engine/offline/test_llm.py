"""The Python API over a tiny random model with the small real model's tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidRequest, Unavailable
from shoal import LLM, SamplingParams, StructuredOutputsParams
from tests.factories import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer_from=smollm2)
    with LLM(str(folder), num_blocks=256, max_model_len=256) as made:
        yield made


def test_results_come_in_the_order_of_the_prompts_and_do_not_depend_on_company(llm: LLM) -> None:
    prompts = ["One", {"prompt": "Two two"}, [5, 6, 7], {"prompt_token_ids": [8, 9]}]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [r.prompt for r in together] == ["One", "Two two", None, None]
    assert together[2].prompt_token_ids == [5, 6, 7]
    for prompt, result in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        assert len(result.outputs[0].token_ids) == 12
        assert (result.finished, result.outputs[0].finish_reason) == (True, "length")
        assert result.metrics is not None
        assert result.outputs[0].text == llm.get_tokenizer().decode(
            result.outputs[0].token_ids, skip_special_tokens=True)


def test_choices_of_one_prompt_differ_and_each_is_repeated_by_its_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    first, again = (llm.generate("Count", params, use_tqdm=False)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    whole = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = llm.get_tokenizer().decode(whole.token_ids[4:6], skip_special_tokens=True)
    before = whole.text[: whole.text.index(stop)]
    cut = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop),
                       use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (before, "stop", stop)
    assert len(cut.token_ids) < 12
    assert llm.get_metrics().num_running == llm.get_metrics().num_waiting == 0


def test_logprobs_are_of_the_drawn_tokens_and_of_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    result = llm.generate([5, 6, 7, 8], params, use_tqdm=False)[0]
    choice = result.outputs[0]
    assert choice.logprobs is not None
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry[token_id].rank == 1  # greedy
        assert all(math.isfinite(e.logprob) and e.logprob <= 0 for e in entry.values())
    assert choice.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for t, entry in zip(choice.token_ids, choice.logprobs, strict=True)))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [t in (e or {}) for t, e in zip([6, 7, 8], result.prompt_logprobs[1:], strict=True)] == [True] * 3


def test_a_schema_holds_for_a_random_model(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
              "required": ["ok", "n"], "additionalProperties": False}
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
    for result in llm.generate(["a", "b", "c"], params, use_tqdm=False):
        value = json.loads(result.outputs[0].text)
        assert set(value) == {"ok", "n"}
        assert result.outputs[0].finish_reason == "stop"
    choice = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.generate("?", choice, use_tqdm=False)[0].outputs[0].text in {"yes", "no"}


def test_a_chat_goes_through_the_models_template(llm: LLM) -> None:
    result = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)[0]
    assert result.prompt is not None
    assert "Hello" in result.prompt
    assert result.prompt.endswith("assistant\n")
    assert len(llm.chat([[{"role": "user", "content": t}] for t in "ab"], GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(("prompts", "params", "param"), [
    ([[5, 6], []], GREEDY, "prompt"), ([[5], [10**6]], GREEDY, "prompt"), ([{"text": "x"}], GREEDY, "prompts"),
    ([{"prompt_token_ids": [5, "6"]}], GREEDY, "prompts"),
    (["a", "b"], [GREEDY], "sampling_params"),
    (["a"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "grammar"),
    (["a"], SamplingParams(structured_outputs=StructuredOutputsParams()), "structured_outputs"),
    (["a"], SamplingParams(temperature=float("nan")), "temperature"),
])
def test_a_refused_prompt_names_its_field_and_leaves_nothing_running(
    llm: LLM, prompts: list[object], params: SamplingParams, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert len(llm.generate("fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_an_unknown_option_and_a_closed_model_say_so(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_lenn"):
        LLM(str(tiny_llama(tmp_path / "m")), max_model_lenn=3)
    other = LLM(str(llm._tokenizer.folder), num_blocks=16, max_model_len=64)
    other.close()
    with pytest.raises(Unavailable, match="closed"):
        other.generate("x", GREEDY, use_tqdm=False)


def test_a_choice_that_its_stop_string_ended_does_not_run_on_when_the_last_one_ends_by_itself(llm: LLM) -> None:
    def asked(**fields: object) -> SamplingParams:
        return SamplingParams(n=2, temperature=1.0, seed=7, ignore_eos=True, **fields)  # type: ignore[arg-type]

    ids = [choice.token_ids for choice in llm.generate("Once", asked(max_tokens=60), use_tqdm=False)[0].outputs]
    cut, other = ids
    stop = llm.get_tokenizer().decode(cut[4:6], skip_special_tokens=True)
    end = next(token_id for token_id in other[15:] if token_id not in {*other[:15], *cut})
    result = llm.generate("Once", asked(max_tokens=200, stop=stop, stop_token_ids=[end]), use_tqdm=False)[0]
    assert [(o.finish_reason, o.stop_reason) for o in result.outputs] == [("stop", stop), ("stop", end)]
    assert len(result.outputs[0].token_ids) < len(result.outputs[1].token_ids)
    assert llm.get_metrics().num_running == llm.get_metrics().num_waiting == 0
