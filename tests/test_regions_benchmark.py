"""The comparison of the ways to divide the indices runs, and says what it says it does."""

import json

import pytest

from benchmarks.training import regions


@pytest.mark.slow
def test_hashed_regions_lose_nothing_where_each_worker_has_its_own(tmp_path, capsys):
    kept = tmp_path / "rows.json"
    small = ["--workers", "4", "--steps", "4", "--size", "800", "--selected", "80"]
    assert regions.main([*small, "--inputs", "own region", "--json", str(kept)]) == 0
    rows = {row["regions"]: row for row in json.loads(kept.read_text())["rows"]}
    assert rows["hashed"]["missing"] < 0.1 < rows["balanced"]["missing"]
    assert len(capsys.readouterr().out.splitlines()) == 3
