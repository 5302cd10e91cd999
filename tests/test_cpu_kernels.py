"""cpu_kernels.c against arithmetic in fp64, and against the twins; how it is compiled, and what happens where it can't be.

That a loop is a vector loop is asked of the compiler and of the machine code, not of a clock.
"""
import multiprocessing
import os
import pathlib
import platform
import random
import re
import shutil
import subprocess

import pytest
import torch

import cpu_kernels
import kernels
from bench_kernels import attend, example_batch, rope_and_write
from nano_serve import EMBEDDED_MODEL, LLM, SamplingParams
from toys import greedy, ids_of, make_engine, prompts_of, run, toy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}          # bf16: one rounding of the result, and those of p
X86 = platform.machine() == "x86_64"
VARIANTS = ["native"] + ["x86-64-v3", "x86-64"] * X86            # AVX2, and SSE2 alone: four floats a vector, as on ARM

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="no C compiler")


def ops_for(dtype=torch.float32, d=64, G=4, variant="native"):
    """The operations as they are, or as another x86 CPU would have them."""
    if variant == "native":
        return cpu_kernels.backend(dtype, d, G)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "FLAGS", (*cpu_kernels.FLAGS, f"-march={variant}"))
        return cpu_kernels.backend.__wrapped__(dtype, d, G)


# -- 1. Results -------------------------------------------------------------------------------------------------------

def exact_attention(b):
    """In fp64  →  [T, H, d]."""
    (T, H, d), bs, Hkv = b.q.shape, b.k_cache.shape[1], b.k_cache.shape[2]
    out, starts = torch.zeros(T, H, d, dtype=torch.float64), b.query_start_loc.tolist()
    for s, L in enumerate(b.seq_lens.tolist()):
        p, rows = torch.arange(L), slice(starts[s], starts[s + 1])
        at = b.block_tables[s, p // bs].long(), p % bs
        k, v = (x[at].double().repeat_interleave(H // Hkv, 1) for x in (b.k_cache, b.v_cache))           # [L, H, d]
        scores = torch.einsum("qhd,khd->hqk", b.q[rows].double() * b.scale, k)
        hidden = p > torch.arange(L - scores.shape[1], L)[:, None]
        if L:
            out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out


def random_lengths(rnd):
    """1 to 8 sequences of 0 to 700 tokens: padding, decodes, chunks, whole prompts  →  seq_lens, q_lens."""
    lens = [rnd.choice([0, 1, 2, rnd.randint(3, 40), rnd.randint(100, 700)]) for _ in range(rnd.randint(1, 8))]
    return lens, [rnd.choice([1, 1, rnd.randint(1, max(L, 1)), max(L, 1)]) for L in lens]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H, Hkv, d", [(9, 3, 64), (4, 2, 24), (3, 3, 128), (16, 1, 80), (6, 2, 8), (4, 2, 10), (2, 1, 256)])
def test_attention(variant, dtype, H, Hkv, d):
    """Ragged batches over a pool that is NaN wherever no sequence is, blocks of 1 to 48 slots."""
    if variant != "native" and d not in (64, 80):
        pytest.skip("two head sizes show what differs between CPUs")
    ops = ops_for(dtype, d, H // Hkv, variant)
    for seed in range(5):
        rnd = random.Random(seed)
        lens, q_lens = random_lengths(rnd)
        b = example_batch(lens, q_lens, H, Hkv, d, rnd.choice([1, 3, 4, 16, 48]), dtype, seed=seed)
        torch.testing.assert_close(attend(ops, b).double(), exact_attention(b), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_attention(dtype):
    """32,768 keys of a decode and of a chunk's end, beside a sequence of one token."""
    b = example_batch([32768, 1, 32768], [1, 1, 5], H=2, Hkv=1, d=16, dtype=dtype)
    torch.testing.assert_close(attend(ops_for(dtype, 16, 2), b).double(), exact_attention(b), rtol=TOLERANCE[dtype],
                               atol=TOLERANCE[dtype])


def test_attention_is_not_thrown_by_large_scores():
    """Scores of ±1000 differ by more than exp can express: the largest key takes all."""
    b = example_batch([300, 200], [1, 200], H=2, Hkv=1, d=16)
    b.q *= 300
    torch.testing.assert_close(attend(ops_for(d=16, G=2), b).double(), exact_attention(b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(variant, dtype):
    """Numbers of rows and columns that no tile divides; an odd number of inputs; bias; gate and up."""
    ops, torch_seed = ops_for(dtype, variant=variant), torch.manual_seed(0)
    for T in (0, 1, 5, 7, 16, 97, 200):
        for n_out, n_in in ((1002, 96), (64, 33), (130, 7), (6, 300)):
            w, x, bias = (torch.randn(*s).to(dtype) for s in ((n_out, n_in), (T, n_in), (n_out,)))
            want = x.double() @ w.double().T + bias.double()
            close = dict(rtol=TOLERANCE[dtype], atol=1e-4 if dtype == torch.float32 else 1e-2)
            torch.testing.assert_close(ops.linear(x, ops.pack(w), bias).double(), want, **close)
            torch.testing.assert_close(ops.linear(x, ops.pack(w)).double(), want - bias.double(), **{**close, "atol": 0.05})
            close["rtol"] *= 10                               # of a product of two such numbers
            got = ops.linear(x, ops.pack(w, gated=True), bias)
            torch.testing.assert_close(got.double(), kernels.silu_and_mul(want), **close)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_operations_equal_the_twins(variant, dtype):
    ops, close = ops_for(dtype, variant=variant), dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for T, n in ((1, 576), (5, 77), (64, 576)):
        x, residual, w = (torch.randn(*s, generator=torch.Generator().manual_seed(n)).to(dtype) for s in ((T, 2 * n), (T, n), (n,)))
        for r in (None, residual):
            got, want = ops.rms_norm(x[:, :n], w, 1e-5, r), kernels.rms_norm(x[:, :n], w, 1e-5, r)
            torch.testing.assert_close(got[0], want[0], **close)
            assert torch.equal(got[1], want[1])
        torch.testing.assert_close(ops.silu_and_mul(x * 5), kernels.silu_and_mul(x * 5), **close)
    extreme = torch.tensor([[-200.0, -88, 88, 200, 1, 1, 1, 1]]).to(dtype)
    torch.testing.assert_close(ops.silu_and_mul(extreme), kernels.silu_and_mul(extreme), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d, block_size", [(64, 16), (10, 3)])
def test_rope_and_kv_write_equal_the_twin(dtype, d, block_size):
    """Slot -1 writes nothing, and all other slots keep what they held: the whole pools are compared, NaN by NaN."""
    a, b = (example_batch([40, 0, 9], [30, 2, 1], H=6, Hkv=2, d=d, block_size=block_size, dtype=dtype) for _ in "ab")
    assert (a.slot_mapping < 0).sum() == 2
    close = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(rope_and_write(ops_for(dtype, d, 3), a), rope_and_write(kernels.TORCH, b), **close)
    for got, want in ((a.k_cache, b.k_cache), (a.v_cache, b.v_cache)):
        torch.testing.assert_close(got, want, equal_nan=True, **close)
    a.qk, a.v = a.qk.clone(), a.v.clone()                     # no longer slices of one tensor
    torch.testing.assert_close(rope_and_write(ops_for(dtype, d, 3), a), rope_and_write(kernels.TORCH, b), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays(dtype):
    """What is wrong with an input shows in the output, and only in the rows that it belongs to."""
    ops, x = ops_for(dtype), torch.randn(3, 128, dtype=dtype)
    x[1, 3] = torch.nan
    rows = lambda y: y.isnan().flatten(1).any(1).tolist()
    assert rows(ops.silu_and_mul(x)) == rows(ops.rms_norm(x, x[0], 1e-5)[0]) == [False, True, False]
    assert rows(ops.linear(x, ops.pack(torch.randn(70, 128).to(dtype)))) == [False, True, False]
    b = example_batch([9, 300, 300], [1, 1, 300], H=4, Hkv=1, dtype=dtype)
    b.q[1, 2, 3] = b.q[50, 2, 3] = torch.nan
    assert attend(ops, b).isnan().any(-1).nonzero().tolist() == [[1, 2], [50, 2]]


# -- 2. The same bits -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_and_in_company(variant, dtype):
    """Attention of each sequence by itself, with one thread and with three; and every row of a product in batches of 1 to 200.
    A chunk cut elsewhere has the same bits, too, as long as no piece is a single query."""
    ops = ops_for(dtype, variant=variant)
    b = example_batch([1, 600, 2000, 33, 700], [1, 1, 1, 33, 90], H=8, Hkv=2, dtype=dtype)
    together = attend(ops, b)
    alone = lambda rows, s, L: ops.paged_attention(
        b.q[rows], b.k_cache, b.v_cache, torch.tensor([0, rows.stop - rows.start]).int(), torch.tensor([L]).int(),
        b.block_tables[s:s + 1, :-(-L // 16)], b.scale)
    torch.set_num_threads(3)
    try:
        assert torch.equal(attend(ops, b), together)
        for s, (first, last) in enumerate(zip(b.query_start_loc.tolist(), b.query_start_loc[1:].tolist())):
            assert torch.equal(alone(slice(first, last), s, int(b.seq_lens[s])), together[first:last])
        assert torch.equal(torch.cat((alone(slice(36, 73), 4, 647), alone(slice(73, 126), 4, 700))), together[36:])
        x, w = torch.randn(200, 64, dtype=dtype), ops.pack(torch.randn(200, 64).to(dtype))
        all_rows = ops.linear(x, w)
        for T in (1, 2, 3, 4, 5, 6, 7, 50, 100):
            assert torch.equal(ops.linear(x[-T:], w), all_rows[-T:])
    finally:
        torch.set_num_threads(1)


def test_same_bits_of_a_request_alone_and_in_company():
    """Through the whole engine: log-probabilities to the last bit, since products and attention are the model."""
    prompts = [list(range(100 + i, 120 + 7 * i)) for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    with LLM(EMBEDDED_MODEL, dtype="float32", attention_backend="cpu", enable_prefix_caching=False) as llm:
        score = lambda outputs: [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]
        together = score(llm.generate([{"prompt_token_ids": p} for p in prompts], params))
        assert together == [score(llm.generate([{"prompt_token_ids": p}], params))[0] for p in prompts]


# -- 3. In the engine -------------------------------------------------------------------------------------------------

def test_backend_of_a_cpu(capfd):
    """auto takes it, for fp32 and bf16; fp16 runs on the twins, and one line says so; by name it is refused."""
    kernels.say_once.cache_clear()
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.select_backend("auto", "cpu", dtype, 64, 4).name == "cpu"
    assert kernels.select_backend("auto", "cpu", torch.float16, 64, 4) is kernels.TORCH
    assert kernels.select_backend("auto", "cpu", torch.float16, 64, 4) is kernels.TORCH
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "plain PyTorch" in said and "not float16" in said
    with pytest.raises(ValueError, match="--attention-backend cpu.*not float16.*auto or torch"):
        kernels.select_backend("cpu", "cpu", torch.float16, 64, 4)
    with pytest.raises(ValueError, match="--attention-backend cpu.*head sizes up to 256"):
        kernels.select_backend("cpu", "cpu", torch.float32, 512, 4)
    with pytest.raises(ValueError, match="--attention-backend cpu.*cuda"):
        kernels.select_backend("cpu", "cuda", torch.float32, 64, 4)


@pytest.mark.parametrize("size", [1, 2])
def test_twins_and_c_give_the_same_ids(size):
    jobs, ids = [(p, greedy(6)) for p in prompts_of(5, seed=4)], {}
    for backend in ("torch", "cpu"):
        engine = make_engine(toy(), attention_backend=backend, tensor_parallel_size=size, max_num_batched_tokens=9)
        assert engine.executor.model.ops.name == backend
        ids[backend] = ids_of(run(engine, jobs))
        engine.close()
    assert ids["cpu"] == ids["torch"]


def test_a_weight_is_held_once():
    """But for an embedding that is also the head."""
    for name, twice in (("gqa", False), ("tied", True)):
        engine = make_engine(toy(name), attention_backend="cpu")
        model = engine.executor.model
        for path, proj in model.named_modules():
            if hasattr(proj, "packed"):
                held = (proj.weight is not None) + (proj.packed is not None)
                assert held == (2 if path == "embed_tokens" and twice else 1), path
        engine.close()


def test_what_c_would_misread_is_refused():
    ops, b = ops_for(), example_batch([5], [5], H=8, Hkv=2)
    with pytest.raises(TypeError, match="float32.*float64"):
        ops.silu_and_mul(torch.zeros(1, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="int32.*int64"):
        ops.paged_attention(b.q, b.k_cache, b.v_cache, b.query_start_loc.long(), b.seq_lens, b.block_tables, b.scale)
    b.k_cache = b.k_cache.transpose(1, 2)
    with pytest.raises(ValueError, match="KV cache.*strides"):
        rope_and_write(ops, b)
    with pytest.raises(ValueError, match="KV cache.*strides"):
        attend(ops, b)


# -- 4. The compiler --------------------------------------------------------------------------------------------------

@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty folder; and what is compiled into it is compiled in a hurry."""
    monkeypatch.setattr(cpu_kernels, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in cpu_kernels.FLAGS))
    monkeypatch.setenv("NANO_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_eight_processes_compile_at_once(empty_cache):
    """Into one empty folder: all end up with the same file, whole, and nothing else stays behind."""
    context = multiprocessing.get_context("fork")
    barrier, paths = context.Barrier(8), context.SimpleQueue()

    def work():
        barrier.wait(60)
        paths.put(str(cpu_kernels.build(torch.float32, 8, 1)))
    processes = [context.Process(target=work) for _ in range(8)]
    for p in processes:
        p.start()
    found = {paths.get() for _ in processes}
    for p in processes:
        p.join(60)
    assert [str(p) for p in empty_cache.iterdir()] == list(found)
    b = example_batch([5, 3], [1, 3], H=2, Hkv=2, d=8)
    got = attend(cpu_kernels.backend.__wrapped__(torch.float32, 8, 1), b)
    torch.testing.assert_close(got.double(), exact_attention(b), rtol=1e-5, atol=1e-5)


def test_what_is_compiled_is_found_again(empty_cache, monkeypatch, tmp_path):
    """By the same source, flags and compiler; with one of them changed it is compiled anew."""
    first = cpu_kernels.build(torch.float32, 8, 1)
    stamp = first.stat().st_mtime_ns
    assert cpu_kernels.build(torch.float32, 8, 1) == first and first.stat().st_mtime_ns == stamp
    others = {first, cpu_kernels.build(torch.bfloat16, 8, 1), cpu_kernels.build(torch.float32, 8, 2)}
    changed = tmp_path / "cpu_kernels.c"
    changed.write_text(cpu_kernels.SOURCE.read_text() + "\n")
    monkeypatch.setattr(cpu_kernels, "SOURCE", changed)
    others.add(cpu_kernels.build(torch.float32, 8, 1))
    assert len(others) == 4 and all(path.exists() for path in others)


@pytest.mark.parametrize("broken, says", [
    ("CC=/no/such/compiler", "no C compiler"),
    ("exit 1", "failed"),
    ("echo 'no such instruction' >&2; exit 1", "no such instruction"),
    ("case \"$*\" in *-dM*) exec cc \"$@\";; *) echo 'disk full' >&2; exit 1;; esac", "disk full"),
])
def test_without_a_compiler_the_twins_run(broken, says, empty_cache, monkeypatch, tmp_path, capfd):
    """And one line on stderr says what would be faster, and why it isn't."""
    monkeypatch.setenv("CC", broken[3:] if broken.startswith("CC=") else script(tmp_path / "cc", broken))
    cpu_kernels.backend.cache_clear(), kernels.say_once.cache_clear()
    assert kernels.select_backend("auto", "cpu", torch.float32, 64, 4) is kernels.TORCH
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "cpu_kernels.c" in said and says in said, said
    with pytest.raises(ValueError, match=f"--attention-backend cpu.*{says}"):
        kernels.select_backend("cpu", "cpu", torch.float32, 64, 4)
    assert not empty_cache.exists() or not list(empty_cache.iterdir())


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANO_SERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(cpu_kernels.NotAvailable, match="NANO_SERVE_CACHE"):
        cpu_kernels.build(torch.float32, 8, 1)


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
def test_a_library_that_is_none_is_made_anew(empty_cache, content):
    """In its place an empty file, or another's."""
    path = cpu_kernels.build(torch.float32, 8, 1)
    size = path.stat().st_size
    path.write_bytes(content)
    assert cpu_kernels.backend.__wrapped__(torch.float32, 8, 1).name == "cpu"
    assert path.stat().st_size == size


def test_what_stands_in_the_librarys_place_for_good(empty_cache):
    """A folder, which no file replaces: not available, for a reason."""
    path = cpu_kernels.build(torch.float32, 8, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(cpu_kernels.NotAvailable, match="NANO_SERVE_CACHE"):
        cpu_kernels.backend.__wrapped__(torch.float32, 8, 1)


@pytest.mark.parametrize("command", ["cc -m64", " cc ", "env cc", "{folder}/a c compiler"])
def test_cc_may_be_a_command(empty_cache, monkeypatch, tmp_path, command):
    script(tmp_path / "a c compiler", 'exec cc "$@"')
    monkeypatch.setenv("CC", command.format(folder=tmp_path).replace("-m64", "-m64" if X86 else "-g"))
    assert cpu_kernels.build(torch.float32, 8, 1).exists()


@pytest.mark.parametrize("command", ["true", "'", "nonsense -O2", "{folder}"])
def test_cc_that_is_no_compiler(empty_cache, monkeypatch, tmp_path, command):
    monkeypatch.setenv("CC", command.format(folder=tmp_path))
    with pytest.raises(cpu_kernels.NotAvailable):
        cpu_kernels.backend.__wrapped__(torch.float32, 8, 1)


def test_nobody_has_a_home_in_a_container(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "NANO_SERVE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)    # as for a user id that /etc/passwd doesn't have
    with pytest.raises(cpu_kernels.NotAvailable, match="NANO_SERVE_CACHE"):
        cpu_kernels.backend.__wrapped__(torch.float32, 8, 1)


def test_a_compiler_without_openmp(empty_cache, monkeypatch, tmp_path):
    """One thread, and the same results."""
    monkeypatch.setenv("CC", script(tmp_path / "cc", """
for a in "$@"; do [ "$a" = -fopenmp ] && { echo "no OpenMP" >&2; exit 1; }; done; exec cc "$@"
"""))
    ops, b = cpu_kernels.backend.__wrapped__(torch.float32, 16, 2), example_batch([300, 70], [1, 70], H=4, Hkv=2, d=16)
    assert b"GOMP" not in next(empty_cache.iterdir()).read_bytes()
    torch.testing.assert_close(attend(ops, b).double(), exact_attention(b), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not shutil.which("clang"), reason="no clang")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clang(dtype, empty_cache, monkeypatch):
    monkeypatch.setenv("CC", "clang")
    ops, b = cpu_kernels.backend.__wrapped__(dtype, 16, 2), example_batch([300, 70], [1, 70], H=4, Hkv=2, d=16, dtype=dtype)
    torch.testing.assert_close(attend(ops, b).double(), exact_attention(b), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_one_openmp():
    """Two of them would each keep threads of its own, which wait for work by spinning."""
    if not pathlib.Path("/proc/self/maps").exists() or "gcc" not in cpu_kernels.compiler()[0]:
        pytest.skip("needs Linux and gcc")
    ops_for()
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if re.search(r"lib(g|i|)omp", line)}
    assert len(libraries) == 1, libraries


@pytest.mark.skipif(not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
                    reason="wants gcc-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("cpu, dtype", [("armv8-a", torch.float32), ("armv8-a", torch.bfloat16), ("armv8.6-a+bf16", torch.bfloat16)])
@pytest.mark.parametrize("d, G", [(64, 3), (10, 2)])
def test_arm(cpu, dtype, d, G, tmp_path):
    """NEON, and its bf16 products, in an emulator."""
    flags = [flag for flag in cpu_kernels.FLAGS if flag not in ("-shared", "-fPIC")]
    source = pathlib.Path(__file__).with_name("cpu_kernels_main.c")
    subprocess.run(["aarch64-linux-gnu-gcc", *flags, f"-march={cpu}", "-fopenmp-simd", "-static", f"-DD={d}", f"-DG={G}",
                    *["-DBF16"] * (dtype == torch.bfloat16), str(source), "-o", str(tmp_path / "test"), "-lm"], check=True, timeout=100)
    done = subprocess.run(["qemu-aarch64", "-cpu", "max", tmp_path / "test"], capture_output=True, text=True, check=True, timeout=100)
    assert all(float(e) < TOLERANCE[dtype] for e in done.stdout.split()) and len(done.stdout.split()) == 2, done.stdout


# -- 5. Vector loops --------------------------------------------------------------------------------------------------

gcc_on_x86 = pytest.mark.skipif(not (X86 and shutil.which("gcc")), reason="reads GCC's report for x86")


def compile_with(tmp_path, dtype, *flags):
    """By gcc, for AVX-512 with bf16 products  →  the library's path and what GCC said."""
    command = ["gcc", *cpu_kernels.FLAGS, "-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512", "-fopenmp", "-DD=64", "-DG=4",
               *["-DBF16"] * (dtype == torch.bfloat16), *flags, str(cpu_kernels.SOURCE), "-o", str(tmp_path / "k.so")]
    return tmp_path / "k.so", subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr


LOOPS = [r"sum\[i\] = put\(get\(old", r"squares \+= ", r"to\[i\] = put\(get\(weight", r"for \(int i = 0; i < D / 2; i\+\+\) \{",
         r"to\[i\] = put\(get\(put\(silu", r"m_i = MAX\(m_i, score", r"l_i \+= score", r"m_new = MAX\(m_new, x", r"sum \+= x\[j\] = exp2_",
         r"from\[i\] = silu\(from", r"y\[i\] = put\(from", r"\] \*= shrink"]


@gcc_on_x86
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loops_are_vector_loops(dtype, tmp_path):
    """GCC reports each loop that it has vectorised, by line, and the width of its vectors: 64 bytes for all of these."""
    said = compile_with(tmp_path, dtype, "-fopt-info-vec-optimized")[1]
    wide = {int(n) for n in re.findall(r"cpu_kernels\.c:(\d+):\d+: optimized: (?:basic block part|loop) vectorized using 64 byte", said)}
    lines = cpu_kernels.SOURCE.read_text().splitlines()
    for loop in LOOPS:
        at = [n for n, line in enumerate(lines, 1) if re.search(loop, line)]
        assert len(at) == 1, f"{loop} stands {len(at)} times in cpu_kernels.c"
        assert wide & {at[0], at[0] - 1}, f"line {at[0]} is no vector loop: {lines[at[0] - 1]}"


@gcc_on_x86
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tile_stays_in_registers(dtype, tmp_path):
    """The loop over the depth has 6 x 4 multiply-adds, 4 loads of b and 6 of a, and stores nothing."""
    library, _ = compile_with(tmp_path, dtype)
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], check=True, capture_output=True, text=True).stdout
    code = [(int(a, 16), op) for a, op in re.findall(r"^ +([0-9a-f]+):\s+(.*)$", text, re.M)]
    multiply_add, found = "vdpbf16ps" if dtype == torch.bfloat16 else "vfmadd", 0
    for end, (address, op) in enumerate(code):
        jump = re.match(r"j\w+ +([0-9a-f]+)", op)
        if jump and 0 <= address - int(jump[1], 16) < 600:                   # backwards, and not far
            body = [o for a, o in code[max(end - 150, 0):end] if a >= int(jump[1], 16)]
            if sum(multiply_add in o for o in body) == 24:
                found += 1
                assert not [o for o in body if re.search(r"mm\d+,[^,]*\(", o) and o.startswith("vmov")], body
    assert found, "no loop with 24 multiply-adds"
