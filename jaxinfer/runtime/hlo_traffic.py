"""Bytes that a compiled TPU program moves to and from its main memory (HBM), counted from its text.

XLA's own "bytes accessed" also counts what operations exchange through the chip's on-chip memory: a weight that is
prefetched there counts twice. Here only operands and results in HBM count (on-chip layouts carry a memory space, S(1)),
a table that is only gathered from counts what is gathered, and a kernel counts what its cost estimate states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_BYTES |= {"s4": 0.5, "u4": 0.5, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\((?P<rest>.*)$")
_MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
_READS_PART = {"gather", "dynamic-slice", "slice"}
_CONTROL_FLOW = {"while", "conditional", "call"}


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    line: str


def memory_traffic(text: str) -> int | None:
    """Bytes of one run of the program whose HLO text this is; None when it has loops, whose counts the text lacks."""
    computations = _computations(text)
    entry = computations["ENTRY"]
    by_name = {instruction.name: instruction for instruction in entry}
    if any(instruction.op in _CONTROL_FLOW for instruction in entry):
        return None
    return sum(_traffic(instruction, by_name, computations) for instruction in entry)


def _traffic(
    instruction: _Instruction, by_name: dict[str, _Instruction], computations: dict[str, list[_Instruction]]
) -> int:
    op = instruction.op
    if op in _MOVES_NOTHING or op.endswith("-done"):
        return 0
    sources = [by_name[name] for name in instruction.operands if name in by_name]
    if op in ("copy-start", "slice-start"):
        return _async_copy(instruction, sources)
    if op == "custom-call":
        stated = re.search(r'"bytes_accessed":"(\d+)"', instruction.line)
        return int(stated.group(1)) if stated else 0
    read = sum(_operand_bytes(instruction, index, source, computations) for index, source in enumerate(sources))
    return read + _hbm_bytes(instruction.type)


def _async_copy(instruction: _Instruction, sources: list[_Instruction]) -> int:
    """A copy between memories: its type is a tuple of destination and source, in either order."""
    shapes = list(_SHAPE.finditer(instruction.type))
    on_chip = [match for match in shapes if _on_chip(match) and match.group(1) != "u32" and match.group(2)]
    moved = min(_size(match) for match in on_chip or shapes)
    ends_in_hbm = sum(1 for match in shapes[:2] if not _on_chip(match))
    return moved * max(1, ends_in_hbm) if sources else 0


def _operand_bytes(
    instruction: _Instruction, index: int, source: _Instruction, computations: dict[str, list[_Instruction]]
) -> int:
    whole = _hbm_bytes(source.type)
    called = re.search(r"calls=%?([\w.\-]+)", instruction.line)
    if instruction.op in _READS_PART and index == 0:
        return min(whole, _all_bytes(instruction.type))
    if not whole or called is None:
        return whole
    body = computations[called.group(1)]
    parameter = next((item.name for item in body if item.op == "parameter" and f"parameter({index})" in item.line), "")
    users = [item for item in body if parameter in item.operands]
    if users and all(user.op in _READS_PART and user.operands[0] == parameter for user in users):
        return min(whole, sum(_all_bytes(user.type) for user in users))
    return whole


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and " = " not in line.split("(")[0]:
            current = found.setdefault("ENTRY" if header.group(1) else header.group(2), [])
            continue
        parsed = _INSTRUCTION.match(line)
        if parsed:
            current.append(_instruction(parsed, line))
    return found


def _instruction(parsed: re.Match[str], line: str) -> _Instruction:
    arguments = parsed["rest"].split(")", 1)[0]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return _Instruction(parsed["name"], parsed["type"], parsed["op"], operands, line)


def _hbm_bytes(type_text: str) -> int:
    return sum(_size(match) for match in _SHAPE.finditer(type_text) if not _on_chip(match))


def _all_bytes(type_text: str) -> int:
    return sum(_size(match) for match in _SHAPE.finditer(type_text))


def _on_chip(shape: re.Match[str]) -> bool:
    return "S(" in (shape.group(3) or "")


def _size(shape: re.Match[str]) -> int:
    count = 1
    for dimension in _dimensions(shape.group(2)):
        count *= dimension
    return int(count * _BYTES.get(shape.group(1), 4))


def _dimensions(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(",") if part)
