"""How fast is it? (chapter 2, "如何衡量一个 LLM Serving 系统").  A workload, sent to the engine here or to a simulated one.

    python chapters/tools/bench.py --num-prompts 32 --request-rate 8 --goodput ttft:500 tpot:50
    python chapters/tools/bench.py --simulate h100 --model llama-3-70b -tp 8 --max-concurrency 64 --num-prompts 256 \\
                             --random-prefix-len 2000 --random-input-len 50 --random-output-len 300

Prints the table of `vllm bench serve`, writes JSON with its field names (--save-result) and StepRecords (--records).
What the figures mean is in metrics.py.  The rest of measuring is to send honestly:

- A request's clock starts when it is due, not when a busy engine gets to look at it: else the worst waits are not seen.
- Arrivals don't wait for answers (--request-rate, an open loop: 开环); or they do, for a place among --max-concurrency (a
  closed loop, 闭环), and then that wait is a figure of its own.
- The first requests pay for caches and memory: they are a warm-up, and appear nowhere.
- Lengths are fixed by ignoring EOS, so that two runs do the same work.

Mirrors vLLM's benchmarks/serve.py and benchmarks/datasets/datasets.py.  Leaves out HTTP (chapter 10), ramp-up,
multimodal data, LoRA.  Differs: the warm-up's prefix blocks are forgotten.  Read in order: workloads, run, main.
"""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, fields

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from metrics import METRICS, RequestFuncOutput, parse_goodput, parse_percentiles, summarize, table  # noqa: E402
from options import check_at_least, check_writable, end_quietly, naming  # noqa: E402
from request import RequestRefused, SamplingParams  # noqa: E402

# ----------------------------------------------------------------------------------------------------------------------
# Workloads


@dataclass
class SampleRequest:
    """One request to send.  `timestamp`: when, in seconds from the start; None leaves it to the request rate.
    vLLM: benchmarks/datasets/datasets.py:77 SampleRequest"""
    prompt_token_ids: list[int]
    expected_output_len: int
    timestamp: float | None = None


def random_requests(num_prompts: int, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0,
                    vocab_size: int = 1000, seed: int = 0) -> list[SampleRequest]:
    """Random token ids: a prefix that all share, then each its own part; lengths uniform in len * (1 -+ range_ratio).

    The running example is prefix_len=2000, input_len=50, output_len=300.  The same seed gives the same workload.
    vLLM: benchmarks/datasets/datasets.py:584 RandomDataset.sample"""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio is {range_ratio}, must be from 0 to below 1")
    rng = random.Random(seed)

    def length(middle: int) -> int:
        return max(1, rng.randint(math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))))

    prefix = rng.choices(range(vocab_size), k=prefix_len)
    return [SampleRequest(prefix + rng.choices(range(vocab_size), k=length(input_len)), length(output_len))
            for _ in range(num_prompts)]


def file_requests(path: str, vocab_size: int = 1000, encode=None, seed: int = 0) -> list[SampleRequest]:
    """A workload or a trace from JSON lines, one request each:

        {"prompt_token_ids": [..] | "prompt": "text" | "input_len": 512, "output_len": 64, "timestamp": 0.25}

    input_len stands for random ids, timestamp (seconds) is optional.  ValueError names a line that is not like this."""
    rng, requests = random.Random(seed), []
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "prompt" in row and encode is None:
                raise ValueError("text needs a tokenizer, and this engine has none")
            ids = (row["prompt_token_ids"] if "prompt_token_ids" in row else encode(row["prompt"]) if "prompt" in row
                   else rng.choices(range(vocab_size), k=int(row["input_len"])))
            requests.append(SampleRequest(ids, int(row["output_len"]), row.get("timestamp")))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error!r}; expected prompt_token_ids, prompt or input_len, and "
                             "output_len") from None
    return requests


def arrival_times(requests: list[SampleRequest], request_rate: float = math.inf, burstiness: float = 1.0,
                  seed: int = 0) -> list[float]:
    """When each request is sent, seconds from the start: its own timestamp, else by the rate (requests/s).

    inf sends all at once.  burstiness 1 is a Poisson process (exponential gaps), inf a fixed gap, anything else gamma
    gaps; they are then stretched so that the last of n requests comes at exactly n / rate, for any seed.
    vLLM: benchmarks/serve.py:393 get_request"""
    if not (request_rate > 0 and burstiness > 0):       # so NaN is refused, too
        raise ValueError(f"--request-rate {request_rate} and --burstiness {burstiness} must be above 0")
    if any(request.timestamp is not None for request in requests):
        return [request.timestamp or 0.0 for request in requests]
    if math.isinf(request_rate):
        return [0.0] * len(requests)
    if math.isinf(burstiness):
        return [(i + 1) / request_rate for i in range(len(requests))]
    rng, times = random.Random(seed), [0.0]
    for _ in requests:
        times.append(times[-1] + rng.gammavariate(burstiness, 1 / (request_rate * burstiness)))
    if not times[-1]:
        raise ValueError(f"--burstiness is {burstiness}, so little that every gap is rounded to 0")
    return [t * (len(requests) / request_rate / times[-1]) for t in times[1:]]


# ----------------------------------------------------------------------------------------------------------------------
# The run


def run(engine, requests: list[SampleRequest], times: list[float], max_concurrency: int | None = None,
        sampling: dict | None = None, progress=None, prefix: str = "req") -> tuple[list[RequestFuncOutput], float]:
    """Send `requests` at `times`, step the engine until all ended.  Returns what each did, in order, and the duration.

    A request whose time came while a step was running has waited for that step's end: its start is its own time, not
    the moment this loop got to look.  Under `max_concurrency` it first waits for a place, its client_queue_time.
    The engine's clock may be virtual; `progress(done, total, output_tokens)` is called after each step.
    vLLM: benchmarks/serve.py:768 benchmark"""
    begin, sleep = engine.clock(), getattr(engine, "sleep", time.sleep)
    order = deque(sorted(range(len(requests)), key=lambda i: times[i]))
    places = deque([begin] * (max_concurrency or len(requests)))     # when each free place became free
    outputs: dict[int, RequestFuncOutput] = {}
    alive: dict[str, int] = {}
    num_tokens = 0

    def send(i: int) -> None:
        due = begin + times[i]
        start = max(due, places.popleft())
        outputs[i] = RequestFuncOutput(len(requests[i].prompt_token_ids), start, client_queue_time=start - due)
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **(sampling or {})},
                                max_tokens=requests[i].expected_output_len)
        try:
            engine.add_request(f"{prefix}-{i}", requests[i].prompt_token_ids, params, arrival_time=start)
            alive[f"{prefix}-{i}"] = i
        except RequestRefused as refusal:
            outputs[i].error = str(refusal)
            places.append(start)

    while order or alive:
        while order and places and begin + times[order[0]] <= engine.clock():
            send(order.popleft())
        if not alive:
            if order:
                sleep(max(begin + times[order[0]] - engine.clock(), 0.0))
            continue
        for result in engine.step():
            if not result.finished:
                continue
            i = alive.pop(result.request_id)
            finish(outputs[i], result)
            places.append(result.metrics.finish_time)
            num_tokens += outputs[i].output_tokens
        if progress:
            progress(len(outputs) - len(alive), len(requests), num_tokens)
    return [outputs[i] for i in range(len(requests))], engine.clock() - begin


def finish(output: RequestFuncOutput, result) -> None:
    """Copy a finished RequestOutput's figures."""
    metrics = result.metrics
    output.token_times, output.finish_reason = list(metrics.token_times), result.outputs[0].finish_reason
    output.generated_text = result.outputs[0].text
    output.num_cached_tokens, output.num_preemptions = metrics.num_cached_tokens, metrics.num_preemptions
    if metrics.first_scheduled_time is not None:
        output.queue_time = metrics.first_scheduled_time - metrics.arrival_time
    if output.finish_reason not in ("stop", "length"):
        output.error = result.error or f"ended with {output.finish_reason}"
    elif not output.token_times:
        output.error = "no token"


def warm_up(engine, request: SampleRequest, count: int) -> None:
    """Run `count` copies of a request whose figures nobody sees, then forget their steps and their prefix blocks."""
    run(engine, [request] * count, [0.0] * count, prefix="warmup")
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.records.clear()


def peak_rss_bytes() -> int | None:
    """The most memory this process has held at once, plus the most that one of its ended children has (bytes); None on
    Windows, which doesn't keep it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return unit * sum(resource.getrusage(who).ru_maxrss for who in processes)


def write_records(path, records) -> None:
    """StepRecords as JSON lines, what chapters/tools/show.py reads."""
    with open(path, "w") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# The command line

AT_LEAST = {0: "random_prefix_len num_warmups", 2: "num_kv_blocks",      # of the blocks, one is the null block
            1: "num_prompts random_input_len random_output_len max_concurrency block_size max_num_seqs max_model_len"}


def make_parser() -> argparse.ArgumentParser:
    from nano_serve import EngineArgs
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.split("\n")[0])
    add = parser.add_argument_group("the workload").add_argument
    add("--dataset-path", metavar="FILE", help="requests from JSON lines; default: random ones")
    add("--num-prompts", type=int, default=32)
    add("--random-input-len", type=int, default=128, metavar="TOKENS")
    add("--random-output-len", type=int, default=64, metavar="TOKENS")
    add("--random-range-ratio", type=float, default=0.0, help="lengths uniform in len * (1 -+ this) [0]")
    add("--random-prefix-len", type=int, default=0, metavar="TOKENS", help="tokens that all prompts begin with [0]")
    add("--request-rate", type=float, default=math.inf, help="requests a second [inf: all at once]")
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals, inf: a fixed gap [1]")
    add("--max-concurrency", type=int, help="requests under way at once, the others wait at the client")
    add("--num-warmups", type=int, default=1, help="requests before the measurement, in no figure [1]")
    add("--temperature", type=float, default=0.0)
    add("--no-ignore-eos", action="store_true", help="let a request end before its output length")
    add = parser.add_argument_group("the result").add_argument
    add("--goodput", nargs="+", metavar="NAME:MS", help="SLO, of ttft, tpot and e2el, as in ttft:500 tpot:50")
    add("--percentile-metrics", default="ttft,tpot,itl", help="whose figures to print [ttft,tpot,itl]; also e2el")
    add("--metric-percentiles", default="90,99", help="[90,99]")
    add("--save-result", action="store_true", help="write the figures as JSON, with vLLM's field names")
    add("--save-detailed", action="store_true", help="and those of every request")
    add("--result-filename", metavar="FILE", help="where [{backend}-{rate}qps-{model}-{date}.json]")
    add("--records", metavar="FILE", help="write the StepRecords as JSON lines, for chapters/tools/show.py")
    parser.add_argument("--simulate", metavar="GPU", help="serve --model llama-3-70b, llama-3-8b or a folder on h100, "
                        "h200, a100, l4 or b200 in virtual time (chapters/tools/ledger.py) instead of here")
    add = parser.add_argument_group("the engine").add_argument
    for option in fields(EngineArgs):
        names = ["--" + option.name.replace("_", "-"), *filter(None, [option.metadata.get("short")])]
        if isinstance(option.default, bool):
            add(*names, action=argparse.BooleanOptionalAction, default=option.default, help=option.metadata["help"])
        else:
            add(*names, type=int if option.default is None else type(option.default), default=option.default,
                help=option.metadata["help"])
    return parser


def make_engine(args):
    """(engine, vocabulary size, encode) for the parsed options.  ValueError: options that cannot be had."""
    if not args.simulate:
        from nano_serve import EngineArgs, LLMEngine
        engine = LLMEngine(EngineArgs(**{option.name: getattr(args, option.name) for option in fields(EngineArgs)}))
        return engine, engine.config.vocab_size, engine.codec.encode
    import ledger as L
    if args.simulate not in L.HARDWARE:
        raise ValueError(f"--simulate knows {', '.join(L.HARDWARE)}, not {args.simulate!r}")
    model = L.MODELS.get(args.model) or L.ModelShape.from_config(args.model)
    config = L.SchedulerConfig(
        args.max_num_seqs or min(256, args.max_num_batched_tokens), args.max_num_batched_tokens,
        args.max_model_len or 8192, args.enable_chunked_prefill, args.scheduling_policy,
        args.long_prefill_token_threshold, max_num_waiting=args.max_num_waiting)
    engine = L.SimulatedEngine(L.Ledger(model, L.HARDWARE[args.simulate], args.tensor_parallel_size,
                                        block_size=args.block_size), config, args.num_kv_blocks,
                               args.enable_prefix_caching, args.gpu_memory_utilization)
    return engine, model.vocab_size, None


def make_progress(stream=sys.stderr):
    """A line that is rewritten on a terminal, or a new one every five seconds elsewhere."""
    tty, last = stream.isatty(), [time.monotonic()]

    def progress(done, total, tokens):
        now = time.monotonic()
        if now - last[0] >= (0.1 if tty else 5.0):
            last[0] = now
            print(f"{done}/{total} requests ended, {tokens} tokens", end="\r" if tty else "\n", file=stream, flush=True)
    return progress


def main(argv=None) -> int:
    args = make_parser().parse_args(argv)
    engine, date, backend = None, time.strftime("%Y%m%d-%H%M%S"), "simulated" if args.simulate else "nano-serve"
    saved = "--result-filename", args.result_filename
    if args.save_result and not args.result_filename:
        saved = "--save-result", f"{backend}-{args.request_rate}qps-{pathlib.Path(args.model).name}-{date}.json"
    try:
        check_at_least(args, AT_LEAST)
        for option, path in (saved, ("--records", args.records)):
            if path:
                check_writable(option, path)
        goodput, metrics = parse_goodput(args.goodput), args.percentile_metrics.split(",")
        if unknown := [name for name in metrics if name not in METRICS]:
            raise ValueError(f"--percentile-metrics knows {', '.join(METRICS)}, not {unknown[0]!r}")
        percentiles = parse_percentiles(args.metric_percentiles)
        engine, vocab_size, encode = make_engine(args)
        if args.dataset_path:
            requests = file_requests(args.dataset_path, vocab_size, encode, args.seed)[:args.num_prompts]
        else:
            requests = random_requests(args.num_prompts, args.random_input_len, args.random_output_len,
                                       args.random_range_ratio, args.random_prefix_len, vocab_size, args.seed)
        if not requests:
            raise ValueError("no requests to send: --num-prompts or the dataset is empty")
        times = arrival_times(requests, args.request_rate, args.burstiness, args.seed)
        sampling = {"temperature": args.temperature, "ignore_eos": not args.no_ignore_eos}
        if args.num_warmups and not args.simulate:
            warm_up(engine, requests[0], args.num_warmups)
        outputs, duration = run(engine, requests, times, args.max_concurrency, sampling, make_progress())
        result = summarize(outputs, duration, goodput, percentiles, args.max_concurrency)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        if hasattr(engine, "close"):
            engine.close()
    result = {"date": date, "backend": backend, "model_id": args.model, "num_prompts": len(requests),
              "burstiness": args.burstiness, "max_concurrency": args.max_concurrency,
              "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
              **result, "peak_rss_bytes": peak_rss_bytes()}
    for error, count in Counter(output.error for output in outputs if output.error).most_common(10):
        print(f"{count} failed: {error}")
    print(table(result, args.max_concurrency, args.request_rate, metrics + ["client_queue_time"]))
    if not args.simulate:
        if result["peak_rss_bytes"]:
            print(f"Peak memory of this process and its workers: {result['peak_rss_bytes'] / 2 ** 20:.0f} MiB")
    try:
        if args.records:
            with naming("--records", args.records):
                write_records(args.records, engine.records)
        if saved[1]:
            save_result(*saved, result, args.save_detailed)
    except ValueError as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    return 0 if result["completed"] else 1


DETAILED = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts",
            "errors")


def save_result(option: str, path, result: dict, detailed: bool) -> None:
    """One JSON object; vLLM leaves the lists out without --save-detailed, too."""
    kept = {key: value for key, value in result.items() if detailed or key not in DETAILED}
    with naming(option, path):
        pathlib.Path(path).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
