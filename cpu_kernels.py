"""From cpu_kernels.c to functions that take tensors (chapter 6): compile it, load it, pass addresses.

Mirrors   vLLM: v1/attention/backends/cpu_attn.py:39 CPUAttentionBackend, whose C++ is compiled when vLLM is built
Promises  the operations of kernels.TORCH for fp32 and bf16, by the machine's own C compiler. The first use takes about
          a second; the result stays in a folder for the next. NotAvailable where no compiler is found, or none can.
Left out  fp16: the twins run it. Windows.
Order     1 build: from source to library.  2 backend: the operations.

The folder is $NANO_SERVE_CACHE, or nano-serve in $XDG_CACHE_HOME or ~/.cache; the compiler is $CC, or
the first of gcc, cc and clang.
"""
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

SOURCE = Path(__file__).resolve().with_name("cpu_kernels.c")
HEADER = SOURCE.with_name("cpu_tile.h")
DTYPES = torch.float32, torch.bfloat16
MAX_HEAD_SIZE, MAX_G = 256, 32           # beyond these the C code's arrays would be large for a thread's stack


class NotAvailable(RuntimeError):
    """cpu_kernels.c can't be compiled here, or not for these sizes; the message says why."""


# -- 1. From source to library ----------------------------------------------------------------------------------------

# Floating point as in a formula: sums may be reordered (once, when compiled), which a vector loop over a sum needs.
# Not -ffast-math: there are -inf and NaN in here that mean something.
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
         "-shared", "-fPIC")


def compiler():
    """The C compiler's path, and what $CC gives it to begin with ("ccache gcc", "gcc -m64"). gcc before cc: its OpenMP
    is the one that PyTorch brings along, so both share one set of threads, where clang's would start a second one."""
    given = os.environ.get("CC", "").strip()
    try:                                         # one path with blanks in it, or a command with arguments
        commands = [[given] if shutil.which(given) else shlex.split(given)] if given else [["gcc"], ["cc"], ["clang"]]
    except ValueError as error:
        raise NotAvailable(f"CC={given!r} is no command: {error}") from None
    for name, *arguments in commands:
        if path := shutil.which(name):
            return [path, *arguments]
    raise NotAvailable(f"no C compiler ({given or 'gcc or cc or clang'})")


def thread_flags(macros):
    """Ways to have loops shared among threads, the best first; the last leaves one thread."""
    vectors_only = ("-fopenmp-simd",)            # `omp simd` pragmas alone: no library, no threads
    if sys.platform == "darwin":                 # Apple's clang has the pragmas but no library: PyTorch's
        folder = Path(torch.__file__).parent / "lib"
        return ("-Xclang", "-fopenmp", f"-L{folder}", "-lomp", f"-Wl,-rpath,{folder}"), vectors_only
    return (vectors_only,) if b"__clang__" in macros else (("-fopenmp",), vectors_only)


def run(*command):
    try:
        return subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=120).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        raise NotAvailable(f"{command[0]} failed: {output.splitlines()[0]:.200}") from error


def cache_folder():
    if folder := os.environ.get("NANO_SERVE_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-serve"
    except RuntimeError as error:                # no HOME, and a user that the system doesn't know: in containers
        raise NotAvailable("no home folder to keep the compiled kernels in; NANO_SERVE_CACHE names another") from error


def build(dtype, head_size, G, anew=False):
    """The library for a dtype, head size and number of query heads a KV head; compiled unless it is there  →  its path.

    Its name is a digest of all that it depends on: source, flags, and the compiler's own macros, which tell its version
    and which instructions this CPU has (a home folder may be shared by machines). It is compiled under another name and
    renamed when whole, so whoever finds the name finds all of it: of eight processes that start at once the last one's
    copy stays, and each of them is good.
    """
    cc = compiler()
    arm = platform.machine() in ("arm64", "aarch64")
    flags = ["-mcpu=native" if arm else "-march=native", *FLAGS, f"-DD={head_size}", f"-DG={G}"]
    flags += ["-DBF16"] if dtype == torch.bfloat16 else []
    macros = run(*cc, *flags, "-E", "-dM", "-x", "c", os.devnull)
    ways = thread_flags(macros)
    digest = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes() + repr((cc, flags, ways)).encode() + macros)
    path = cache_folder() / f"cpu_kernels-{digest.hexdigest()[:16]}.so"
    try:
        if path.exists() and not anew:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            for i, threads in enumerate(ways):
                try:
                    run(*cc, *flags, *threads, f"-I{HEADER.parent}", str(SOURCE), "-o", f"{folder}/library.so", "-lm")
                    break
                except NotAvailable:
                    if i == len(ways) - 1:
                        raise
            os.replace(f"{folder}/library.so", path)
    except OSError as error:
        raise NotAvailable(f"{path.parent} can't be written: {error.strerror} "
                           "(NANO_SERVE_CACHE names another folder)") from error
    return path


def load(dtype, head_size, G):
    """The library itself. A file of its name that is none (a disk was full, somebody's hand) is made anew, once."""
    for anew in False, True:
        try:
            # After torch, whose OpenMP is then this library's, too.
            c = ctypes.CDLL(str(build(dtype, head_size, G, anew).absolute()))
            for name, (result, *arguments) in SIGNATURES.items():
                getattr(c, name).restype, getattr(c, name).argtypes = result, arguments
            return c
        except (OSError, AttributeError) as error:
            reason = error
    raise NotAvailable(f"what was compiled can't be loaded: {reason}")


# -- 2. The operations ------------------------------------------------------------------------------------------------

P, N, I, R = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {"rms_norm": (None, N, N, P, P, P, R, P, P),                # what it returns, then what it takes
              "rope_and_write_kv": (None, N, N, N, P, P, N, P, P, P, P, P, P),
              "silu_and_mul": (None, N, N, P, P),
              "paged_attention": (I, N, N, N, N, N, P, P, P, P, P, P, P, R),
              "packed_size": (N, N, N, I), "left_size": (N,), "pack_weight": (None, N, N, I, P, P),
              "linear": (None, N, N, N, I, P, P, P, P)}


class Packed(NamedTuple):
    """A weight in the order in which cpu_kernels.c reads it."""
    n_out: int
    n_in: int                # even in bf16: a column of zeros may have been added
    gated: bool
    memory: torch.Tensor     # bytes
    address: int

    nbytes = property(lambda self: self.memory.nbytes)


def keep_memory():
    """Have glibc keep what is freed, up to 512 MB, instead of handing it back to the system, from where each 4 KiB of
    it comes with a page fault the next time: in a prefill that is every layer's activations."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)                 # the most that glibc takes


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3      # from malloc.h


@functools.cache
def backend(dtype, head_size, G):
    """The namespace of operations, as kernels.TORCH, for tensors of this dtype and head size, on the CPU.

    What is passed on is an address, behind which C would take anything for numbers: so each function makes sure of
    dtype and layout first. NotAvailable where there is no library to be had.
    """
    if dtype not in DTYPES:
        raise NotAvailable(f"it knows float32 and bfloat16, not {str(dtype)[6:]}")
    if head_size % 2 or head_size > MAX_HEAD_SIZE or G > MAX_G:
        raise NotAvailable(f"it knows even head sizes up to {MAX_HEAD_SIZE} and up to {MAX_G} query heads a KV head, "
                           f"not {head_size} and {G}")
    c = load(dtype, head_size, G)
    keep_memory()
    left_is_wider = c.left_size() > dtype.itemsize

    def dense(x, kind=dtype):
        """x itself, if its elements lie one after another, else a copy that does. TypeError for another dtype."""
        if x.dtype is not kind:
            raise TypeError(f"these kernels were compiled for {dtype}: {kind} is wanted here, not {x.dtype}")
        return x if x.is_contiguous() else x.contiguous()

    def in_place(cache):
        """A cache's address: a copy would not do, since what is written has to land."""
        if cache.dtype is not dtype or not cache.is_contiguous():
            raise ValueError(f"a KV cache of {cache.dtype} with strides {cache.stride()}; {dtype}, dense, is wanted")
        return cache.data_ptr()

    def rms_norm(x, weight, eps, residual=None):
        x = dense(x)
        out, new_residual = torch.empty_like(x), x                                       # [T, D] each
        if residual is not None:
            residual, new_residual = dense(residual), torch.empty_like(x)
        c.rms_norm(len(x), x.shape[1], x.data_ptr(), None if residual is None else residual.data_ptr(),
                   dense(weight).data_ptr(), eps, out.data_ptr(), new_residual.data_ptr())
        return out, new_residual

    def rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, slot_mapping):
        (T, heads, d), Hkv = qk.shape, v.shape[1]
        if not qk.stride(0) == v.stride(0) or qk.stride()[1:] != (d, 1) or v.stride()[1:] != (d, 1):
            qkv = torch.cat((qk, v), dim=1)                                              # [T, H + 2 * Hkv, d]
            qk, v = qkv.split((heads, Hkv), dim=1)
        if qk.dtype is not dtype or v.dtype is not dtype:
            dense(qk), dense(v)                          # which raise
        q = qk.new_empty(T, heads - Hkv, d)                                              # [T, H, d]
        c.rope_and_write_kv(T, heads - Hkv, Hkv, qk.data_ptr(), v.data_ptr(), qk.stride(0), dense(cos).data_ptr(),
                            dense(sin).data_ptr(), in_place(k_cache), in_place(v_cache),
                            dense(slot_mapping, torch.int64).data_ptr(), q.data_ptr())
        return q

    def silu_and_mul(gate_up):
        gate_up = dense(gate_up)
        T, n = gate_up.shape
        out = gate_up.new_empty(T, n // 2)                                               # [T, I]
        c.silu_and_mul(T, n // 2, gate_up.data_ptr(), out.data_ptr())
        return out

    def paged_attention(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale):
        q, starts, lens = dense(q), dense(query_start_loc, torch.int32), dense(seq_lens, torch.int32)
        tables, (_, H, _), (_, bs, Hkv, _) = dense(block_tables, torch.int32), q.shape, k_cache.shape
        out = torch.empty_like(q)                                                        # [T, H, d]
        failed = c.paged_attention(len(lens), H, Hkv, bs, tables.shape[1], starts.data_ptr(), lens.data_ptr(),
                                   tables.data_ptr(), q.data_ptr(), in_place(k_cache), in_place(v_cache),
                                   out.data_ptr(), scale)
        if failed:
            raise MemoryError("no memory for attention's partial results")
        return out

    def pack(weight, gated=False):
        if weight.shape[1] % 2:
            weight = torch.nn.functional.pad(weight, (0, 1))
        n_out, n_in = weight.shape
        memory = torch.empty(c.packed_size(n_out, n_in, gated), dtype=torch.uint8)
        c.pack_weight(n_out, n_in, gated, dense(weight).data_ptr(), memory.data_ptr())
        return Packed(n_out, n_in, gated, memory, memory.data_ptr())

    def linear(x, weight, bias=None):
        if x.shape[1] < weight.n_in:
            x = torch.nn.functional.pad(x, (0, 1))
        x = dense(x)
        out = x.new_empty(len(x), weight.n_out // 2 if weight.gated else weight.n_out)   # [T, out]
        if left_is_wider:
            x = x.float()
        c.linear(len(x), weight.n_out, weight.n_in, weight.gated, weight.address,
                 None if bias is None else dense(bias).data_ptr(), x.data_ptr(), out.data_ptr())
        return out

    return SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                           paged_attention=paged_attention, pack=pack, linear=linear, name="cpu")
