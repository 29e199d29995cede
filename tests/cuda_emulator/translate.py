# SPDX-License-Identifier: Apache-2.0
"""CUDA sources as C++ for the emulator: inline PTX becomes calls of functions named after the instructions, and shared memory is
asked of the emulator. All else is left to the headers in `include`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_REGISTERS = {"pred": "bool", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t", "f32": "float"}


def _until_close(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at ``start``."""
    depth = 0
    at = start
    while True:
        if text[at] == '"':
            at = _until_quote(text, at)
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


def _until_quote(text: str, start: int) -> int:
    at = start + 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of strings and brackets."""
    parts, depth, first, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            at = _until_quote(text, at)
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if text[at] == separator and depth == 0:
            parts.append(text[first:at])
            first = at + 1
        at += 1
    return [*parts, text[first:]]


def _operand(text: str) -> str:
    """An operand of an instruction as C++."""
    text = text.strip()
    if text.startswith("{"):
        return f"::emulated::registers({', '.join(_operand(x) for x in _split(text[1:-1], ','))})"
    if text.startswith("["):
        return ", ".join(_operand(x) for x in _split(text[1:-1], ","))
    if text.startswith("%%"):
        return "::emulated::ptx::" + text[2:].replace(".", "_") + "()"
    return text.replace("%", "asm_")


def _instruction(text: str) -> str:
    """One PTX statement as C++; empty for what a blocking wait makes needless."""
    text = text.strip()
    if not text or text.endswith(":") or re.match(r"(@!?\w+\s+)?bra\b", text):
        return ""
    if declared := re.match(r"\.reg\s+\.(\w+)\s+(.+)", text):
        return f"{_REGISTERS[declared[1]]} {declared[2]};"
    if predicated := re.match(r"@(!?\w+)\s+(.+)", text):
        return f"if ({predicated[1]}) {_instruction(predicated[2])}"
    opcode, _, rest = text.partition(" ")
    operands = [_operand(x) for x in _split(rest, ",") if x.strip() not in ("", "_")]
    name = re.sub(r"\W+", "_", opcode).strip("_")
    return f"::emulated::ptx::{name}({', '.join(operands)});"


def _asm(body: str) -> str:
    """The C++ of what is between an asm statement's parentheses."""
    template, *sections = _split(body, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", "\n")
    operands = [x.strip() for section in sections[:2] for x in _split(section, ",") if x.strip()]
    bound = [f"auto&& asm_{n} = {x[x.index('(') :]};" for n, x in enumerate(operands)]
    code = re.sub(r"^\s*\{(?=[\s.])|\}\s*$", "", code) if ".reg" in code else code
    code = re.sub(r"(\w+:)\s", r"\1;\n", code)
    lines = [_instruction(x) for x in re.split(r"[;\n]", code)]
    return "{ " + " ".join([*bound, *filter(None, lines)]) + " }"


def _shared(match: re.Match[str]) -> str:
    """Declarations of static shared memory."""
    alignment, kind, names = match[1] or "16", match[2], match[3]
    out = []
    for variable in _split(names, ","):
        name, dims = re.fullmatch(r"\s*(\w+)\s*(.*)", variable, re.DOTALL).groups()  # type: ignore[union-attr]
        key = f'__FILE__ "{name}"'
        out.append(f"auto& {name} = ::emulated::static_memory<{kind}{dims.strip()}, {alignment}>({key});")
    return " ".join(out)


def translate(text: str) -> str:
    """The C++ of a CUDA source."""
    out, at = [], 0
    for found in re.finditer(r"\basm\s*(volatile)?\s*\(", text):
        if found.start() < at or "//" in text[text.rfind("\n", 0, found.start()) + 1 : found.start()]:
            continue
        end = _until_close(text, found.end() - 1)
        out += [text[at : found.start()], _asm(text[found.end() : end - 1])]
        at = end + (text[end : end + 1] == ";")
    text = "".join([*out, text[at:]])
    text = re.sub(
        r"extern __shared__ __align__\((\w+)\) ([\w ]+?) (\w+)\[\];",
        r"\2* const \3 = ::emulated::dynamic_memory<\2, \1>();",
        text,
    )
    return re.sub(r"(?<!\w)__shared__ (?:__align__\((\w+)\) )?([\w:]+(?:<[^;>]*>)?)\s+([^;]+);", _shared, text)


def main() -> None:
    """translate.py FROM TO: every .cu of a folder as .cpp, headers by their names."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        name = path.stem + ".cpp" if path.suffix == ".cu" else path.name
        (target / name).write_text(f'#line 1 "{path}"\n' + translate(path.read_text()))


if __name__ == "__main__":
    main()
