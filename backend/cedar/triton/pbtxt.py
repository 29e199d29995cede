# SPDX-License-Identifier: Apache-2.0
"""Renders the model repository (five config.pbtxt and four model.py) and the README's tables from the tensor table.

``python -m cedar.triton.pbtxt --check`` compares the committed files, ``--write [DIR]`` writes them, ``--markdown`` prints
the tables.
Only keys that every server since 24.10 parses are used: newer ones (`max_inflight_requests`, …) make an old server refuse the
whole file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from cedar.config.engine import SHIPPED_REPOSITORY
from cedar.triton.tensors import ENSEMBLE, EXTRA_KEYS, INPUTS, OUTPUTS, STEPS, Step, Tensor

HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Made by `python -m cedar.triton.pbtxt --write`; never edited.\n"
MODEL_PY = '''# SPDX-License-Identifier: Apache-2.0
"""{doc}: the code is cedar.triton.{name}."""

from cedar.triton.{name} import {cls} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def _tensor(tensor: Tensor, optional: bool) -> str:
    """One element of an ``input`` or ``output`` list."""
    kind = "STRING" if tensor.dtype == "BYTES" else tensor.dtype
    dims = ", ".join(map(str, tensor.dims))
    tail = " optional: true" if optional else ""
    return f'  {{ name: "{tensor.name}" data_type: TYPE_{kind} dims: [ {dims} ]{tail} }}'


def _list(key: str, tensors: Iterable[Tensor], optional: bool = False) -> str:
    return f"{key} [\n" + ",\n".join(_tensor(t, optional) for t in tensors) + "\n]\n"


def step_config(step: Step) -> str:
    """config.pbtxt of one Python model."""
    decoupled = "model_transaction_policy { decoupled: true }\n" if step.decoupled else ""
    return (
        f'{HEADER}# {step.name}: {step.doc}.\nname: "{step.name}"\nbackend: "python"\nmax_batch_size: 0\n{decoupled}'
        f"instance_group [ {{ count: {step.instances} kind: KIND_CPU }} ]\n"
        f"{_list('input', step.inputs, step.optional_inputs)}{_list('output', step.outputs)}"
    )


def _internal(step: str, tensor: Tensor) -> str:
    """The ensemble's own name of a step's output: one name may be written by one step only."""
    return f"_{step}_{tensor.name.lstrip('_')}"


def _map(key: str, pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'      {key} {{ key: "{name}" value: "{value}" }}\n' for name, value in pairs)


def ensemble_config() -> str:
    """config.pbtxt of the ensemble: each step reads exactly one other, the last writes the public outputs."""
    steps = []
    for step in STEPS:
        inputs = [(t.name, _internal(step.reads, t) if step.reads else t.name) for t in step.inputs]
        outputs = [(t.name, t.name if step is STEPS[-1] else _internal(step.name, t)) for t in step.outputs]
        maps = _map("input_map", inputs) + _map("output_map", outputs)
        steps.append(f'    {{\n      model_name: "{step.name}"\n      model_version: 1\n{maps}    }}')
    body = ",\n".join(steps)
    return (
        f'{HEADER}# {ENSEMBLE}: the public model.\nname: "{ENSEMBLE}"\nplatform: "ensemble"\nmax_batch_size: 0\n'
        f"{_list('input', INPUTS, True)}{_list('output', OUTPUTS)}ensemble_scheduling {{\n  step [\n{body}\n  ]\n}}\n"
    )


def render() -> dict[str, str]:
    """Every file of the model repository: relative path -> text."""
    files = {f"{ENSEMBLE}/config.pbtxt": ensemble_config(), f"{ENSEMBLE}/1/.gitkeep": ""}
    for step in STEPS:
        cls = "".join(word.capitalize() for word in step.name.split("_"))
        files[f"{step.name}/config.pbtxt"] = step_config(step)
        files[f"{step.name}/1/model.py"] = MODEL_PY.format(doc=f"{step.name} {step.doc}", name=step.name, cls=cls)
    return files


def differences(root: Path) -> list[str]:
    """Relative paths under ``root`` that are missing or differ from the rendering."""
    return [name for name, text in render().items() if not (root / name).is_file() or (root / name).read_text() != text]


def write(root: Path) -> None:
    """Write the model repository under ``root``."""
    for name, text in render().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def markdown() -> str:
    """The README's tables of inputs, keys of ``sampling_parameters`` and outputs."""
    inputs = [f"| `{t.name}` | {t.type_and_dims} | {t.doc} |" for t in INPUTS]
    keys = [f"| `{k.name}` | {k.allowed} | {k.doc} |" for k in EXTRA_KEYS]
    outputs = [f"| `{t.name}` | {t.type_and_dims} | {t.doc} |" for t in OUTPUTS]
    return "\n".join(
        [
            *("| input | type, dims | meaning |", "|---|---|---|", *inputs, ""),
            "`sampling_parameters` takes the scalar inputs from `stream` to `request_key` by name, and:\n",
            *("| key | allowed | meaning |", "|---|---|---|", *keys, ""),
            *("| output | type, dims | meaning |", "|---|---|---|", *outputs, ""),
        ]
    )


def main() -> int:
    """Exit status 1: ``--check`` found differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", nargs="?", const=SHIPPED_REPOSITORY, type=Path, metavar="DIR")
    what.add_argument("--check", nargs="?", const=SHIPPED_REPOSITORY, type=Path, metavar="DIR")
    what.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown())
        return 0
    if arguments.write:
        write(arguments.write)
        return 0
    wrong = differences(arguments.check)
    print("\n".join(f"differs from the tensor table: {name}" for name in wrong) or "up to date")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
