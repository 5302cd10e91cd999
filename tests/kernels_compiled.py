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

import attention as attention_module
import kernels

# (target, what attention_module.card_of says of an A100, an H100, an MI300X).
TARGETS = {"sm_80": (GPUTarget("cuda", 80, 32), (108, 163 * 1024, 164 * 1024)),
           "sm_90": (GPUTarget("cuda", 90, 32), (132, 227 * 1024, 228 * 1024)),
           "gfx942": (GPUTarget("hip", "gfx942", 64), (304, 64 * 1024, 64 * 1024))}
# Bytes of memory that a thread takes for want of registers. What is 8 here is held outside of the loops over keys.
SPILL_LIMIT = 64
# For 70B at TP 8 in bf16. A loop over keys waits once a turn, until all but `under way` of its copies are there, two
# (K and V) a tile. (gfx942 copies by way of registers, and waits for nothing by name.)
FIGURES = {("sm_80", "decode"): dict(registers=128, spilled=0, programs=4, under_way=2),
           ("sm_80", "chunk"): dict(registers=255, spilled=8, programs=1, under_way=2),
           ("sm_90", "decode"): dict(registers=168, spilled=0, programs=3, under_way=4),
           ("sm_90", "chunk"): dict(registers=255, spilled=8, programs=1, under_way=2),
           ("gfx942", "decode"): dict(registers=128, spilled=0, programs=4, under_way=None),
           ("gfx942", "chunk"): dict(registers=256, spilled=0, programs=1, under_way=None)}
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


def figures(compiled, folder, card):
    """What decides how fast a compiled kernel can be: registers a thread, bytes spilled a thread, shared memory, the
    programs that fit on a multiprocessor at a time, and for how few copies each wait leaves the loop over keys."""
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        number = lambda field: int(re.search(rf"\.{field}:\s*(\d+)", compiled.asm["amdgcn"])[1])
        registers, spilled, waits = number("vgpr_count"), number("private_segment_fixed_size"), []
        fit = min(512 // (-(-registers // 8) * 8), 8) * 4 // warps           # 4 units of 512 registers, 8 waves at most
    else:
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
        registers, spilled = (int(re.search(rf"{field}:(\d+)", report.stdout)[1]) for field in ("REG", "STACK"))
        waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", compiled.asm["ptx"])]
        fit = min(65536 // (-(-registers // 8) * 8 * 32 * warps), 64 // warps)           # registers come in eights
        shared += 1024                                                       # each program's own
    return dict(registers=registers, spilled=spilled, shared=shared, waits=waits,
                programs=min(fit, card[2] // max(shared, 1)))


@pytest.fixture
def compile_launches(monkeypatch, tmp_path):
    """f(target name, operation): performs the operation with launches replaced  →  [(kernel name, compiled, kwargs,
    figures)], each checked for spills and shared memory."""
    def f(name, operation):
        target, card = TARGETS[name]
        seen = []

        def run(self, *args, grid, warmup, **kwargs):
            options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")}
            compiled = triton.compile(source_of(self, args, kwargs), target=target, options=options)
            found = figures(compiled, tmp_path, card)
            what = f"{self.__name__} for {name} with {options}: {found}"
            assert compiled.metadata.shared <= card[1] and found["spilled"] <= SPILL_LIMIT, what
            if "TILE" in kwargs and target.backend == "cuda":
                said = attention_module.tile_bytes(kwargs["BLOCK_M"], kwargs["TILE"], options["num_stages"], kwargs["BLOCK_D"],
                                          args[1].element_size())
                assert compiled.metadata.shared <= said, what + f", but tile_bytes says {said}"
            seen.append((self.__name__, compiled, kwargs, found))
        monkeypatch.setattr(triton.JITFunction, "run", run)
        monkeypatch.setattr(attention_module, "card_of", lambda device: card)
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
    assert [(name, kwargs.get("DECODE")) for name, _, kwargs, _ in seen] == [
        ("_paged_attention_kernel", True), ("_paged_attention_kernel", False), ("_merge_kernel", None)]
    for _, compiled, kwargs, found in seen[:2]:
        # A slot's offset can pass 2^31 elements: both loops add 64-bit offsets to the pointers of K and of V.
        tile = rf"tensor<{kwargs['TILE']}x(?:1x|{kwargs['BLOCK_D']}x)"
        wide = re.findall(rf"tt\.addptr .*{tile}!tt\.ptr<\w+>>, {tile}i64>", compiled.asm["ttir"])
        assert len(wide) >= 4, f"{len(wide)} of 4 address computations are 64 bits wide"
        # As many decode programs are started as the arithmetic lets abreast: they must fit.
        _, programs = attention_module.choose_tile(kwargs["DECODE"], d, G, dtype.itemsize, TARGETS[target][1])
        assert found["programs"] >= programs, found
        if d == 128:
            want = dict(FIGURES[target, "decode" if kwargs["DECODE"] else "chunk"])
            if (under_way := want.pop("under_way")) is not None:
                # Both loops, the one without a mask and the one with, wait so once a turn, and for all at their end.
                assert sorted(found["waits"]) == [0, 0, under_way, under_way], found
                assert under_way == 2 * (kwargs["num_stages"] - 2)
            assert found["registers"] <= want["registers"] and found["spilled"] <= want["spilled"], found
            assert found["programs"] >= want["programs"], found
            if target == "sm_90" and not kwargs["DECODE"]:
                assert "wgmma" in compiled.asm["ptx"], "not on Hopper's matrix instructions"


def test_a_score_costs_one_multiply_add(compile_launches):
    """exp2(score * scale - shift): the multiplication is folded into the subtraction. What is left to subtract alone is
    m_i - shift, a few rows a thread."""
    decode = compile_launches("sm_90", attention(128, 8, torch.bfloat16))[0][1].asm["ptx"]
    exponentials, folded = len(re.findall("ex2.approx", decode)), len(re.findall("fma.rn.f32", decode))
    assert folded >= exponentials - len(re.findall("sub.f32|sub.rn.f32", decode)) > 0


def test_a_tile_inside_one_block_needs_one_block_number(compile_launches):
    """With blocks of 64 a tile of 32 keys lies in one: no tile of block numbers is read."""
    for block_size, gathers in ((16, True), (64, False)):
        seen = compile_launches("sm_80", attention(128, 8, torch.bfloat16, block_size=block_size))
        for _, compiled, kwargs, _ in seen[:2]:
            found = re.search(rf"tt\.load .*tensor<{kwargs['TILE']}x!tt\.ptr<i32>>", compiled.asm["ttir"])
            assert bool(found) == gathers, (block_size, kwargs["TILE"])


def test_some_tile_fits_on_every_card():
    """Also on the cards that nothing is compiled for here: 99 KiB of 100 (RTX 30 and 40), 64 of 64 (Turing)."""
    for shared, shared_sm in ((99, 100), (64, 64), (163, 164), (227, 228)):
        for d in (16, 64, 128, 256):
            for size in (2, 4):
                for decode in (True, False):
                    card = (84, shared * 1024, shared_sm * 1024)
                    tile, programs = attention_module.choose_tile(decode, d, 8, size, card)
                    rows, keys, _, stages = tile
                    assert attention_module.tile_bytes(rows, keys, stages, d, size) <= min(shared, shared_sm // programs) * 1024


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
    names = [name for name, *_ in compile_launches(target, operations)]
    assert names == ["_rms_norm_kernel"] * 2 + ["_silu_and_mul_kernel", "_rope_and_write_kv_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_attention_compiles_for_every_head_size(compile_launches, target, dtype):
    for d, G in ((16, 1), (24, 4), (64, 8), (80, 1), (96, 4), (128, 1), (128, 4), (192, 8), (256, 1), (256, 8)):
        assert len(compile_launches(target, attention(d, G, dtype))) == 3


def test_a_step_with_other_lengths_compiles_nothing_new(monkeypatch):
    """The number of sequences, of splits, and the width of the block table change from step to step; a kernel
    specialised on them would be compiled in the middle of serving. What the warm-up compiles is all there is: it has a
    chunk, decodes, and a table with room for more than one split."""
    keys = set()
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: keys.add(
        (self.__name__, source_of(self, args, kwargs).hash())))
    monkeypatch.setattr(attention_module, "card_of", lambda device: TARGETS["sm_90"][1])
    attention(128, 8, torch.bfloat16, S=2, T=3, B=5)()
    warm = set(keys)
    assert len(warm) == 3
    for S, T, B in ((1, 1, 1), (1, 16, 4), (16, 16, 16), (33, 2048, 513), (300, 300, 8192), (999, 8000, 64)):
        attention(128, 8, torch.bfloat16, S=S, T=T, B=B)()
    assert keys == warm


def test_a_batch_of_any_size_fits_into_the_scratch(monkeypatch):
    """What a pass can need is within SCRATCH, and every sequence is in one pass."""
    passes = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: passes.append(
        (dict(zip(self.arg_names, args)), grid)) if kwargs.get("DECODE") else None)
    monkeypatch.setattr(attention_module, "card_of", lambda device: TARGETS["sm_90"][1])
    for d, G, Hkv in ((128, 8, 1), (128, 4, 8), (128, 8, 16), (256, 4, 4)):
        for S, B in ((1, 8192), (256, 8192), (300, 4), (1024, 8192), (1024, 40)):
            passes.clear()
            attention(d, G, torch.bfloat16, Hkv=Hkv, S=S, T=S, B=B)()
            assert sum(len(args["seq_lens"]) for args, _ in passes) == S
            for args, grid in passes:
                n = len(args["seq_lens"])
                assert n <= attention_module.SEQUENCES and args["S"] == n
                assert n * args["H"] * args["most_splits"] * (d + 2) == args["part_ptr"].numel() <= attention_module.SCRATCH
                assert grid[0] * Hkv <= 132 * 3 + Hkv, "no more programs than the card holds"
                assert args["query_start_loc"].storage_offset() % 4 == 0, "a slice that is not aligned compiles anew"


def test_backend_without_a_gpu(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "empty", lambda *shape, device: made.append((shape, device)))
    with pytest.raises(ValueError, match="--attention-backend triton.*'cpu'.*TRITON_INTERPRET"):
        kernels.select_backend("triton", "cpu", torch.float32, 64, 4)
    select = lambda name, device: kernels.select_backend(name, device, torch.float32, 64, 4).name
    assert select("triton", "cuda:1") == select("auto", "cuda") == "triton"
    assert made == [((attention_module.SCRATCH,), "cuda:1"), ((attention_module.SCRATCH,), "cuda")], "the scratch is made once a backend"
    assert select("torch", "cuda") == select("torch", "cpu") == "torch"
    with pytest.raises(ValueError, match="'flash'.*auto, torch, triton or cpu"):
        kernels.select_backend("flash", "cpu", torch.float32, 64, 4)
