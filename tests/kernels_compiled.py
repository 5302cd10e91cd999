"""The kernels as GPU compilers see them, on a machine without a GPU. Collected by test_kernels.py in a process of its
own: a process either compiles kernels or interprets them.

Each operation is called as the model calls it, on tensors without data, with the launch replaced: instead of running,
the kernel is compiled for three cards, with just the arguments that the launch would have had.
"""
import pathlib
import re
import subprocess

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels

# (target, bytes of shared memory that a program may take). 99 KiB is what the smallest cards since sm_80 can give.
TARGETS = {"sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024), "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
           "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024)}
# Bytes of memory that a thread takes for want of registers: 16 registers' worth, what ptxas wants for sm_80 and the
# largest tile (on sm_90 the same tile needs none).
SPILL_LIMIT = 64
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64",
            torch.int32: "*i32"}
CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def source_of(kernel, args, kwargs):
    """What the runtime would compile for this call: None and the integer 1 become constants; pointers, and integers
    that 16 divides, are marked so, which decides how wide the loads are."""
    values = dict(zip(kernel.arg_names, args)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        special = not param.do_not_specialize
        if param.is_constexpr or value is None or type(value) is int and value == 1 and special:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], divisible = POINTERS[value.dtype], True               # allocations lie at 256 bytes
        elif isinstance(value, float):
            signature[param.name], divisible = "fp32", False
        else:
            signature[param.name], divisible = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0 and special
        if param.name not in constants and divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def spilled_bytes(compiled, folder):
    if "amdgcn" in compiled.asm:
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[1])
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", report.stdout)[1])


@pytest.fixture
def compile_launches(monkeypatch, tmp_path):
    """f(target name, operation): performs the operation with launches replaced  →  [(kernel name, compiled, kwargs)],
    each checked for spills and shared memory."""
    def f(name, operation):
        target, limit = TARGETS[name]
        seen = []

        def run(self, *args, grid, warmup, **kwargs):
            options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")}
            compiled = triton.compile(source_of(self, args, kwargs), target=target, options=options)
            shared, spilled = compiled.metadata.shared, spilled_bytes(compiled, tmp_path)
            what = f"{self.__name__} for {name} with {options}: {shared} bytes of shared memory, {spilled} spilled"
            assert shared <= limit and spilled <= SPILL_LIMIT, what
            if "TILE" in kwargs and target.backend == "cuda":
                said = kernels.tile_bytes(kwargs["BLOCK_M"], kwargs["TILE"], options["num_stages"], kwargs["BLOCK_D"],
                                          args[1].element_size())
                assert shared <= said, what + f", but tile_bytes says {said}"
            seen.append((self.__name__, compiled, kwargs))
        monkeypatch.setattr(triton.JITFunction, "run", run)
        monkeypatch.setattr(kernels, "shared_memory_limit", lambda device: limit)
        operation()
        return seen
    return f


def attention(d, G, dtype, Hkv=2, block_size=16, S=3, T=40, B=128, N=70_000):
    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")
    qkv = meta(T, (G + 2) * Hkv, d, dtype=dtype)
    cache = meta(2, N, block_size, Hkv, d, dtype=dtype)
    return lambda: kernels.TRITON.paged_attention(qkv[:, :G * Hkv], cache[0], cache[1], meta(S + 1), meta(S),
                                                  meta(S, B), d ** -0.5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("d, G, dtype", [(128, 8, torch.bfloat16), (256, 4, torch.float16), (16, 4, torch.float32)])
def test_attention_compiles(compile_launches, target, d, G, dtype):
    seen = compile_launches(target, attention(d, G, dtype))
    assert [(name, kwargs.get("DECODE")) for name, _, kwargs in seen] == [
        ("_paged_attention_kernel", True), ("_merge_splits_kernel", None), ("_paged_attention_kernel", False)]
    for name, compiled, kwargs in seen:
        if name == "_paged_attention_kernel":
            # A slot's offset can pass 2^31 elements: both loops add 64-bit offsets to the pointers of K and of V.
            tile = rf"tensor<{kwargs['TILE']}x(?:1x|{kwargs['BLOCK_D']}x)"
            wide = re.findall(rf"tt\.addptr .*{tile}!tt\.ptr<\w+>>, {tile}i64>", compiled.asm["ttir"])
            assert len(wide) >= 4, f"{len(wide)} of 4 address computations are 64 bits wide"


def test_prefill_uses_the_hopper_matrix_instructions(compile_launches):
    chunk = compile_launches("sm_90", attention(128, 8, torch.bfloat16))[-1][1]
    assert "wgmma" in chunk.asm["ptx"] and "cp.async" in chunk.asm["ptx"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_other_kernels_compile(compile_launches, target):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")
    cache, T = meta(2, 70_000, 16, 8, 128), 40
    qkv, angles = meta(T, 48, 128), meta(T, 128)

    def operations():
        for dtype, D, residual in ((torch.bfloat16, 8192, True), (torch.float32, 64, False)):
            x = meta(T, D, dtype=dtype)
            kernels.TRITON.rms_norm(x, x[0], 1e-5, x if residual else None)
        kernels.TRITON.silu_and_mul(meta(T, 2 * 14336))
        kernels.TRITON.rope_and_write_kv(qkv[:, :40], qkv[:, 40:], angles, angles, cache[0], cache[1],
                                         meta(T, dtype=torch.int64))
    names = [name for name, _, _ in compile_launches(target, operations)]
    assert names == ["_rms_norm_kernel"] * 2 + ["_silu_and_mul_kernel", "_rope_and_write_kv_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_attention_compiles_for_every_head_size(compile_launches, target, dtype):
    for d in (16, 24, 64, 80, 96, 128, 192, 256):
        for G in (1, 4, 8):
            assert len(compile_launches(target, attention(d, G, dtype))) == 3


def test_a_step_with_other_lengths_compiles_nothing_new():
    """The number of sequences, of splits and the width of the block table change from step to step; a kernel
    specialised on them would be compiled again in the middle of serving."""
    params = kernels._paged_attention_kernel.params + kernels._merge_splits_kernel.params
    fixed = {p.name for p in params if p.do_not_specialize}
    assert fixed == {"S", "max_splits", "bt_s"}


def test_backend_without_a_gpu():
    with pytest.raises(ValueError, match="--attention-backend triton.*'cpu'.*TRITON_INTERPRET"):
        kernels.select_backend("triton", "cpu")
    assert kernels.select_backend("triton", "cuda:1").name == kernels.select_backend("auto", "cuda").name == "triton"
    assert kernels.select_backend("torch", "cuda").name == kernels.select_backend("auto", "cpu").name == "torch"
    with pytest.raises(ValueError, match="'flash'.*auto, torch or triton"):
        kernels.select_backend("flash", "cpu")
