from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.trace_file import TRACE_BLOCK, read_custom, read_timed
from common.errors import ConfigError


def test_records_that_share_hash_ids_share_a_prefix_of_as_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 4000, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 4500, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 11]}\n'
        '{"timestamp": 6000, "input_length": 600, "output_length": 5}\n')
    first, second, third = read_timed(path, None, 49_152, seed=0)
    assert [r.arrival for r in (first, second, third)] == [0.0, 0.5, 2.0]
    assert [r.output_len for r in (first, second, third)] == [3, 4, 5]
    assert [len(r.prompt) for r in (first, second, third)] == [1100, 1100, 600]
    assert first.prompt[: 2 * TRACE_BLOCK] == second.prompt[: 2 * TRACE_BLOCK]
    assert first.prompt[2 * TRACE_BLOCK:] != second.prompt[2 * TRACE_BLOCK:]
    assert all(256 <= token < 49_152 for token in third.prompt)
    assert len(read_timed(path, 2, 49_152, seed=0)) == 2


def test_custom_prompts_take_their_own_output_length_before_the_common_one(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 5}\n\n{"prompt": [300, 301]}\n')
    requests = read_custom(path, None, 9)
    assert [(request.prompt, request.output_len) for request in requests] == [("a", 5), ([300, 301], 9)]


@pytest.mark.parametrize(("text", "needle"), [
    ("", "no requests"),
    ('{"prompt": "a"}\n', "line 1"),
    ('{"prompt": "a", "output_tokens": 1}\n{"prompt": 5}\n', "line 2"),
    ('{"prompt": "", "output_tokens": 1}\n', "line 1"),
])
def test_a_bad_custom_line_is_named(tmp_path: Path, text: str, needle: str) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        read_custom(path, None, None)


@pytest.mark.parametrize(("text", "needle"), [
    ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1"),
    ('{"timestamp": 9, "input_length": 1, "output_length": 1}\n{"timestamp": 1, "input_length": 1, "output_length": 1}',
     "line 2.*goes back"),
])
def test_a_bad_trace_line_is_named(tmp_path: Path, text: str, needle: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        read_timed(path, None, 1000, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        read_custom(tmp_path / "absent.jsonl", None, 1)
