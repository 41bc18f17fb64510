"""benchmarks/dataset.py: text to JSONL shards, and all of it once, small."""

import json
from pathlib import Path

import pytest

from benchmarks import dataset


def test_shards_hold_every_text_once_a_round_until_there_is_enough(tmp_path):
    root = tmp_path / "root"
    (root / "b").mkdir(parents=True)
    wanted = {"a.py": "x = 1\n" * 50, "b/c.md": "words " * 40, "d.txt": "täxt\u2028 " * 60}
    for name, text in wanted.items() | {("short.py", "x"), ("binary.bin", "y" * 300)}:
        (root / name).write_text(text)
    (root / "latin1.py").write_bytes(b"\xe4" * 300)
    assert sorted(dataset.texts([root])) == sorted(wanted.values())

    about = dataset.write_shards(tmp_path / "out", [root], 5000)
    shards = sorted((tmp_path / "out" / "train").iterdir())
    assert [shard.name for shard in shards] == ["00.jsonl", "01.jsonl", "02.jsonl", "03.jsonl"]
    assert about["bytes"] == sum(shard.stat().st_size for shard in shards) >= 5000
    found = [json.loads(line)["text"] for shard in shards for line in shard.read_bytes().splitlines()]
    assert about["documents"] == len(found) and about["rounds"] == -(-len(found) // 3)
    assert all(found.count(text) >= about["rounds"] - 1 for text in wanted.values())


def test_a_folder_without_text_is_said(tmp_path):
    with pytest.raises(ValueError, match="no text of these kinds"):
        dataset.write_shards(tmp_path / "out", [tmp_path], 10)


@pytest.mark.slow
def test_all_of_it_at_two_megabytes(tmp_path):
    results = tmp_path / "results.jsonl"
    dataset.main(
        [
            str(tmp_path),
            "--bytes",
            "2e6",
            "--vocab-size",
            "600",
            "--steps",
            "3",
            "--results",
            str(results),
            "--commit",
            "none",
        ]
    )
    [entry] = map(json.loads, results.read_text().splitlines())
    assert entry["kind"] == "dataset" and sum(entry["blend_samples"]) == 3 * 16
    assert all(abs(drawn - 48 * weight / 10) <= 1 for drawn, weight in zip(entry["blend_samples"], (4, 3, 2, 1)))
    assert entry["documents_compared"] == entry["documents"] and entry["workers"]["1"]["mb_per_second"] > 0
    assert not Path(tmp_path / "dataset-benchmark").exists()
