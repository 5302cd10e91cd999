"""The engine beside its peers on one CPU: transformers, and vLLM where it is installed, in one run.

    python chapters/tools/bench_peers.py --model DIR                          nano-serve and transformers
    python chapters/tools/bench_peers.py --model DIR --vllm /path/to/python   … and the vLLM of that interpreter
    python chapters/tools/bench_peers.py --model DIR --budget                 where a step's time goes
    python chapters/tools/bench_peers.py --linears                            products: PyTorch's, oneDNN's, cpu_kernels.c's
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
import math
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
              enable_prefix_caching=False)
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


SYSTEMS = {"nano-serve": nano_serve, "transformers": transformers, "vllm": vllm}


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
    kinds = ["nano-serve"] + ["transformers"] + ["vllm"] * bool(args.vllm)
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
    """The table: medians, and each peer's best dtype against the best of nano-serve."""
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
    """All matrix products of one step of SmolLM2-135M's shapes, in ms: F.linear; oneDNN with its weights packed for it; and
    cpu_kernels.c."""
    import torch
    import torch.nn.functional as F
    import cpu_kernels
    torch.set_num_threads(args.threads)
    shapes = [(960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1)]     # out, in, layers
    print(f"{'dtype':10}{'rows':>6}{'F.linear':>15}{'oneDNN':>15}{'cpu_kernels.c':>15}   ms for the products of a step")
    for dtype in (torch.float32, torch.bfloat16):
        ops = cpu_kernels.backend(dtype, 64, 3)
        for rows in (1, 8, 32, 256, 2048):
            total = [0.0, 0.0, 0.0]
            for n_out, n_in, layers in shapes:
                if n_out > 9999 and rows > 32:
                    continue                     # the head sees one row a sequence
                copies = 1 if n_out > 9999 else 12          # more than the caches hold, as in a model
                plain = [torch.randn(n_out, n_in, dtype=dtype) for _ in range(copies)]
                x = torch.randn(rows, n_in, dtype=dtype)
                packed = [torch.ops.mkldnn._reorder_linear_weight(w, 32) for w in plain]
                onednn = lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
                ways = (F.linear, plain), (onednn, packed), (ops.linear, [ops.pack(w) for w in plain])
                cycles, best = [itertools.cycle(weights) for _, weights in ways], [math.inf] * 3
                for _ in range(4 if rows > 100 else 24):
                    for i, (product, _) in enumerate(ways):       # in turn, so that a slow moment hits all three
                        start = time.perf_counter()
                        product(x, next(cycles[i]))
                        best[i] = min(best[i], time.perf_counter() - start)
                total = [t + seconds * layers * 1000 for t, seconds in zip(total, best)]
            print(f"{str(dtype)[6:]:10}{rows:6}" + "".join(f"{t:15.1f}" for t in total))


STEPS = ("1 decode", 1, 128), ("8 decodes", 8, 128), ("32 decodes", 32, 300), ("prefill", 0, 2048)      # requests, tokens


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
    """Where a step's time goes, in ms: the operations of cpu_kernels.c by kind, PyTorch and Python around them in the model,
    and the engine (scheduling, building the batch, sampling, handing tokens back). Of each the lower quartile of the steps.
    Floor: what the step can't do without at this machine's rates, just measured. For decodes each weight is read once, for
    a prefill its products' multiply-adds (attention's left out of both)."""
    import torch
    from nano_serve import LLM, SamplingParams
    torch.set_num_threads(args.threads)
    numbers = torch.randn(1 << 26)
    read_rate = numbers.nbytes / lower_quartile(lambda: numbers.sum(), 8)
    print(f"{'':26}" + "".join(f"{name:>11}" for name in ("step", "floor", "products", "attention", "norm, rope", "model", "engine")))
    for dtype in args.dtypes:
        square = torch.randn(2048, 2048, dtype=getattr(torch, dtype))
        flops = 2 * 2048 ** 3 / lower_quartile(lambda: square @ square, 8)
        llm = LLM(args.model, dtype=dtype, threads=args.threads, max_num_batched_tokens=4096, enable_prefix_caching=False)
        engine, rng, spent = llm.engine, random.Random(0), {}
        model, ops, execute = engine.executor.model, engine.executor.model.ops, engine.executor.execute

        def timed(function, kind):
            def call(*args, **more):
                start = time.perf_counter()
                result = function(*args, **more)
                spent[kind] = spent.get(kind, 0) + time.perf_counter() - start
                return result
            return call
        kinds = {"linear": "products", "paged_attention": "attention", "rms_norm": "rest", "rope_and_write_kv": "rest"}
        plain = {name: getattr(ops, name) for name in kinds}
        for name, kind in kinds.items():
            setattr(ops, name, timed(plain[name], kind))
        engine.executor.execute = timed(execute, "model")
        matrices = [proj.packed for proj in model.modules() if getattr(proj, "packed", None) is not None]
        size, numbers_of = sum(p.nbytes for p in matrices), sum(p.n_out * p.n_in for p in matrices)
        greedy = SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)
        for name, batch, length in STEPS:
            rows, ids = [], itertools.count()
            start_one = lambda: engine.add_request(
                f"{name}-{next(ids)}", [rng.choice(ids_of(args.model)) for _ in range(length)], greedy)
            for _ in range(batch):
                start_one()
            for i in range(20 if batch else 6):
                if not batch:
                    start_one()
                spent.clear()
                start = time.perf_counter()
                engine.step()
                step = time.perf_counter() - start
                inside = spent["products"] + spent["attention"] + spent["rest"]
                if i > 3 or not batch and i > 0:
                    rows.append([step, spent["products"], spent["attention"], spent["rest"], spent["model"] - inside,
                                 step - spent["model"]])
                if not batch:
                    engine.abort_request(f"{name}-{i}")
            step, *parts = (sorted(column)[len(column) // 4] * 1000 for column in zip(*rows))
            head = max((p for p in matrices), key=lambda p: p.n_out)
            floor = size / read_rate if batch else 2 * length * (numbers_of - head.n_out * head.n_in) / flops
            print(f"{dtype:10}{name:16}" + "".join(f"{ms:11.2f}" for ms in (step, floor * 1000, *parts)))
            for i in range(batch):
                engine.abort_request(f"{name}-{i}")
        for name, function in plain.items():
            setattr(ops, name, function)
        llm.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face checkpoint folder, such as SmolLM2-135M-Instruct")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM installed")
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
