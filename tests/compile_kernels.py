"""Compile the kernels of decode and compaction for an NVIDIA GPU, without one: `python tests/compile_kernels.py 90`.

The argument is the GPU's compute capability: 86 for a GPU of 24 GB, 90 for an H100 or H200. Calls the functions that launch
kernels, with CPU tensors of real head shapes, and compiles in place of every launch. Prints a JSON line per kernel: its name, and
the bytes of shared memory that a program takes. `test_compiled_kernels.py` runs it in a process of its own, because the other tests
interpret kernels.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from sparse_rl.kernels import jit

jit.precision = lambda tensor: (
    "ieee" if tensor.dtype == torch.float32 else "tf32"
)  # as on a GPU; before other modules import it

from sparse_rl.kernels.choose import fused_choose  # noqa: E402
from sparse_rl.kernels.code_attention import attend_and_append_codes  # noqa: E402
from sparse_rl.kernels.decode_codes import fused_decode  # noqa: E402
from sparse_rl.kernels.draw import draw_and_advance  # noqa: E402
from sparse_rl.kernels.form import PLAIN, AttentionForm  # noqa: E402
from sparse_rl.kernels.gather import fused_keep  # noqa: E402
from sparse_rl.kernels.importance import fused_importance  # noqa: E402
from sparse_rl.kernels.nucleus import Truncation  # noqa: E402
from sparse_rl.kernels.predicted import fused_logits  # noqa: E402
from sparse_rl.kernels.prompt_readers import members_of, prompt_readers  # noqa: E402
from sparse_rl.kernels.redundancy import fused_sums  # noqa: E402
from sparse_rl.kernels.rows import Rows, StoredCodes, StoredPrompts  # noqa: E402
from sparse_rl.kernels.slot_attention import attend_and_append, attend_in_ring  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
COMPILED: set[str] = set()
SLOTS, CAPACITY, PAGE = 8, 640, 64


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """Compile a kernel for what it would be launched with. Arguments are specialized as Triton does: 1, and multiples of 16."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: given.pop(name) for name in kernel.arg_names if name in given
    }
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if not isinstance(value, float) and (isinstance(value, torch.Tensor) or value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    key = repr((kernel.fn.__qualname__, kernel.fn.__module__, signature, constants, attributes, given))
    if key not in COMPILED:
        COMPILED.add(key)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        made = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=given)
        print(json.dumps({"kernel": kernel.fn.__name__, "shared": made.metadata.shared}), flush=True)


def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype)


def attention(q_heads: int, kv_heads: int, dim: int) -> None:
    """A decode step over slots, with stored prompts read by each slot or once, and over the rings of windows."""
    new = (normal(SLOTS, q_heads, dim), normal(SLOTS, kv_heads, dim), normal(SLOTS, kv_heads, dim))
    own = [normal(SLOTS, kv_heads, CAPACITY, dim) for _ in range(2)]
    positions, lengths = torch.zeros(SLOTS, kv_heads, CAPACITY, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int64)
    ring = normal(SLOTS, q_heads, 8, dim)
    pool = [normal(16, kv_heads, PAGE, dim) for _ in range(2)]
    table = torch.zeros(SLOTS, 4, dtype=torch.int32)
    readers = prompt_readers(table, lengths, members_of(q_heads // kv_heads))
    alone, once = StoredPrompts(*pool, table, lengths), StoredPrompts(*pool, table, lengths, readers)
    for prompts, splits in ((None, 1), (alone, 4), (once, 4)):
        attend_and_append(*new, *own, positions, ring, lengths, lengths, scale=0.1, splits=splits, prompts=prompts)
    attend_in_ring(*new, *own, lengths, scale=0.1, splits=1)


def code_attention(q_heads: int, kv_heads: int, dim: int, bits: int, form: AttentionForm = PLAIN) -> None:
    width, steps, dtype = (dim, 1, torch.int8) if bits == 8 else (dim // 2, dim // 32, torch.uint8)
    new = (normal(SLOTS, q_heads, dim), normal(SLOTS, kv_heads, dim), normal(SLOTS, kv_heads, dim))

    def codes(rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
        held = [normal(rows, kv_heads, tokens, width, dtype=dtype) for _ in range(2)]
        return (*held, *(normal(rows, kv_heads, tokens, steps, dtype=torch.float16) for _ in range(2)))

    positions, lengths = torch.zeros(SLOTS, kv_heads, CAPACITY, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int64)
    scales = [normal(kv_heads, dim, dtype=torch.float32) for _ in range(2)]
    ring, table = normal(SLOTS, q_heads, 8, dim), torch.zeros(SLOTS, 4, dtype=torch.int32)
    pool, cached = codes(16, PAGE), codes(SLOTS, CAPACITY)
    step = (*new, cached, positions, ring, lengths, lengths, *scales)
    for readers in (None, prompt_readers(table, lengths, members_of(q_heads // kv_heads))):
        prompts = StoredCodes(pool, table, lengths, readers)  # type: ignore[arg-type]
        attend_and_append_codes(*step, scale=0.1, splits=4, prompts=prompts, form=form)
    fused_decode(cached[0], cached[2], *scales, torch.bfloat16)


def compaction(q_heads: int, kv_heads: int, dim: int) -> None:
    keys, rows = normal(SLOTS, kv_heads, CAPACITY, dim), torch.arange(4)
    fused_importance(normal(4, q_heads, 8, dim), Rows(keys, rows, CAPACITY))
    fused_sums(Rows(keys, rows, CAPACITY), 0.5)
    virtual, spread = torch.zeros(4, q_heads, dim // 2, dtype=torch.complex64), torch.zeros(4, q_heads, dim // 2)
    fused_logits(virtual, spread, Rows(keys, rows, CAPACITY), torch.zeros(4, dim // 2, 2, dtype=torch.int64))
    chosen = torch.zeros(4, kv_heads, 512, dtype=torch.int64)
    empty = normal(SLOTS, kv_heads, CAPACITY, 0, dtype=torch.float16)
    fused_keep(
        keys, keys.clone(), empty, empty, torch.zeros(SLOTS, kv_heads, CAPACITY, dtype=torch.int32), rows, chosen, CAPACITY
    )
    fused_choose(torch.zeros(4, kv_heads, 632), CAPACITY, 512, 4, None, 1e-5)


def draw(vocab: int) -> None:
    state = [torch.zeros(SLOTS, dtype=torch.int64) for _ in range(6)]
    sampled, said, at = torch.zeros(4, SLOTS, dtype=torch.int64), torch.zeros(4, SLOTS), torch.ones(1)
    cut = Truncation(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64))
    for truncation in (None, cut):
        draw_and_advance(normal(SLOTS, vocab), *state, at, sampled, said, greedy=False, truncation=truncation)


if __name__ == "__main__":
    JITFunction.run = compile_only
    attention(12, 2, 128)  # Qwen2.5-1.5B
    code_attention(12, 2, 128, 8, AttentionForm(softcap=50.0, sinks_Q=normal(12)))  # with soft caps and sinks in addition
    code_attention(12, 2, 128, 4)
    compaction(12, 2, 128)
    wide = [normal(SLOTS, heads, 512) for heads in (16, 2, 2)], [normal(16, 2, PAGE, 512) for _ in range(2)]  # of Gemma 4
    lengths, cached = torch.zeros(SLOTS, dtype=torch.int64), [normal(SLOTS, 2, CAPACITY, 512) for _ in range(2)]
    table = torch.zeros(SLOTS, 4, dtype=torch.int32)
    once = StoredPrompts(*wide[1], table, lengths, prompt_readers(table, lengths, members_of(8)))
    positions, ring = torch.zeros(SLOTS, 2, CAPACITY, dtype=torch.int32), normal(SLOTS, 16, 8, 512)
    attend_and_append(*wide[0], *cached, positions, ring, lengths, lengths, scale=0.1, splits=4, prompts=once)
    fused_importance(normal(4, 16, 8, 512), Rows(normal(SLOTS, 2, CAPACITY, 512), torch.arange(4), CAPACITY))
    draw(151936)
