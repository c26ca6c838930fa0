"""lm-eval: two small tasks through the API and with transformers in this process; prints all scores as JSON.

Called with the base URL (with /v1), the model and the model's folder. `choice` asks for the likelihoods of given
continuations, `text` for generated text that must be exactly the target.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

CHOICE = [
    {"ask": "The capital of France is", "choices": [" Paris", " Rome", " London"], "answer": 0},
    {"ask": "The opposite of hot is", "choices": [" warm", " cold", " red"], "answer": 1},
    {"ask": "One, two, three, four,", "choices": [" five", " nine", " two hundred"], "answer": 0},
    {"ask": "A dog is an", "choices": [" number", " animal", " idea of the mind"], "answer": 1},
    {"ask": "Water freezes at zero degrees", "choices": [" Fahrenheit", " Celsius", " north"], "answer": 1},
    {"ask": "Grass is usually", "choices": [" purple", " made of glass", " green"], "answer": 2},
    {"ask": "My favourite colour is", "choices": [" blue", " vermilion", " red"], "answer": 1},
]
TEXT = [
    {"ask": "What is the capital of France?", "answer": "The capital of France is Paris."},
    {"ask": "What is 2 + 2?", "answer": "2 + 2 = 4."},
    {"ask": "Say hello.", "answer": "Hello"},
]


def task(folder: Path, name: str, docs: list[dict[str, Any]], **more: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "doc_to_text": "{{ask}}", **more}))


def write_tasks(folder: Path) -> None:
    task(folder, "choice", CHOICE, output_type="multiple_choice", doc_to_choice="choices", doc_to_target="answer",
         target_delimiter="", metric_list=[{"metric": "acc"}])
    task(folder, "text", TEXT, output_type="generate_until", doc_to_target="{{answer}}",
         generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
         metric_list=[{"metric": "exact_match"}])


def scores(folder: Path, name: str, model: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The task's metrics and each sample's answers of the model."""
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[name], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), **more)
    metrics = {key: value for key, value in found["results"][name].items()
               if key.split(",")[0] in ("acc", "exact_match")}
    return {"metrics": metrics, "answers": [sample["filtered_resps"] for sample in found["samples"][name]]}


def main(url: str, model: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder)
        own = {"pretrained": tokenizer, "dtype": "float32"}
        remote = {"model": model, "base_url": f"{url}/completions", "tokenizer_backend": "remote", "num_concurrent": 1,
                  "max_retries": 1}
        completions = {**remote, "tokenizer_backend": "huggingface", "tokenizer": tokenizer}
        chat = {"model": model, "base_url": f"{url}/chat/completions", "num_concurrent": 1, "max_retries": 1}
        found = {
            "choice": {
                "transformers": scores(folder, "choice", "hf", own, device="cpu"),
                "completions": scores(folder, "choice", "local-completions", completions, batch_size=2),
                "remote tokenizer": scores(folder, "choice", "local-completions", remote)},
            "text": {
                "transformers": scores(folder, "text", "hf", own, device="cpu", apply_chat_template=True),
                "chat": scores(folder, "text", "local-chat-completions", chat, apply_chat_template=True)}}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
