from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.serve.dataset import build, by_conversation, vocabulary
from bench.serve.options import DatasetOptions, ServeOptions, parse_goodput, parse_percentiles
from common.errors import ConfigError


@pytest.mark.parametrize(("field", "options"), [
    ("request_rate", {"request_rate": 0}), ("request_rate", {"request_rate": float("nan")}),
    ("burstiness", {"burstiness": -1}), ("max_concurrency", {"max_concurrency": 0}), ("deadline_s", {"deadline_s": 0}),
    ("endpoint_type", {"endpoint_type": "grpc"}),
    ("request_rate", {"dataset": DatasetOptions("poisson")}),
    ("request_rate", {"dataset": DatasetOptions("interference"), "request_rate": 2.0}),
    ("burstiness", {"dataset": DatasetOptions("poisson"), "request_rate": 2.0, "burstiness": 2.0}),
])
def test_a_wrong_option_is_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "-")) as caught:
        ServeOptions("http://h", "m", **options)
    assert caught.value.param == field


@pytest.mark.parametrize(("field", "options"), [
    ("dataset_name", {"name": "other"}), ("dataset_path", {"name": "custom"}),
    ("dataset_path", {"name": "random", "path": Path("x")}), ("num_prompts", {"num_prompts": 0}),
    ("input_len", {"name": "mixed", "input_len": 5}),
])
def test_a_wrong_dataset_option_is_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetOptions(**options)
    assert caught.value.param == field


def test_goodput_limits_come_in_one_text_or_several() -> None:
    assert parse_goodput(["ttft:500 tpot:30", "e2el:9000"]) == {"ttft": 500.0, "tpot": 30.0, "e2el": 9000.0}
    for bad in ("ttft", "itl:5", "ttft:-1", "ttft:x"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput([bad])


def test_percentiles_are_sorted_and_bounded() -> None:
    assert parse_percentiles("99.9,50,50") == (50.0, 99.9)
    for bad in ("0", "101", "a", ""):
        with pytest.raises(ConfigError, match="metric-percentiles"):
            parse_percentiles(bad)


def test_conversations_are_found_and_single_requests_are_one_each() -> None:
    chats = build(ServeOptions("http://h", "m", DatasetOptions("multi_turn", num_prompts=2, num_turns=3)))
    assert by_conversation(chats) == [[0, 1, 2], [3, 4, 5]]
    alone = build(ServeOptions("http://h", "m", DatasetOptions("random", num_prompts=3, input_len=4)))
    assert by_conversation(alone) == [[0], [1], [2]]


def test_the_rate_sets_arrivals_only_where_the_workload_has_none() -> None:
    even = {"request_rate": 2.0, "burstiness": float("inf")}
    assert [r.arrival for r in build(ServeOptions("http://h", "m", DatasetOptions(num_prompts=2, input_len=4), **even))
            ] == [0.5, 1.0]
    own = DatasetOptions("interference", num_streams=1, num_prompts=2, input_len=9)
    assert [request.arrival for request in build(ServeOptions("http://h", "m", own))] == [0.0, 1.0, 1.5]


def test_the_vocabulary_comes_from_the_flag_then_the_tokenizers_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 777}')
    assert vocabulary(5, str(tmp_path), "m") == 5
    assert vocabulary(0, str(tmp_path), "m") == 777
    assert vocabulary(0, "", "no-such-model") == 151_936
    with pytest.raises(ConfigError, match="tokenizer"):
        vocabulary(0, str(tmp_path / "absent"), "m")


def test_a_workload_without_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request arrives"):
        build(ServeOptions("http://h", "m", DatasetOptions("poisson", duration_s=0.1), request_rate=0.001))
