"""Small files in the published layouts of the data sets that workloads are made from."""

import csv
import json
from pathlib import Path


def mmlu_folder(folder: Path, questions: int = 12) -> Path:
    """Two subjects of five dev questions and as many test questions; the answers are A, B, C, D, A, …"""
    for split, count in (("dev", 5), ("test", questions)):
        (folder / split).mkdir(parents=True)
        for subject in ("law", "virology"):
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as handle:
                csv.writer(handle).writerows(
                    [f"{subject} {split} {i}" + " and so on" * (i % 4), "one", "two", "three", "four", "ABCD"[i % 4]]
                    for i in range(count)
                )
    return folder


def mooncake_file(path: Path, requests: int = 8) -> Path:
    """Requests every 100 ms of three blocks of 512 tokens, of which all share the first and pairs the second."""
    lines = [
        {"timestamp": 100 * i, "input_length": 1200, "output_length": 4, "hash_ids": [0, 1 + i // 2, 100 + i]}
        for i in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def azure_file(path: Path, requests: int = 8) -> Path:
    """Requests every 100 ms."""
    rows = [f"2023-11-16 18:17:0{i // 10}.{i % 10}000000,{200 + i},4\n" for i in range(requests)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    return path
