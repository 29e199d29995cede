# SPDX-License-Identifier: Apache-2.0
"""Profiles and the requests made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from perf.perf_analyzer import run, workload

from perf import tables

NAMES = sorted(path.stem for path in workload.PROFILES.glob("*.yaml"))


def test_shipped_profile_that_does_not_load() -> None:
    assert NAMES == ["cpu", "gb200", "gb300", "h200"]
    assert {name: workload.load_profile(name).name for name in NAMES} == {name: name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_profile_claims_a_run_without_a_result(name: str) -> None:
    """`status: run` exactly when a result is committed, and that result holds every level without a disagreement."""
    profile = workload.load_profile(name)
    result = tables.PERF / "results" / f"perf_analyzer_{name}.json"
    assert result.is_file() == (profile.status == "run")
    if profile.status == "run":
        data = json.loads(result.read_text())
        assert [level["concurrency"] for level in data["levels"]] == profile.concurrency
        assert not [problem for level in data["levels"] for problem in level["problems"]]
        assert data["command"]
        assert data["machine"]["cpu"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"concurrency": []}, "concurrency"),
        ({"status": "soon"}, "status"),
        ({"text_share": 2}, "text_share"),
        ({"streams": 3}, "streams"),
    ],
)
def test_wrong_profile_accepted(tmp_path: Path, change: dict[str, object], word: str) -> None:
    data = yaml.safe_load((workload.PROFILES / "cpu.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**data, **change}))
    with pytest.raises(workload.ProfileError, match=word):
        workload.load_profile(str(path))


def test_unknown_profile_falls_back() -> None:
    with pytest.raises(workload.ProfileError, match="there are cpu, gb200, gb300, h200"):
        workload.load_profile("b200")


@pytest.mark.parametrize("text", ["0", "1,x", "4,-1"])
def test_wrong_concurrency_accepted(text: str) -> None:
    with pytest.raises(workload.ProfileError, match="--concurrency"):
        run.parse_levels(text)


def test_same_prompt_twice_or_another_load_in_the_next_run() -> None:
    profile = workload.load_profile("cpu")
    first, again = (workload.requests(profile, 64, "c16", "salt") for _ in range(2))
    assert first == again
    prompts = [json.dumps([each.get("text_input"), each.get("input_ids")]) for each in first]
    assert len(set(prompts)) == 64
    other = workload.requests(profile, 64, "c4", "salt")
    assert not set(prompts) & {json.dumps([each.get("text_input"), each.get("input_ids")]) for each in other}


def test_mix_away_from_the_profile() -> None:
    profile = workload.load_profile("cpu").model_copy(update={"text_share": 0.25, "token_ids": (16, 20)})
    made = workload.requests(profile, 40, "x", "salt")
    texts = [each for each in made if "text_input" in each]
    ids = [each["input_ids"] for each in made if "input_ids" in each]
    assert (len(texts), len(ids)) == (10, 30)
    assert all(each["shape"] == [len(each["content"])] and each["shape"][0] in profile.prompt_tokens for each in ids)
    assert {token for each in ids for token in each["content"]} == {16, 17, 18, 19, 20}
    assert {len(each["text_input"][0].split()) for each in texts} <= set(profile.prompt_tokens)
    assert all(each["max_tokens"][0] in profile.output_tokens and each["ignore_eos"] == [True] for each in made)


def test_prefixes_of_an_earlier_run_found_in_the_cache() -> None:
    profile = workload.load_profile("cpu")
    salts = {json.loads(each["sampling_parameters"][0])["cache_salt"] for each in workload.requests(profile, 3, "c1", "abc")}
    assert salts == {"abc"}


def test_small_level_has_too_few_requests_for_a_percentile() -> None:
    profile = workload.load_profile("cpu")
    assert profile.requests(1) == profile.min_requests
    assert profile.requests(16) == 16 * profile.requests_per_slot
