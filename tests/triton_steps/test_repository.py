# SPDX-License-Identifier: Apache-2.0
"""The committed model repository against the tensor table, and against what a 24.10 server parses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2

from cedar.triton import pbtxt
from cedar.triton.tensors import ENSEMBLE, INPUTS, MODELS, OUTPUTS, STEPS

REPOSITORY = Path(__file__).parents[2] / "model_repository"
PARSED_BY_24_10 = {
    *("name", "backend", "platform", "max_batch_size"),
    *("input", "input.name", "input.data_type", "input.dims", "input.optional"),
    *("output", "output.name", "output.data_type", "output.dims"),
    *("instance_group", "instance_group.count", "instance_group.kind"),
    *("model_transaction_policy", "model_transaction_policy.decoupled"),
    *("ensemble_scheduling", "ensemble_scheduling.step"),
    *("ensemble_scheduling.step.model_name", "ensemble_scheduling.step.model_version"),
    *("ensemble_scheduling.step.input_map", "ensemble_scheduling.step.input_map.key"),
    *("ensemble_scheduling.step.input_map.value", "ensemble_scheduling.step.output_map"),
    *("ensemble_scheduling.step.output_map.key", "ensemble_scheduling.step.output_map.value"),
}


def config(model: str) -> Any:
    """The committed file, parsed as a server does."""
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def keys(message: Message, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys that are set."""
    for field, value in message.ListFields():
        yield prefix + field.name
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            yield from (f"{prefix}{field.name}.{part}" for part in ("key", "value"))
        else:
            for part in value if isinstance(value, Message) is False else [value]:
                yield from keys(part, f"{prefix}{field.name}.")


def test_committed_files_differ_from_the_table() -> None:
    assert pbtxt.differences(REPOSITORY) == []


def test_check_is_blind(tmp_path: Path) -> None:
    pbtxt.write(tmp_path)
    assert pbtxt.differences(tmp_path) == []
    file = tmp_path / "deliver" / "config.pbtxt"
    file.write_text(file.read_text().replace("count: 1", "count: 2"))
    (tmp_path / "tokenize" / "1" / "model.py").unlink()
    assert pbtxt.differences(tmp_path) == ["tokenize/1/model.py", "deliver/config.pbtxt"]


@pytest.mark.parametrize("model", MODELS)
def test_a_key_is_unknown_to_24_10(model: str) -> None:
    assert set(keys(config(model))) <= PARSED_BY_24_10


def test_the_ensemble_is_not_the_public_contract() -> None:
    found = config(ENSEMBLE)
    assert (found.platform, found.max_batch_size, len(found.instance_group)) == ("ensemble", 0, 0)
    assert [t.name for t in found.input] == [t.name for t in INPUTS]
    assert [t.name for t in found.output] == [t.name for t in OUTPUTS]
    assert all(t.optional for t in found.input)


def test_a_map_leads_nowhere_or_twice_to_one_name() -> None:
    found = config(ENSEMBLE)
    public = {t.name for t in found.input}
    written: Counter[str] = Counter()
    for step, table in zip(found.ensemble_scheduling.step, STEPS, strict=True):
        assert (step.model_name, step.model_version) == (table.name, 1)
        assert set(step.input_map) == {t.name for t in table.inputs}
        assert set(step.output_map) == {t.name for t in table.outputs}
        assert set(step.input_map.values()) <= public | set(written)
        written.update(step.output_map.values())
    assert set(written.values()) == {1}
    assert {t.name for t in found.output} <= set(written)
    assert not public & set(written)


def test_a_step_reads_from_two_decoupled_steps() -> None:
    by_name = {step.name: step for step in STEPS}
    for step in STEPS[1:]:
        assert step.inputs == by_name[step.reads].outputs


def test_a_step_could_reorder_responses() -> None:
    """More than one instance, or dynamic batching, of a step that runs once per response."""
    for step in STEPS:
        found = config(step.name)
        assert found.backend == "python"
        assert found.model_transaction_policy.decoupled is (step.name != "tokenize")
        assert not found.HasField("dynamic_batching")
        assert [group.count for group in found.instance_group] == [2 if step.name == "tokenize" else 1]


def test_the_tables_of_the_readme_leave_something_out() -> None:
    tables = pbtxt.markdown()
    for tensor in (*INPUTS, *OUTPUTS):
        assert f"| `{tensor.name}` | {tensor.type_and_dims} |" in tables
