# SPDX-License-Identifier: Apache-2.0
"""The wire format only grows: what tests/data/engine_v1.json records must stay as it is.

After adding to the proto: ``python tests/service/test_wire.py`` records the present state; review the difference.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from cedar.v1 import engine_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "protos" / "cedar" / "v1" / "engine.proto"
RECORD = ROOT / "tests" / "data" / "engine_v1.json"


def describe(file: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """Everything that the wire depends on: fields by number with name, type and label; calls with their types."""
    messages = {
        message.name: {str(item.number): _field(message, item) for item in message.field} for message in file.message_type
    }
    calls = {
        f"{service.name}.{call.name}": (
            f"{_stream(call.client_streaming)}{call.input_type} -> {_stream(call.server_streaming)}{call.output_type}"
        )
        for service in file.service
        for call in service.method
    }
    return {"package": file.package, "messages": messages, "calls": calls}


def _field(message: descriptor_pb2.DescriptorProto, item: descriptor_pb2.FieldDescriptorProto) -> str:
    """As in the proto: label, type, name; a oneof's member is labelled with the oneof."""
    kind = item.type_name or item.Type.Name(item.type).removeprefix("TYPE_").lower()
    if item.proto3_optional:
        label = "optional "
    elif item.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[item.oneof_index].name} "
    else:
        label = "repeated " if item.label == item.LABEL_REPEATED else ""
    return f"{label}{kind} {item.name}"


def _stream(streaming: bool) -> str:
    return "stream " if streaming else ""


def broken(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What a peer that was built from the record would misread. Additions are fine; a number may not get a new meaning."""
    problems = [] if recorded["package"] == current["package"] else ["package"]
    problems += [f"call {name}" for name, call in recorded["calls"].items() if current["calls"].get(name) != call]
    for message, fields in recorded["messages"].items():
        now = current["messages"].get(message, {})
        problems += [f"{message}: {field} = {number}" for number, field in fields.items() if now.get(number) != field]
    return problems


def compiled(directory: Path) -> dict[str, Any]:
    """The proto file as it lies in the tree."""
    out = directory / "engine.binpb"
    assert protoc.main(["protoc", f"--proto_path={ROOT / 'protos'}", f"--descriptor_set_out={out}", str(PROTO)]) == 0
    return describe(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0])


def test_field_is_renumbered_retyped_or_removed(tmp_path: Path) -> None:
    assert broken(json.loads(RECORD.read_text()), compiled(tmp_path)) == []


def test_addition_is_not_recorded(tmp_path: Path) -> None:
    assert json.loads(RECORD.read_text()) == compiled(tmp_path), "run: python tests/service/test_wire.py"


def test_generated_code_is_stale(tmp_path: Path) -> None:
    generated = descriptor_pb2.FileDescriptorProto()
    engine_pb2.DESCRIPTOR.CopyToProto(generated)
    assert describe(generated) == compiled(tmp_path), "run: python scripts/build_protos.py"


def test_incompatible_changes_pass_unseen() -> None:
    recorded = json.loads(RECORD.read_text())
    current = copy.deepcopy(recorded)
    fields = current["messages"]["EncodeProgress"]
    fields["99"] = "string an_addition"
    current["messages"]["New"] = {}
    assert broken(recorded, current) == []
    fields["1"], fields["2"] = fields["2"], fields["1"]
    del current["messages"]["Timing"]["4"]
    current["messages"]["SamplingParams"]["3"] = "float temperature"
    current["calls"]["Engine.Encode"] = ".cedar.v1.EncodeRequest -> .cedar.v1.EncodeProgress"
    assert broken(recorded, current) == [
        "call Engine.Encode",
        "SamplingParams: double temperature = 3",
        "EncodeProgress: string handle = 1",
        "EncodeProgress: bool ready = 2",
        "Timing: uint64 last_token_ns = 4",
    ]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        RECORD.write_text(json.dumps(compiled(Path(directory)), indent=1) + "\n")
