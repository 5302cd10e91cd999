"""The twins against arithmetic done the slow way; the Triton kernels against the twins.

Triton decides as a kernel is decorated whether it will be interpreted or compiled, so a process can do one or the
other: kernels_interpreted.py and kernels_compiled.py, beside this file, run in processes of their own.
With a GPU: pytest -m gpu.
"""
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import kernels
from bench_kernels import attend, example_batch, rope_and_write

HERE = pathlib.Path(__file__).resolve().parent
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")]


# -- The twins --------------------------------------------------------------------------------------------------------

def attention_the_slow_way(b):
    """One query, one head, one key at a time, in fp64  →  [T, H, d]."""
    (T, H, d), bs, Hkv = b.q.shape, b.k_cache.shape[1], b.k_cache.shape[2]
    out = torch.zeros(T, H, d, dtype=torch.float64)
    starts = b.query_start_loc.tolist()
    for s, n in enumerate(b.seq_lens.tolist()):
        for row in range(starts[s], starts[s + 1]):
            visible = n - (starts[s + 1] - starts[s]) + (row - starts[s]) + 1
            for h in range(H):
                at = [(int(b.block_tables[s, p // bs]), p % bs, h * Hkv // H) for p in range(visible)]
                if at:
                    k = torch.stack([b.k_cache[i] for i in at]).double()                 # [L, d]
                    v = torch.stack([b.v_cache[i] for i in at]).double()                 # [L, d]
                    out[row, h] = torch.softmax(k @ b.q[row, h].double() * b.scale, dim=0) @ v
    return out


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_attention_twin(dtype, tolerance, block_size):
    b = example_batch([1, 5, 17, 0, 9, 16, 12, 3], [1, 1, 1, 1, 9, 4, 2, 3], H=4, Hkv=2, d=24, block_size=block_size,
                      dtype=dtype)
    got, want = attend(kernels.TORCH, b).double(), attention_the_slow_way(b)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_attention_twin_reads_and_writes_through_strides():
    """A cache whose heads stand before its slots, as some engines lay it out, seen in our order: it holds what is written."""
    b = example_batch([6, 9], [2, 9], H=4, Hkv=2, d=8, block_size=4)
    want = rope_and_write(kernels.TORCH, b), b.k_cache.clone(), b.v_cache.clone(), attend(kernels.TORCH, b)
    c = example_batch([6, 9], [2, 9], H=4, Hkv=2, d=8, block_size=4)
    c.k_cache, c.v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.k_cache, c.v_cache))
    assert not c.k_cache.is_contiguous()
    got = rope_and_write(kernels.TORCH, c), c.k_cache, c.v_cache, attend(kernels.TORCH, c)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_row_twins():
    x, r, w = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).double()[..., :].unbind()
    out, residual = kernels.rms_norm(x.float(), w[0].float(), 1e-5, r.float())
    torch.testing.assert_close(residual.double(), x + r)
    for i, row in enumerate(x + r):
        rms = math.sqrt(sum(float(e) ** 2 for e in row) / 8 + 1e-5)
        torch.testing.assert_close(out[i].double(), row / rms * w[0], rtol=1e-5, atol=1e-6)
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(kernels.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)


def test_rope_twin_turns_pairs_in_the_complex_plane():
    x, angles = torch.randn(5, 3, 8, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    cos, sin = angles.cos(), angles.sin()
    got = kernels.apply_rope(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1))


def test_kv_write_twin():
    """K is turned and V isn't; every other slot stays as it was; slot -1 writes nothing."""
    b = example_batch([6, 0, 3], [2, 1, 3], H=2, Hkv=1, d=8, block_size=4, fill=9.0)
    before, cos, sin = b.k_cache.clone(), b.cos, b.sin
    rope_and_write(kernels.TORCH, b)
    real = b.slot_mapping >= 0
    assert (~real).sum() == 1
    slots = b.slot_mapping[real]
    assert torch.equal(b.k_cache.flatten(0, 1)[slots], kernels.apply_rope(b.k, cos, sin)[real])
    assert torch.equal(b.v_cache.flatten(0, 1)[slots], b.v[real])
    others = torch.ones(before.shape[0] * 4, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(b.k_cache.flatten(0, 1)[others], before.flatten(0, 1)[others])


# -- The kernels, in processes of their own ---------------------------------------------------------------------------

def run(*command, interpret=False):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, *command], env=env, cwd=HERE.parent, capture_output=True, text=True,
                          timeout=580)
    return done.returncode, done.stdout + done.stderr


def inner_pytest(file, *options, interpret):
    code, output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file), *options, interpret=interpret)
    assert code == 0, output


@pytest.mark.timeout(600)
def test_interpreted_kernels_equal_the_twins():
    inner_pytest("kernels_interpreted.py", interpret=True)


@pytest.mark.timeout(600)
def test_kernels_compile_for_three_cards():
    inner_pytest("kernels_compiled.py", interpret=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_kernels_compile_for_every_head_size(dtype):
    inner_pytest("kernels_compiled.py", "-m", "slow", "-k", dtype, interpret=False)


def test_modules_work_without_triton():
    """macOS has no Triton: the twins, and a clear refusal of --attention-backend triton."""
    code, output = run("-c", """
import sys
sys.modules["triton"] = None                                         # any import of it raises ImportError
import torch, kernels
ops = kernels.select_backend("torch", "cpu", torch.float32, 64, 4)
assert ops is kernels.TORCH and kernels.select_backend("auto", "cuda", torch.float32, 64, 4) is ops
print(ops.silu_and_mul(torch.ones(1, 4)))
try:
    kernels.select_backend("triton", "cuda", torch.float32, 64, 4)
except ValueError as error:
    assert "not installed" in str(error), error
else:
    raise SystemExit("not refused")
""")
    assert code == 0, output


def test_bench_says_that_there_is_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, output = run("kernels.py", "--bench")
    assert code == 1 and "no GPU" in output


def test_demo_names_what_is_not_installed(tmp_path):
    """Under its interpreter Triton imports NumPy; without either the kernels are not there."""
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError('as if it, or NumPy, were not installed')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run([sys.executable, "kernels.py"], cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 2 and "pip install triton numpy" in process.stderr and "Traceback" not in process.stderr, process.stderr


@pytest.mark.slow
def test_demo():
    code, output = run("kernels.py")
    assert code == 0 and output.count("paged_attention") == 8 and "nan ms" not in output, output


# -- On a GPU ---------------------------------------------------------------------------------------------------------

class TestGPU:
    pytestmark = gpu
    TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

    def equal(self, got, want, dtype):
        tolerance = self.TOLERANCE[dtype]
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("d, block_size", [(16, 16), (24, 1), (64, 4), (80, 24), (96, 32), (128, 16), (256, 256)])
    def test_attention(self, dtype, d, block_size):
        b = example_batch([1, 17, 600, 2000, 33, 700, 0], [1, 1, 1, 1, 33, 90, 1], d=d, block_size=block_size,
                          dtype=dtype)
        want = attend(kernels.TORCH, b)
        self.equal(attend(kernels.TRITON, to_gpu(b)), want, dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_row_kernels(self, dtype):
        b = example_batch([40, 0, 9], [40, 1, 1], H=32, Hkv=8, d=128, dtype=dtype)
        c = to_gpu(b)
        self.equal(rope_and_write(kernels.TRITON, c), rope_and_write(kernels.TORCH, b), dtype)
        for mine, its in ((b.k_cache, c.k_cache), (b.v_cache, c.v_cache)):
            self.equal(its.nan_to_num(7.0), mine.nan_to_num(7.0), dtype)
        x, r, w = (torch.randn(33, 8192).to(dtype) for _ in range(3))
        got = kernels.TRITON.rms_norm(x.cuda(), w[0].cuda(), 1e-5, r.cuda())
        for g, t in zip(got, kernels.rms_norm(x, w[0], 1e-5, r)):
            self.equal(g, t, dtype)
        self.equal(kernels.TRITON.silu_and_mul(x.cuda()), kernels.silu_and_mul(x), dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_same_bits_alone_and_in_company(self, dtype):
        b = to_gpu(example_batch([1, 600, 2000, 33, 700], [1, 1, 1, 33, 90], H=32, Hkv=8, d=128, dtype=dtype))
        together = attend(kernels.TRITON, b)
        for s, (first, last) in enumerate(zip(b.query_start_loc.tolist(), b.query_start_loc[1:].tolist())):
            alone = kernels.TRITON.paged_attention(
                b.q[first:last], b.k_cache, b.v_cache, torch.tensor([0, last - first], device="cuda").int(),
                b.seq_lens[s:s + 1], b.block_tables[s:s + 1], b.scale)
            assert torch.equal(alone, together[first:last])

    def test_a_pool_of_more_than_2_to_the_31_elements(self):
        """70,000 blocks of 16 slots, 8 heads, 256 elements: a 32-bit offset would wrap before the last block."""
        if torch.cuda.mem_get_info()[0] < 24 << 30:
            pytest.skip("needs 24 GB of GPU memory")
        small = to_gpu(example_batch([40, 33], [1, 33], H=8, Hkv=8, d=256, dtype=torch.bfloat16))
        large = to_gpu(small)
        N = 70_000
        move = lambda cache: torch.zeros(N, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        large.k_cache, large.v_cache = move(small.k_cache), move(small.v_cache)
        shift = N - len(small.k_cache)
        large.k_cache[shift:], large.v_cache[shift:] = small.k_cache, small.v_cache
        large.block_tables = small.block_tables + shift
        large.slot_mapping = small.slot_mapping + shift * 16
        for b in (small, large):
            b.out = rope_and_write(kernels.TRITON, b), attend(kernels.TRITON, b)
        assert torch.equal(large.k_cache[shift:].nan_to_num(), small.k_cache.nan_to_num())
        assert all(torch.equal(x, y) for x, y in zip(small.out, large.out))

    def test_decodes_in_a_cuda_graph(self):
        """Captured once, replayed over other lengths written into the same tensors: equal to eager, bit for bit."""
        b = to_gpu(example_batch([900, 5, 40, 0], [1, 1, 1, 1], H=8, Hkv=1, d=128, dtype=torch.bfloat16))
        attend(kernels.TRITON, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(kernels.TRITON, b)
        for lens in ([900, 5, 40, 0], [17, 5, 1, 0], [700, 0, 2, 0]):
            b.seq_lens.copy_(torch.tensor(lens))
            graph.replay()
            assert torch.equal(out, attend(kernels.TRITON, b))


def to_gpu(b):
    """A copy of a batch on the GPU. q, k and v are slices of one tensor there, too."""
    qkv = torch.cat((b.q, b.k, b.v), dim=1).cuda()
    copy = type(b)(**{name: x.cuda().clone() if isinstance(x, torch.Tensor) else x for name, x in vars(b).items()})
    copy.q, copy.k, copy.v = qkv.split((b.q.shape[1], b.k.shape[1], b.v.shape[1]), dim=1)
    copy.qk = qkv[:, :-b.v.shape[1]]
    return copy
