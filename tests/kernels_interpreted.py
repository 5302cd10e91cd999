"""Every kernel, interpreted, against its twin. Collected by test_kernels.py in a process of its own, with
TRITON_INTERPRET=1 set before Triton is imported: a process either interprets kernels or compiles them.

Every batch's pool is poisoned: a slot that no sequence owns holds NaN (see bench_kernels.example_batch).
"""
import contextlib
import pathlib

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import attention as attention_module
import kernels
import toys
from bench_kernels import LLAMA_8B, attend, cases, example_batch, rope_and_write
from worker import Worker

TINY = pathlib.Path(__file__).parent.parent / "models" / "tiny-llama3"
TWIN, KERNEL = kernels.TORCH, kernels.TRITON
TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.float16: dict(rtol=4e-3, atol=4e-3)}
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@triton.jit
def _dot16(a, b, c):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i)))


def bf16_dot_error():
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    c = torch.zeros(16, 16)
    _dot16[(1,)](a, b, c)
    return (c - a.float() @ b.float()).abs().max().item()


BF16_ERROR = bf16_dot_error()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if BF16_ERROR < 1e-3 else [])
TOLERANCE[torch.bfloat16] = dict(rtol=3e-2, atol=3e-2)


def test_canary_bf16_dot():
    """The interpreter keeps bf16 as uint16, and its tl.dot multiplies the bit patterns. As long as it does, no bf16
    case runs interpreted; where a Triton gets it right, DTYPES above has bf16 by itself."""
    if BF16_ERROR >= 1e-3:
        pytest.xfail(f"Triton {triton.__version__} interprets a bf16 tl.dot wrongly (off by {BF16_ERROR:.0e}): "
                     "bf16 is not covered here")


# -- guards: every tensor that a launcher allocates lies between guard values, and holds NaN until it is written ------

class Guarded(TorchFunctionMode):
    GUARD, WIDTH = 12344.0, 64

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function not in (torch.empty, torch.zeros, torch.Tensor.new_empty) or not made.numel():
            return made
        buffer = torch.full((made.numel() + 2 * self.WIDTH,), self.GUARD, dtype=made.dtype)
        inside = buffer[self.WIDTH:-self.WIDTH].fill_(0.0 if function is torch.zeros else torch.nan)
        self.buffers.append(buffer)
        return inside.view(made.shape)

    def check(self):
        assert self.buffers, "nothing was allocated"
        for buffer in self.buffers:
            for edge in (buffer[:self.WIDTH], buffer[-self.WIDTH:]):
                assert (edge == self.GUARD).all(), "a kernel wrote outside its result"


@contextlib.contextmanager
def guarded():
    with Guarded() as mode:
        yield
    mode.check()


def both(operation, dtype):
    """operation(namespace of operations), by twin and by guarded kernel: equal but for rounding  →  the kernel's."""
    want = operation(TWIN)
    with guarded():
        got = operation(KERNEL)
    for g, w in zip(got, want) if isinstance(got, tuple) else [(got, want)]:
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, **TOLERANCE[dtype])
    return got


# -- the row kernels --------------------------------------------------------------------------------------------------

@quick
@given(T=st.integers(1, 5), D=st.sampled_from([1, 16, 17, 96, 128, 1000]), dtype=st.sampled_from(DTYPES),
       add=st.booleans(), strided=st.booleans())
def test_rms_norm(T, D, dtype, add, strided):
    random = torch.Generator().manual_seed(T * D)
    x, r, w = (torch.randn(*shape, generator=random).to(dtype) for shape in ((T, 2 * D), (T, D), (D,)))
    x = x[:, D:] if strided else x[:, ::2]
    both(lambda ops: ops.rms_norm(x, w, 1e-5, r if add else None), dtype)


def test_rms_norm_of_large_values_in_fp16():
    """300 squared is past fp16's largest number; the sum is fp32."""
    x = torch.full((2, 64), 300.0, dtype=torch.float16)
    out, _ = both(lambda ops: ops.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.float16)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_row_kernels_take_an_empty_batch():
    """A step whose chunks all end before their prompts do has no row of logits to normalise."""
    assert KERNEL.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, torch.empty(0, 8))[0].shape == (0, 8)
    assert KERNEL.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)


@quick
@given(T=st.integers(1, 4), I=st.sampled_from([1, 24, 1023, 1024, 1025]), dtype=st.sampled_from(DTYPES))
def test_silu_and_mul(T, I, dtype):
    x = 8 * torch.randn(T, 2 * I, generator=torch.Generator().manual_seed(T * I)).to(dtype)
    both(lambda ops: ops.silu_and_mul(x), dtype)


@pytest.mark.parametrize("layout", range(4))
@settings(quick, max_examples=5)
@given(lens=st.lists(st.sampled_from([0, 1, 3, 4, 5, 9]), min_size=1, max_size=4), Hkv=st.sampled_from([1, 2]),
       G=st.sampled_from([1, 4, 8]), d=st.sampled_from([2, 24, 64, 80, 256]), block_size=st.sampled_from([1, 4, 24]),
       dtype=st.sampled_from(DTYPES))
def test_rope_and_write_kv(layout, lens, Hkv, G, d, block_size, dtype):
    """Rotated q; the whole pool afterwards, so that nothing else was written; padding (slot -1) written nowhere.
    Layouts of the pool: the model's; heads outside of slots; heads with guard values around each; elements outside of
    heads."""
    b = example_batch(lens, [max(n, 1) for n in lens], H=G * Hkv, Hkv=Hkv, d=d, block_size=block_size, dtype=dtype)
    pools = {}
    for ops in (TWIN, KERNEL):
        cache = torch.stack((b.k_cache, b.v_cache))                                      # [2, N, bs, Hkv, d]
        if layout == 1 and ops is KERNEL:
            cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
        elif layout == 2 and ops is KERNEL:
            cache = torch.nn.functional.pad(cache, (3, 5), value=7.0)[..., 3:-5]
        elif layout == 3 and ops is KERNEL:
            cache = cache.transpose(3, 4).contiguous().transpose(3, 4)
        pools[ops.name] = cache
        b.k_cache, b.v_cache = cache
        if ops is TWIN:
            want = rope_and_write(ops, b)
        else:
            with guarded():
                got = rope_and_write(ops, b)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])
    pool = pools["triton"]
    torch.testing.assert_close(pool[0], pools["torch"][0], **TOLERANCE[dtype], equal_nan=True)
    torch.testing.assert_close(pool[1], pools["torch"][1], rtol=0, atol=0, equal_nan=True)     # V is only moved
    if layout == 2:
        whole = torch.as_strided(pool, (*pool.shape[:-1], d + 8), pool.stride(), 0)
        assert (whole[..., :3] == 7).all() and (whole[..., -5:] == 7).all()


# -- attention --------------------------------------------------------------------------------------------------------

@st.composite
def batches(draw, max_sequences=4):
    """Lengths at the edges of tiles (16, 64), splits (64, see `small_split`) and blocks; any chunks; padding."""
    block_size = draw(st.sampled_from([1, 4, 8, 16, 24, 32, 256]))
    edges = sorted({max(e + i, 1) for e in (1, 16, 64, 128, block_size) for i in (-1, 0, 1) if e + i <= 257})
    seq_lens, q_lens = [], []
    for _ in range(draw(st.integers(1, max_sequences))):
        n = draw(st.sampled_from([0, *edges]))
        kind = draw(st.sampled_from(["decode", "prefill", "chunk"]))
        q_len = {"decode": 1, "prefill": min(n, 70)}.get(kind) or draw(st.integers(1, max(min(n, 40), 1)))
        seq_lens.append(n)
        q_lens.append(q_len if n else 1)
    Hkv, G = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4, 8]))
    return example_batch(seq_lens, q_lens, H=G * Hkv, Hkv=Hkv, d=draw(st.sampled_from([24, 64, 80, 128])),
                         block_size=block_size, dtype=draw(st.sampled_from(DTYPES)), seed=draw(st.integers(0, 9)))


@contextlib.contextmanager
def small_split(keys=64):
    """Splits of 64 keys instead of 512, so that a short context has several."""
    before, attention_module.SPLIT_STEP = attention_module.SPLIT_STEP, keys // 2
    try:
        yield
    finally:
        attention_module.SPLIT_STEP = before


@settings(quick, max_examples=20)
@given(b=batches(), split=st.sampled_from([64, 512]))
def test_paged_attention(b, split):
    with small_split(split):
        got = both(lambda ops: attend(ops, b), b.q.dtype)
    for row, n in zip(b.query_start_loc.tolist(), b.seq_lens.tolist()):
        assert n > 0 or not got[row].any(), "a padding row is zeros"


@settings(quick, max_examples=10)
@given(b=batches(max_sequences=5))
def test_a_sequence_gets_the_same_bits_alone_and_in_company(b):
    with small_split():
        together = attend(KERNEL, b)
        for s, (first, last) in enumerate(zip(b.query_start_loc.tolist(), b.query_start_loc[1:].tolist())):
            n_blocks = max(-(-int(b.seq_lens[s]) // b.k_cache.shape[1]), 1)
            alone = KERNEL.paged_attention(b.q[first:last], b.k_cache, b.v_cache, torch.tensor([0, last - first]).int(),
                                           b.seq_lens[s:s + 1], b.block_tables[s:s + 1, :n_blocks], b.scale)
            assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("d", [10, 16, 24, 64, 80, 96, 128, 192, 256])
def test_head_sizes(d):
    for dtype in DTYPES:
        b = example_batch([70, 33, 20], [1, 1, 3], H=4, Hkv=2, d=d, dtype=dtype)
        with small_split():
            both(lambda ops: attend(ops, b), dtype)


def test_many_splits():
    """1,040 keys in splits of 16 are 65: two turns of what the merge adds up at once, and one more. Later keys score
    higher, so that what was added up first must be scaled down."""
    for dtype in DTYPES[:1]:
        b = example_batch([1040, 30], [1, 1], H=2, Hkv=1, d=16, dtype=dtype)
        keys = b.k_cache.flatten(0, 1)                                                   # [slots, Hkv, d]
        for p in range(1040):
            keys[b.block_tables[0, p // 16] * 16 + p % 16] += b.q[0, 0] * (p // 64) / 16
        with small_split(16):
            both(lambda ops: attend(ops, b), dtype)


def test_rows_without_a_key_are_zeros():
    """Five queries over three keys, which no scheduler asks for: the first two see nothing."""
    b = example_batch([5], [5], H=2, Hkv=1, d=16)
    b.seq_lens = torch.tensor([3]).int()
    got = attend(KERNEL, b)
    b.q, b.query_start_loc = b.q[2:], torch.tensor([0, 3]).int()
    assert not got[:2].any()
    torch.testing.assert_close(got[2:], attend(TWIN, b))


@pytest.mark.parametrize("G", [3, 7, 12, 17])
def test_groups_that_are_no_power_of_two(G):
    for dtype in DTYPES:
        b = example_batch([70, 20], [1, 20], H=2 * G, Hkv=2, d=32, dtype=dtype)
        both(lambda ops: attend(ops, b), dtype)


def test_poison_of_any_kind_changes_no_bit():
    """NaN beyond a sequence's end, or 1e30: the same bits come out."""
    results = []
    for fill in (torch.nan, 1e30, -torch.inf):
        b = example_batch([1, 15, 16, 17, 33, 40], [1, 1, 1, 1, 33, 7], Hkv=1, d=24, block_size=16, fill=fill)
        results.append(attend(KERNEL, b))
    assert results[0].isfinite().all() and all(torch.equal(r, results[0]) for r in results)


def test_very_low_scores_lose_to_no_sentinel():
    """Scores of about -1e5 are below any 'minus infinity' like -1e4: masked keys must keep a weight of exactly 0."""
    b = example_batch([40, 21], [9, 1], H=2, Hkv=1, d=64)
    b.q, b.k_cache = torch.full_like(b.q, -100.0), b.k_cache.abs() * 100.0
    both(lambda ops: attend(ops, b), torch.float32)
    changed = b.v_cache.clone()
    last = 39                                                        # only the chunk's last query sees position 39
    changed[b.block_tables[0, last // 16].item(), last % 16] += 1000.0
    before = attend(KERNEL, b)
    b.v_cache = changed
    assert torch.equal(attend(KERNEL, b)[:8], before[:8]) and torch.equal(attend(KERNEL, b)[9], before[9])


def test_pools_of_any_layout():
    b = example_batch([70, 20], [1, 9], H=2, Hkv=2, d=24, block_size=4)
    dense = attend(KERNEL, b)
    pool = torch.stack((b.k_cache, b.v_cache))                                           # [2, N, bs, Hkv, d]
    for other in (torch.nn.functional.pad(pool, (1, 1), value=torch.nan)[..., 1:-1],
                  pool.transpose(2, 3).contiguous().transpose(2, 3), pool.transpose(3, 4).contiguous().transpose(3, 4)):
        b.k_cache, b.v_cache = other
        assert torch.equal(attend(KERNEL, b), dense)
    b.q = b.q.transpose(0, 1).contiguous().transpose(0, 1)
    b.block_tables = b.block_tables.T.contiguous().T
    assert torch.equal(attend(KERNEL, b), dense)


def test_rows_that_no_sequence_owns_change_no_other():
    b = example_batch([9, 20], [1, 4], H=2, Hkv=1, d=16)
    want = attend(KERNEL, b)
    b.q = torch.cat((b.q, torch.full((3, 2, 16), torch.nan)))
    assert torch.equal(attend(KERNEL, b)[:5], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, L, d", [(1, 1, 16), (16, 32, 64), (37, 70, 32), (3, 200, 16)])
def test_dense_attention(M, L, d, dtype):
    """The rung below: the online softmax of one head. Late keys score highest, so that what was summed is scaled."""
    q, k, v = (torch.randn(n, d, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (M, L, L + 1))
    k = (k + q[:1] * torch.arange(L)[:, None] / L).to(dtype)
    with guarded():
        got = attention_module.dense_attention_triton(q, k, v[:L], d ** -0.5)
    want = attention_module.dense_attention(q.float(), k.float(), v[:L].float(), d ** -0.5)
    torch.testing.assert_close(got.float(), want, **TOLERANCE[dtype])


def test_the_paged_kernel_is_the_dense_one_with_a_block_table():
    b = example_batch([90], [1], H=1, Hkv=1, d=64, block_size=8)
    slots = (b.block_tables[0].long()[:, None] * 8 + torch.arange(8)).flatten()[:90]
    k, v = (cache.flatten(0, 1)[slots, 0].contiguous() for cache in (b.k_cache, b.v_cache))
    torch.testing.assert_close(attend(KERNEL, b)[0], attention_module.dense_attention_triton(b.q[0].contiguous(), k, v, b.scale))


def test_passes_and_strides_change_no_bit(monkeypatch):
    """Passes of 4 sequences, scratch for 4 and full of what an earlier batch left there, one multiprocessor or many."""
    b = example_batch([70, 3, 0, 140, 20, 129, 16], [1, 1, 1, 1, 20, 1, 5], H=2, Hkv=1, d=16)
    want = both(lambda ops: attend(ops, b), torch.float32)
    grids, merge = [], attention_module._merge_kernel
    monkeypatch.setattr(attention_module, "_merge_kernel", type("", (), {
        "__getitem__": lambda self, grid: grids.append(grid) or merge[grid]})())
    for sms, sequences, a_pass in ((1, 256, 8), (9, 4, 4), (2, 256, 4)):
        monkeypatch.setattr(attention_module, "card_of", lambda device: (sms, 227 << 10, 228 << 10))
        monkeypatch.setattr(attention_module, "SEQUENCES", sequences)
        monkeypatch.setattr(attention_module, "SCRATCH", a_pass * 2 * 3 * (16 + 2))               # H 2, 3 splits
        scratch = torch.full((attention_module.SCRATCH,), torch.nan)
        got = attention_module.paged_attention_triton(b.q, b.k_cache, b.v_cache, b.query_start_loc, b.seq_lens, b.block_tables,
                                             b.scale, scratch=scratch)
        assert torch.equal(got, want) and scratch.isfinite().any()
    assert [n for n, H in grids] == [7, 4, 3, 4, 3]


@triton.jit
def _split_keys_of(lengths, out, STEP: tl.constexpr, MOST: tl.constexpr):
    i = tl.program_id(0)
    tl.store(out + i, attention_module._split_keys(tl.load(lengths + i).to(tl.int32), STEP, MOST))


def test_splits_are_a_sequences_own_matter():
    """At least 64 keys, at most 128 splits, and enough of both for 132 multiprocessors: see SPLIT_STEP."""
    step, most = attention_module.SPLIT_STEP, attention_module.MAX_SPLITS

    lengths = [1, 64, 65, 1024, 1025, 5440, 5441, 8192, 8193, 131_072, 1_000_000]
    keys = {L: max(-(-L // (step * most)), 2) * step for L in lengths}
    splits = {L: -(-L // keys[L]) for L in lengths}
    got = torch.zeros(len(lengths), dtype=torch.int32)
    _split_keys_of[len(lengths),](torch.tensor(lengths), got, step, most)
    assert got.tolist() == list(keys.values())
    assert [splits[L] for L in (1, 64, 65)] == [1, 1, 2] and max(splits.values()) == 128
    assert 8 * splits[1024] < 132 <= 8 * splits[1025]
    assert splits[5440] < 86 <= min(-(-L // (max(-(-L // (step * most)), 2) * step)) for L in range(5441, 140_000))


def test_the_smallest_tile_is_always_left(monkeypatch):
    """On a card where all tiles but the smallest are too large, the smallest runs; where even that is, it is said."""
    b = example_batch([70, 33], [1, 20], H=4, Hkv=2, d=64, dtype=torch.float16)
    monkeypatch.setattr(attention_module, "card_of", lambda device: (2, 12 * 1024, 13 * 1024))
    assert attention_module.choose_tile(False, 64, 2, 2, (2, 12 * 1024, 13 * 1024))[0][:2] == (16, 16)
    both(lambda ops: attend(ops, b), torch.float16)
    monkeypatch.setattr(attention_module, "card_of", lambda device: (2, 1024, 1024))
    with pytest.raises(ValueError, match="head size 64.*1024 bytes.*--attention-backend torch"):
        attend(KERNEL, b)


def test_bench_cases_agree_with_pytorch():
    """Each case of the bench, at sizes that the interpreter can take: its operation equals PyTorch's."""
    small = dict(LLAMA_8B, H=4, Hkv=2, d=32, D=64, I=48)
    groups = set()
    sizes = dict(shapes=(small,), batches=(1, 3), contexts=(20, 70), skewed=(70, 5, 5), chunks=((18, 18), (7, 20)),
                 rows=(3,))
    for group, label, n_bytes, flops, ours, theirs in cases("cpu", torch.float32, **sizes):
        got = ours()
        groups.add(group)
        assert n_bytes > 0 and (flops > 0) == (group in ("decode", "prefill")), label
        if theirs:
            torch.testing.assert_close(got, theirs(), **TOLERANCE[torch.float32])
    assert groups == {"decode", "prefill", "norm", "KV write", "SwiGLU"}


def test_backend():
    ops = kernels.select_backend("triton", "cpu", torch.float32, 64, 4)                  # interpreted, so it may run here
    assert ops.name == "triton" and ops.paged_attention.keywords["scratch"].numel() == attention_module.SCRATCH
    assert kernels.select_backend("torch", "cpu", torch.float32, 64, 4) is TWIN


def test_warm_up_meets_every_kernel_and_no_slot(monkeypatch):
    """What a worker runs on a GPU before the first request. Nobody reads the logits: the pool is what could suffer."""
    launched = set()

    def watched(name, kernel):
        run = lambda self, grid: lambda *args, **kwargs: (
            launched.add((name, kwargs.get("DECODE"), name == "_rms_norm_kernel" and args[1] is not None)),
            kernel[grid](*args, **kwargs))
        return type("", (), {"__getitem__": run})()

    for name in ("_rms_norm_kernel", "_rope_and_write_kv_kernel", "_silu_and_mul_kernel", "_paged_attention_kernel",
                 "_merge_kernel"):
        module = attention_module if hasattr(attention_module, name) else kernels
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    worker = Worker(TINY, torch.float32, attention_backend="triton")
    worker.init_kv_cache(3, 16)
    for cache in (*worker.kv_cache.k, *worker.kv_cache.v):
        cache.fill_(7.0)
    worker.warm_up(16)
    assert all((cache == 7.0).all() for cache in (*worker.kv_cache.k, *worker.kv_cache.v))
    assert len(launched) == 7, launched                  # the norm with and without a residual; decodes and chunks


def test_generate_through_the_kernels():
    """The whole path, tiny model: chunks, decodes, a shared prefix, a pool full of NaN: the ids that the twins give."""
    prompt = list(range(100, 109))
    ids = {}
    for backend in ("torch", "triton"):
        engine = toys.make_engine(TINY, attention_backend=backend, max_num_batched_tokens=8, num_kv_blocks=21)
        assert engine.executor.model.ops.name == backend
        ids[backend] = toys.ids_of(toys.run(engine, [(p, toys.greedy(2)) for p in (prompt, prompt[:8] + [7], [1999])]))
        engine.close()
    assert ids["triton"] == ids["torch"] and all(len(i) == 2 for i in ids["torch"])
