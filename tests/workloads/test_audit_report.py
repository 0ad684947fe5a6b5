import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from llmexp.errors import ConfigError
from llmexp.schema.workloads import SharedPrefix, UniquePrefix
from llmexp.workloads.audit import audit, lru_hit_rate, pressure
from llmexp.workloads.audit_report import JSON, PLOT, report
from llmexp.workloads.build import build
from tests.workloads.conftest import from_prompts, make_model


def test_table_json_and_plot(tmp_path: Path) -> None:
    workload = build(SharedPrefix(num_prefixes=3, num_requests=30), make_model())
    text = io.StringIO()
    report(workload, [16, 128], [2048, 65536], tmp_path / "new", concurrency=4, console=Console(file=text, width=100))
    content = json.loads((tmp_path / "new" / JSON).read_text())
    assert [each["reusable_tokens"] for each in content["audits"]] == [27 * 512, 27 * 512]
    assert content["sha256"] == workload.sha256
    assert [(each["capacity_tokens"], each["block_size"]) for each in content["caches"]] == [
        (2048, 16), (2048, 128), (65536, 16), (65536, 128),
    ]  # fmt: skip
    for each in content["caches"]:
        blocks = each["capacity_tokens"] // each["block_size"]
        assert each["lru_hit_rate"] == pytest.approx(lru_hit_rate(workload, each["block_size"], blocks))
        assert each["pressure"]["peak_blocks"] == pressure(workload, each["block_size"], blocks, 4).peak_blocks
    shown = text.getvalue()
    assert "13,824" in shown
    assert max(map(len, shown.split("Written")[0].splitlines())) <= 100
    assert (tmp_path / "new" / PLOT).read_bytes().startswith(b"\x89PNG")


def test_four_block_sizes_fit_the_width(tmp_path: Path) -> None:
    text = io.StringIO()
    report(build(SharedPrefix(), make_model()), [16, 32, 64, 128], [], tmp_path, console=Console(file=text, width=100))
    assert "…" not in text.getvalue()


def test_without_reuse_and_with_prompts_below_a_block(tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO(), width=100)
    content = report(build(UniquePrefix(), make_model()), [16], [], tmp_path, console=quiet)
    assert {each["lru_hit_rate"] for each in content["caches"]} == {0.0}
    short = from_prompts([[1, 2], [3]])
    assert report(short, [16], [], tmp_path, console=quiet)["audits"][0]["blocks"] == 0


def test_capacity_below_one_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KV capacity of 100 tokens is below one block of 128"):
        report(build(SharedPrefix(), make_model()), [16, 128], [100], tmp_path)


@pytest.mark.parametrize("num_requests", [1, 30, 3000])
def test_default_capacities_go_by_powers_of_2_from_one_request_to_all_of_them(
    num_requests: int, tmp_path: Path
) -> None:
    workload = build(SharedPrefix(num_prefixes=3, num_requests=num_requests), make_model(vocab_size=20_000))
    text = io.StringIO()
    content = report(workload, [16], [], tmp_path, kv_bytes_per_token=1024, console=Console(file=text, width=100))
    account, capacities = audit(workload, 16), [each["capacity_tokens"] for each in content["caches"]]
    assert 1 <= len(capacities) <= 6
    assert all(math.log2(capacity).is_integer() for capacity in capacities)
    assert capacities[0] >= 552
    assert capacities[-1] >= account.blocks_to_hold * 16
    assert content["caches"][-1]["lru_hit_rate"] == pytest.approx(account.ideal_hit_rate)
    assert [each["capacity_bytes"] for each in content["caches"]] == [1024 * capacity for capacity in capacities]
    assert "GiB" in text.getvalue()
