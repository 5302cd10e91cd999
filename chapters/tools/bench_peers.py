"""The engine beside its peers on one CPU: transformers, and vLLM where it is installed, in one run.

    python chapters/tools/bench_peers.py --model DIR                          nano-serve and transformers
    python chapters/tools/bench_peers.py --model DIR --vllm /path/to/python   … and the vLLM of that interpreter
    python chapters/tools/bench_peers.py --model DIR --compile                … and nano-serve with --compile
    python chapters/tools/bench_peers.py --model DIR --budget                 where a step's time goes
    python chapters/tools/bench_peers.py --linears                            products: as stored, transposed, packed
    python chapters/tools/bench_peers.py --sampling                           what drawing a token from a row costs

Every system is loaded once, in a process of its own; then they take turns on the same workloads (token ids, greedy, EOS
ignored), so that a slow minute of the machine hits all of them. The ratios are what counts. A turn during which other
work took more than an eighth of a core is repeated, then marked "!". Workloads: a1 128 tokens in, 1 out; a 128 in, 128
out (decode: (a - a1) / 127); c 2,048 in, 1 out; b 32 requests at once, 32-512 in, 16-256 out; b8 the first 8 of them.

transformers gets 512 tokens a step, the others 4,096: with 4,096 its first token of 2,048 came a seventh later (bf16).
vLLM gets what its CPU guide recommends: tcmalloc and Intel's OpenMP preloaded where they are installed, and every core
(by default it keeps one for itself, which on two cores halves its speed), in one process, as nano-serve is.
"""
import argparse
import glob
import importlib.util
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
WORKLOADS = "a1", "a", "c", "b", "b8"


def ids_of(model):
    """Token ids to draw prompts from: without the special ones at the ends of a vocabulary."""
    size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    return range(100, min(32000, size - 300))


def workloads(model):
    """{name: [(prompt ids, tokens out)]}, the same in every process."""
    rng, ids = random.Random(2024), ids_of(model)
    prompt = lambda n: [rng.choice(ids) for _ in range(n)]
    short = prompt(128)
    of = {"a1": [(short, 1)], "a": [(short, 128)], "c": [(prompt(2048), 1)],
          "b": [(prompt(rng.randint(32, 512)), rng.randint(16, 256)) for _ in range(32)]}
    return {**of, "b8": of["b"][:8]}


# -- one system in one process: a workload's name comes in as a line, its figures go out as a line --------------------

def nano_serve(args):
    from nano_serve import LLM, SamplingParams
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, max_num_batched_tokens=4096,
              enable_prefix_caching=False, compile=args.serve == "compiled")
    greedy = lambda n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    return lambda requests: [o.outputs[0].token_ids for o in llm.generate(
        [p for p, _ in requests], [greedy(n) for _, n in requests])]


def vllm(args):
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(args.threads),
                      VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams
    llm = LLM(args.model, dtype=args.dtype, max_model_len=4096, max_num_batched_tokens=4096,
              enable_prefix_caching=False, distributed_executor_backend="uni", disable_log_stats=True)
    greedy = lambda n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
    return lambda requests: [list(o.outputs[0].token_ids) for o in llm.generate(
        [{"prompt_token_ids": p} for p, _ in requests], [greedy(n) for _, n in requests], use_tqdm=False)]


def transformers(args):
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype),
                                                 attn_implementation="sdpa").eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=256, num_blocks=160, max_batch_tokens=512, use_cuda_graph=False, allow_block_sharing=False,
            use_async_batching=False))
    manager.start()

    def run(requests):
        index = {manager.add_request(p, max_new_tokens=n, eos_token_id=-1): i for i, (p, n) in enumerate(requests)}
        results = [None] * len(requests)
        while None in results:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching died")
            if result is not None and result.is_finished():
                results[index[result.request_id]] = list(result.generated_tokens)
        return results
    return run


SYSTEMS = {"nano-serve": nano_serve, "compiled": nano_serve, "transformers": transformers, "vllm": vllm}


def serve(args):
    replies, todo = os.fdopen(os.dup(1), "w", buffering=1), workloads(args.model)
    os.dup2(2, 1)                               # whatever a library prints must not get between the replies
    try:
        run = SYSTEMS[args.serve](args)
        run([(p[:40], 8) for p, _ in todo["b"][:3]])
        print(json.dumps({"ready": args.serve, "python": platform.python_version()}), file=replies)
        for name in map(str.strip, sys.stdin):
            busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
            tokens = run(todo[name])
            seconds = time.perf_counter() - start
            other = (busy_seconds() - busy - (own_seconds() - own)) / seconds
            assert [len(t) for t in tokens] == [n for _, n in todo[name]], "a system gave another number of tokens"
            print(json.dumps({"seconds": seconds, "other": other, "tokens": tokens}), file=replies)
    except BrokenPipeError:                     # the driver has ended
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)                             # a library's threads would keep the process alive


def busy_seconds():
    """CPU seconds that the whole machine has spent working, or that its host has taken away."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    """CPU seconds of this process and all that descend from it."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:                         # it has just ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        seconds[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in seconds:
        at = pid
        while at in parents and at != os.getpid():
            at = parents[at]
        total += seconds[pid] if at == os.getpid() else 0.0
    return total


# -- the run ----------------------------------------------------------------------------------------------------------

def compare(args):
    """Let all systems take turns; returns {(system, dtype): {workload: [turns]}}."""
    kinds = ["nano-serve"] + ["compiled"] * args.compile + ["transformers"] + ["vllm"] * bool(args.vllm)
    results = {}
    for dtype in args.dtypes:
        processes = {}
        try:
            for kind in kinds:
                python, env = sys.executable, os.environ
                if kind == "vllm":
                    preload = (glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")
                               + glob.glob(str(Path(args.vllm).parent.parent / "lib" / "libiomp5.so")))
                    python, env = args.vllm, {**os.environ, "LD_PRELOAD": ":".join(preload)}
                    print(f"vLLM with {', '.join(Path(p).name for p in preload) or 'nothing'} preloaded")
                start = time.perf_counter()
                processes[kind] = subprocess.Popen(
                    [python, __file__, "--serve", kind, "--model", args.model, "--dtype", dtype,
                     "--threads", str(args.threads)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if not args.verbose else None, text=True, preexec_fn=os.setpgrp)
                if not processes[kind].stdout.readline():
                    raise SystemExit(f"{kind} did not start; --verbose shows why")
                print(f"{dtype} {kind}: ready after {time.perf_counter() - start:.1f} s (imports, weights, compiling, "
                      "three requests)")
            for name in [w for w in args.workloads for _ in range(args.turns)]:
                for kind, process in processes.items():
                    for _ in range(2):
                        print(name, file=process.stdin, flush=True)
                        turn = json.loads(process.stdout.readline() or '{"dead": true}')
                        if "dead" in turn:
                            raise SystemExit(f"{kind} died in workload {name}; --verbose shows why")
                        if turn["other"] < 0.125:
                            break
                    mark = "!" if turn["other"] >= 0.125 else ""
                    print(f"{dtype} {name} {kind}: {turn['seconds']:.3f} s{mark}", file=sys.stderr)
                    results.setdefault((kind, dtype), {}).setdefault(name, []).append(turn)
        finally:
            for process in processes.values():
                os.killpg(process.pid, signal.SIGKILL)            # with whatever it has started
                process.wait()
    return results


def report(results):
    """The table: medians, and each peer's best dtype against the best of nano-serve, without and with --compile."""
    median = lambda turns: statistics.median(t["seconds"] for t in turns)
    figures = {}
    for (kind, dtype), of in results.items():
        m = {name: median(turns) for name, turns in of.items()}
        row = {}
        if {"a", "a1"} <= m.keys():
            row["decode ms/token"] = (m["a"] - m["a1"]) / 127 * 1000
        if "c" in m:
            row["TTFT@2048 s"] = m["c"]
        row.update({f"{name} s": m[name] for name in ("b", "b8") if name in m})
        figures[kind, dtype] = row
        marks = "".join("!" for turns in of.values() for t in turns if t["other"] >= 0.125)
        print(f"{kind:14}{dtype:10}" + "".join(f"{k}: {v:8.2f}   " for k, v in row.items()) + marks)
        ours = results["nano-serve", dtype]
        same = all(t["tokens"] == ours[w][0]["tokens"] for w, turns in of.items() for t in turns)
        print(f"{'':24}same token ids as nano-serve: {'yes' if same else 'no'}")
    best = lambda kind, key: min(row[key] for (k, _), row in figures.items() if k == kind)
    kinds, keys = list(dict.fromkeys(kind for kind, _ in figures)), list(next(iter(figures.values())))
    for ours in [kind for kind in kinds if SYSTEMS[kind] is nano_serve]:
        for peer in [kind for kind in kinds if SYSTEMS[kind] is not nano_serve and keys]:
            ratios = [f"{key}: {best(peer, key) / best(ours, key):.2f}x" for key in keys]
            print(f"{peer}'s time / {ours}'s, best dtype against best dtype:  " + "   ".join(ratios))


# -- where the time goes ----------------------------------------------------------------------------------------------

def lower_quartile(call, n, clock=time.perf_counter):
    """Seconds of a call: of n, the one that a quarter of them undercut."""
    call()
    times = []
    for _ in range(n):
        start = clock()
        call()
        times.append(clock() - start)
    return sorted(times)[n // 4]


def linears(args):
    """All matrix products of one step of SmolLM2-135M's shapes, in ms: weights as stored, transposed, packed."""
    import torch
    import torch.nn.functional as F
    from model import PACKED_FOR_ROWS
    torch.set_num_threads(args.threads)
    shapes = [(960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1)]     # out, in, layers
    print(f"{'dtype':10}{'rows':>6}{'as stored':>12}{'transposed':>12}{'packed':>12}   ms for the products of a step")
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8, 32, 256, 2048):
            total = [0.0, 0.0, 0.0]
            for n_out, n_in, layers in shapes:
                if n_out > 9999 and rows > 32:
                    continue                     # the head sees one row a sequence
                copies = 1 if n_out > 9999 else 12          # more than the caches hold, as in a model
                plain = [torch.randn(n_out, n_in, dtype=dtype) for _ in range(copies)]
                x = torch.randn(rows, n_in, dtype=dtype)
                packed = [torch.ops.mkldnn._reorder_linear_weight(w, PACKED_FOR_ROWS) for w in plain]
                packed_product = lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
                ways = (F.linear, plain), (torch.matmul, [w.t().contiguous() for w in plain]), (packed_product, packed)
                for i, (product, weights) in enumerate(ways):
                    weights = itertools.cycle(weights)
                    seconds = lower_quartile(lambda: product(x, next(weights)), 4 if rows > 100 else 24)
                    total[i] += seconds * layers * 1000
            print(f"{str(dtype)[6:]:10}{rows:6}" + "".join(f"{t:12.1f}" for t in total))


def sampling_times(args):
    """Milliseconds of one thread's time for a row of 128,256 logits: flat ones (all of them matter) and peaked ones (as
    a model's), each alone and eight in a step."""
    import torch
    from request import Request, SamplingParams
    from sampling import sample
    torch.set_num_threads(1)
    flat = torch.randn(8, 128256, generator=torch.Generator().manual_seed(0))
    peaked = 3 * flat
    peaked[:, :5] += 14
    print(f"{'':34}{'flat':>7}{'of 8':>7}{'peaked':>9}{'of 8':>7}   ms a row")
    for cut in ({"temperature": 0}, {}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}):
        times = []
        for logits in (flat[:1], flat, peaked[:1], peaked):
            seeds = itertools.count()
            step = lambda: sample(logits, [Request("r", [], SamplingParams(seed=next(seeds), **cut)) for _ in logits])
            times.append(lower_quartile(step, 24, time.thread_time) / len(logits) * 1000)
        print(f"{str(cut or 'uncut'):34}{times[0]:7.2f}{times[1]:7.2f}{times[2]:9.2f}{times[3]:7.2f}")


def budget(args):
    """One decode step, alone and of 32: the products, attention, the rest of the model, and what the engine itself adds
    (scheduling, building the batch, taking the likeliest token of each row, handing tokens back)."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from nano_serve import LLM, SamplingParams
    read = torch.randn(1 << 26)
    read_rate = read.nbytes / lower_quartile(lambda: read.sum(), 8)
    for dtype in args.dtypes:
        llm = LLM(args.model, dtype=dtype, threads=args.threads, max_num_batched_tokens=4096,
                  enable_prefix_caching=False, compile=args.compile)
        engine, rng, inside = llm.engine, random.Random(0), []
        execute = engine.executor.execute

        def timed(batch):
            start = time.perf_counter()
            logits = execute(batch)
            inside.append(time.perf_counter() - start)
            return logits
        engine.executor.execute = timed
        model = engine.executor.model
        size = sum(p.nbytes for p in model.parameters()) + sum(
            w.packed.nbytes for w in model.modules() if getattr(w, "packed", None) is not None and w.weight is None)
        for batch in (1, 32):
            for i in range(batch):
                engine.add_request(f"{batch}-{i}", [rng.choice(ids_of(args.model)) for _ in range(128)],
                                   SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
            for _ in range(4):
                engine.step()
            outside = []
            for _ in range(16):
                start = time.perf_counter()
                engine.step()
                outside.append(time.perf_counter() - start - inside[-1])
            outside, step = statistics.median(outside), min(lower_quartile(engine.step, 8) for _ in range(2))
            with profile(activities=[ProfilerActivity.CPU]) as p:
                for _ in range(8):
                    engine.step()
            own = {e.key: e.self_cpu_time_total / 8e3 for e in p.key_averages()}                     # ms a step
            products = sum(v for k, v in own.items() if "CompiledFxGraph" in k or k in (
                "mkldnn::_linear_pointwise", "aten::mm", "aten::addmm"))
            attention = sum(v for k, v in own.items() if "scaled_dot_product" in k or k in (
                "aten::index_select", "aten::bmm", "aten::_softmax", "aten::_embedding_bag_forward_only",
                "nano_serve::attend"))
            others = sum(own.values()) - products - attention
            print(f"{dtype} batch {batch}: step {step * 1000:.1f} ms, of which the engine {outside * 1000:.2f} "
                  f"({outside / batch * 1e6:.0f} us a request, {outside / step:.1%}); under the profiler: products "
                  f"and what is compiled {products:.1f}, attention with its gathers {attention:.1f}, other operators "
                  f"{others:.1f} ms; reading the weights once at {read_rate / 1e9:.0f} GB/s would take "
                  f"{size / read_rate * 1000:.1f} ms")
            for i in range(batch):
                engine.abort_request(f"{batch}-{i}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face checkpoint folder, such as SmolLM2-135M-Instruct")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM installed")
    parser.add_argument("--compile", action="store_true", help="nano-serve with --compile, too (--budget: it alone)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", default=["a1", "a", "c", "b8", "b"], choices=WORKLOADS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budget", action="store_true")
    parser.add_argument("--linears", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the systems print")
    parser.add_argument("--serve", choices=sorted(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.linears or args.sampling):
        config = Path(args.model or "", "config.json")
        if not args.model or not config.is_file():
            parser.error("--model must be a checkpoint folder, with a config.json")
        longest = {name: max(len(p) + n for p, n in requests) for name, requests in workloads(args.model).items()}
        limit = json.loads(config.read_text()).get("max_position_embeddings") or 2048
        if too_long := [name for name in args.workloads if longest[name] > limit]:
            parser.error(f"this model takes {limit} tokens; leave out workload {', '.join(too_long)} (--workloads)")
    if args.vllm and not os.access(args.vllm, os.X_OK):
        parser.error(f"--vllm {args.vllm} is no program")
    if args.turns < 1 or args.threads < 1:
        parser.error("--turns and --threads are at least 1")
    if args.serve:
        serve(args)
    elif args.linears:
        linears(args)
    elif args.sampling:
        sampling_times(args)
    elif args.budget:
        budget(args)
    else:
        if not importlib.util.find_spec("transformers"):
            parser.error("transformers is not installed: make test, or pip install -r requirements-test.txt")
        print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {args.threads} threads, "
              f"Python {platform.python_version()}")
        report(compare(args))


if __name__ == "__main__":
    main()
