"""lm-eval: log likelihoods by completions with echo, and texts by completions and chats, of local questions."""

import json
import logging
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "banana"], "answer": 0},
    {"question": "Two and two is", "choices": ["green", "four"], "answer": 1},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOOSE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
READ = {
    "task": "read",
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{question}}",
    "metric_list": [
        {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
    ],
}
WRITE = {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def tasks(folder: Path) -> TaskManager:
    """Tasks over ``QUESTIONS``: to choose an answer, to read one, to write one."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for task in (CHOOSE, READ, WRITE):
        whole = {**COMMON, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def main(url: str, model: str, tokenizer: str) -> None:
    logging.disable(logging.WARNING)
    how = {"model": model, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "num_concurrent": 2}
    with tempfile.TemporaryDirectory() as folder:
        known = tasks(Path(folder))
        for kind, route, names in (
            ("local-completions", "completions", ["choose", "read", "write"]),
            ("local-chat-completions", "chat/completions", ["write"]),
        ):
            found = lm_eval.simple_evaluate(
                model=kind,
                model_args={**how, "max_retries": 1, "base_url": f"{url}/v1/{route}"},
                tasks=names,
                task_manager=known,
                apply_chat_template="chat" in kind,
                bootstrap_iters=0,
            )
            if "choose" in names:
                assert found["results"]["choose"]["acc,none"] == 1
                assert 0 < found["results"]["read"]["bits_per_byte,none"] < 5
            assert all(len(found["samples"][name]) == len(QUESTIONS) for name in names)
            kinds = [task["output_type"] for task in (CHOOSE, READ, WRITE) if task["task"] in names]
            print(f"{kind}: {', '.join(kinds)}")


main(*sys.argv[1:])
