# SPDX-License-Identifier: Apache-2.0
"""The kernel library's operations as one table: from it come the C structs, the `torch.library` schemas and the calls.

An operation's line of names is its struct in the order of `cedar_kernels.h`, without the fields that all have (size, device,
threads in front, the workspace behind). First the scalars, then the tensors:

* ``name:float`` and ``name:int`` are given by the caller. A bare name follows from the tensors: it is either the type of one
  (``type[...]``) or a dimension (``[rows, dim]``).
* ``name: kind[dims]`` is a tensor that must have as many elements as the product of ``dims``, dense; ``[]``: any number;
  ``[rows,...]``: rows of any size, a pool. ``?`` marks one that may be None, ``!`` one that is written, ``@`` one that a GPU may
  read from pinned host memory. kind: f32, i64, u8, bool, any, a scalar's name whose value then is its type, or in parentheses an
  expression of such scalars and torch's dtypes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

TABLE = {
    "mega_mhc": """
        type rows hc hidden iterations:int hc_eps:float mix_eps:float norm_eps:float
        output?:type[rows,hidden] streams:type[rows,hc,hidden] post?:f32[rows,hc] comb?:f32[rows,hc,hc] pre?:f32[rows,hc]
        fn?:f32[(2+hc)*hc,hc,hidden] scale?:f32[(2+hc)*hc] base?:f32[(2+hc)*hc] norm_weight?:f32[hidden]
        new_streams?!:type[rows,hc,hidden] new_pre?!:f32[rows,hc] new_post?!:f32[rows,hc] new_comb?!:f32[rows,hc,hc]
        normed?!:type[rows,hidden]""",
    "mega_gate": """
        type weight_type rows hidden experts top_k scaling:float
        x:type[rows,hidden] weight:weight_type[experts,hidden] bias:f32[experts] image_bias?:f32[experts] image?:bool[rows]
        ids!:i64[rows,top_k] weights!:f32[rows,top_k]""",
    "moe_fp4": """
        type weight_type shared_type rows hidden inner experts top_k act_quant:int limit:float
        x:type[rows,hidden] ids:i64[rows,top_k] weights:f32[rows,top_k]
        w13:weight_type[experts,2*inner,hidden//(1+(weight_type is uint8))] w13_scale?:u8[experts,2*inner,hidden//32]
        w2:weight_type[experts,hidden,inner//(1+(weight_type is uint8))] w2_scale?:u8[experts,hidden,inner//32]
        shared_w13:shared_type[2*inner,hidden] shared_w13_scale?:u8[(2*inner+31)//32,(hidden+31)//32]
        shared_w2:shared_type[hidden,inner] shared_w2_scale?:u8[(hidden+31)//32,(inner+31)//32] out!:type[rows,hidden]""",
    "mxfp8_linear": """
        type weight_type out_type rows in_dim out_dim act_quant:int norm_eps:float
        x:type[rows,in_dim] weight:weight_type[out_dim,in_dim] weight_scale?:u8[(out_dim+31)//32,(in_dim+31)//32]
        norm_weight?:f32[out_dim] y!:out_type[rows,out_dim]""",
    "wo_a": """
        type weight_type rows groups:int in_dim:int rank:int
        x:type[rows,groups*in_dim] weight:weight_type[groups*rank,in_dim]
        weight_scale?:u8[(groups*rank+31)//32,(in_dim+31)//32] y!:type[rows,groups*rank]""",
    "window_store": """
        type record:int rows dim pairs history_rows stores ring_rows norm_eps:float
        kv:type[rows,dim] norm_weight:f32[dim] cos:f32[rows,pairs] sin:f32[rows,pairs] history?:i64[history_rows]
        store_from?:i64[stores] store_to:i64[stores] ring!:any[ring_rows,...] table!:any[]""",
    "compress_store": """
        type record:int index_record:int ratio:int rows groups dim index_dim pairs opens leaves_open
        open_slots kv_rows index_rows norm_eps:float
        projected:(type if ratio == 1 else float32)[rows,ratio*dim] group_rows?:i64[groups] first?:i64[groups]
        open_from?:i64[opens] open_rows?:i64[leaves_open] open_to?:i64[leaves_open] open?!:f32[open_slots,...]
        norm_weight:f32[dim] wk:type[index_dim,dim] index_norm_weight:f32[index_dim]
        cos:f32[groups,pairs] sin:f32[groups,pairs] slots:i64[groups]
        kv_pool!:any[kv_rows,...] index_pool!:any[index_rows,...]""",
    "mqa_logits_topk": """
        type record:int rows heads dim pairs top_k:int width max_visible:int per_page:int block:int candidate_blocks
        published_blocks key_rows page_count quantise:int weight_scale:float
        query:type[rows,heads,dim] weight:type[rows,heads] cos:f32[rows,pairs] sin:f32[rows,pairs]
        keys:any[key_rows,...] pages:i64[page_count]
        base:i64[rows] visible:i64[rows] candidates?:i64[rows,candidate_blocks] index!:i64[rows,width] slots!:i64[rows,width]
        published?!:i64[rows,published_blocks]""",
    "mega_attention": """
        type window_record:int entry_record:int rows heads dim pairs window_width entry_width window_rows entry_rows scale:float
        query:type[rows,heads,dim] cos:f32[rows,pairs] sin:f32[rows,pairs] sink:f32[heads] window:any[window_rows,...]
        window_index:i64[rows,window_width] entries?:any[entry_rows,...] entry_index?:i64[rows,entry_width]
        out!:type[rows,heads,dim]""",
    "engram_gather": """
        type rows columns dim table_rows width
        ids:i64[rows,columns] table@:u8[table_rows,width] table_scale?@:u8[table_rows,dim//32] out!:type[rows,columns,dim]""",
    "engram_gate": """
        type rows hc hidden norm_eps:float
        streams:type[rows,hc,hidden] keys_value:type[rows,hc+1,hidden] qk_weight:f32[hc,hidden]
        new_streams!:type[rows,hc,hidden]""",
}

KINDS = {"f32": "float32", "i64": "int64", "u8": "uint8", "bool": "bool"}
_ENTRY = re.compile(r"(?P<name>\w+)(?P<optional>\?)?(?P<written>!)?(?P<pinned>@)?(:(?P<kind>\w+|\([^)]*\))(?P<dims>\[[^]]*])?)?")


@dataclass(frozen=True)
class Scalar:
    """given: "int" or "float"; empty: it follows from the tensors."""

    name: str
    given: str


@dataclass(frozen=True)
class TensorField:
    """dims: expressions of scalars' names, whose product is the number of elements; empty: any. The last may be "...": any."""

    name: str
    kind: str
    dims: tuple[str, ...]
    optional: bool
    written: bool
    pinned: bool

    @property
    def sized(self) -> bool:
        """Do scalars say how many elements it has?"""
        return bool(self.dims) and self.dims[-1] != "..."


class Operation:
    """One line of the table."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.scalars: list[Scalar] = []
        self.tensors: list[TensorField] = []
        for entry in _ENTRY.finditer(text):
            field = entry.groupdict()
            if field["dims"] is None:
                self.scalars.append(Scalar(field["name"], field["kind"] or ""))
                continue
            dims = tuple(part for part in field["dims"][1:-1].split(",") if part)
            optional, written, pinned = (bool(field[mark]) for mark in ("optional", "written", "pinned"))
            self.tensors.append(TensorField(field["name"], field["kind"], dims, optional, written, pinned))

    @cached_property
    def given(self) -> list[Scalar]:
        """Scalars that callers pass."""
        return [scalar for scalar in self.scalars if scalar.given]

    @property
    def parameters(self) -> list[str]:
        """Names of the call's arguments: all tensors, then the given scalars."""
        return [tensor.name for tensor in self.tensors] + [scalar.name for scalar in self.given]

    @property
    def schema(self) -> str:
        """The `torch.library` schema. Results are written into arguments."""
        parts = []
        for number, tensor in enumerate(self.tensors):
            alias = f"(m{number}!)" if tensor.written else ""
            parts.append(f"Tensor{alias}{'?' if tensor.optional else ''} {tensor.name}")
        parts += [f"{scalar.given} {scalar.name}" for scalar in self.given]
        return f"{self.name}({', '.join(parts)}) -> ()"

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The struct: (name, "int" | "float" | "pointer")."""
        scalars = [(scalar.name, "float" if scalar.given == "float" else "int") for scalar in self.scalars]
        pointers = [(tensor.name, "pointer") for tensor in self.tensors]
        head = [(name, "int") for name in ("size", "device", "threads")]
        return [*head, *scalars, *pointers, ("workspace_bytes", "int"), ("workspace", "pointer")]

    @property
    def source(self) -> str:
        """A Python function that checks its arguments and returns the struct of the call, workspace included.

        home: the `torch.device` on which all tensors must be; device: the library's number of it.
        Written out rather than interpreted: a decode step makes a hundred of these calls, and each check is a few bytecodes.
        Its globals: Struct, SIZE, TYPES, the dtypes of `KINDS` by name, and ``wrong(op, name, tensor, kind, dims, home)``, which
        raises.
        """
        lines = [f"def build({', '.join(self.parameters)}, home, device, threads, workspace_bytes, workspace):"]
        lines += [f"    {line}" for line in self._derivations()]
        for tensor in self.tensors:
            present = f"{tensor.name} is not None and " if tensor.optional else ""
            lines.append(f"    if {present}({' or '.join(self._wrong(tensor))}):")
            lines.append(f"        wrong({self.name!r}, {tensor.name!r}, {tensor.name}, {tensor.kind!r}, {tensor.dims!r}, home)")
        values = [f"TYPES[{scalar.name}]" if self._is_type(scalar) else scalar.name for scalar in self.scalars]
        values += [
            f"{tensor.name}.data_ptr()" + (f" if {tensor.name} is not None else None" if tensor.optional else "")
            for tensor in self.tensors
        ]
        lines.append(f"    return Struct(SIZE, device, threads, {', '.join(values)}, workspace_bytes, workspace)")
        return "\n".join(lines)

    def _is_type(self, scalar: Scalar) -> bool:
        return any(tensor.kind == scalar.name for tensor in self.tensors)

    def _derivations(self) -> list[str]:
        """Statements that find the scalars which nobody passes, from the first tensor that has them and must be there."""
        lines = []
        for scalar in self.scalars:
            if scalar.given:
                continue
            found = [tensor for tensor in self.tensors if scalar.name == tensor.kind or scalar.name in tensor.dims]
            tensor = min(found, key=lambda tensor: tensor.optional)
            value = f"{tensor.name}.dtype" if scalar.name == tensor.kind else self._dimension(tensor, scalar.name)
            absent = f" if {tensor.name} is not None else 0" if tensor.optional else ""
            lines.append(f"{scalar.name} = {value}{absent}")
        return lines

    @staticmethod
    def _dimension(tensor: TensorField, name: str) -> str:
        if len(tensor.dims) == 1:
            return f"{tensor.name}.numel()"
        place = tensor.dims.index(name)
        return f"{tensor.name}.shape[{place if place == 0 else place - len(tensor.dims)}]"

    @staticmethod
    def _wrong(tensor: TensorField) -> list[str]:
        elsewhere = f"{tensor.name}.device != home"
        conditions = [f"{elsewhere} and not {tensor.name}.is_pinned()" if tensor.pinned else elsewhere]
        conditions.append(f"not {tensor.name}.is_contiguous()")
        if tensor.kind != "any":
            conditions.append(f"{tensor.name}.dtype is not {KINDS.get(tensor.kind, tensor.kind)}")
        if tensor.sized:
            conditions.append(f"{tensor.name}.numel() != {' * '.join(f'({part})' for part in tensor.dims)}")
        return conditions


OPERATIONS = {name: Operation(name, text) for name, text in TABLE.items()}
