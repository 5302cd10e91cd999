"""How fast is it? (chapter 2, "如何衡量一个 LLM Serving 系统").  A workload, sent to the engine here.

    python chapters/tools/bench.py --num-prompts 32 --request-rate 8 --goodput ttft:500 tpot:50
    python chapters/tools/bench.py --dataset-path trace.csv --num-prompts 100      see workloads.py

Prints the table of `vllm bench serve`, writes JSON with its field names (--save-result) and StepRecords (--records).
What the figures mean is in metrics.py.  The rest of measuring is to send honestly:

- A request's clock starts when it is due, not when a busy engine gets to look at it: else the worst waits are not seen.
- Arrivals don't wait for answers (--request-rate, an open loop: 开环); or they do, for a place among --max-concurrency (a
  closed loop, 闭环), and then that wait is a figure of its own.
- The first requests pay for caches and memory: they are a warm-up, and appear nowhere.
- Lengths are fixed by ignoring EOS, so that two runs do the same work.

Mirrors vLLM's benchmarks/serve.py and benchmarks/datasets/datasets.py.  Leaves out HTTP, ramp-up, multimodal data,
LoRA.  Differs: the warm-up's prefix blocks are forgotten.  Read in order: run, main.  simulator.py sends the same
workloads through the same `run` and `main` to an engine in virtual time.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, fields

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from metrics import (METRICS, RequestFuncOutput, add_cost, parse_goodput, parse_percentiles, summarize,  # noqa: E402
                     table)
from options import check_at_least, check_writable, end_quietly, naming  # noqa: E402
from request import RequestRefused, SamplingParams  # noqa: E402
from workloads import SampleRequest, arrival_times, random_requests, read_requests  # noqa: E402

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
    # A simulated engine takes many steps at once, up to the next arrival, and decides the same.
    step_until = getattr(engine, "step_until", lambda until: engine.step())
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
        for result in step_until(begin + times[order[0]] if order and places else math.inf):
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


def make_parser(prog: str = "bench.py", description: str = __doc__) -> argparse.ArgumentParser:
    from nano_serve import EngineArgs
    parser = argparse.ArgumentParser(prog=prog, description=description.split("\n")[0])
    add = parser.add_argument_group("the workload").add_argument
    add("--dataset-path", metavar="FILE", help="requests from JSON lines, or an Azure or Mooncake trace; "
        "default: random ones")
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
    add("--price-per-hour", type=float, metavar="PRICE", help="of a GPU, or this machine: tokens' cost")
    add("--records", metavar="FILE", help="write the StepRecords as JSON lines, for chapters/tools/show.py")
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
    """(engine, vocabulary size, encode) for the parsed options.  ValueError: what cannot be had."""
    from nano_serve import EngineArgs, LLMEngine
    engine = LLMEngine(EngineArgs(**{option.name: getattr(args, option.name) for option in fields(EngineArgs)}))
    return engine, engine.config.vocab_size, engine.codec.encode


def make_progress(stream=sys.stderr):
    """A line that is rewritten on a terminal, or a new one every five seconds elsewhere."""
    tty, last = stream.isatty(), [time.monotonic()]

    def progress(done, total, tokens):
        now = time.monotonic()
        if now - last[0] >= (0.1 if tty else 5.0):
            last[0] = now
            print(f"{done}/{total} requests ended, {tokens} tokens", end="\r" if tty else "\n", file=stream, flush=True)
    return progress


def main(argv=None, parser=None, make_engine=make_engine, backend: str = "nano-serve", add_figures=None) -> int:
    """The command.  simulator.py brings its own parser and engine, and `add_figures(result, engine, args)`."""
    parser = parser or make_parser()
    args, here = parser.parse_args(argv), backend == "nano-serve"
    engine, date = None, time.strftime("%Y%m%d-%H%M%S")
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
            requests = list(itertools.islice(read_requests(args.dataset_path, vocab_size, encode, args.seed,
                                                           engine.scheduler.config.max_model_len), args.num_prompts))
        else:
            requests = random_requests(args.num_prompts, args.random_input_len, args.random_output_len,
                                       args.random_range_ratio, args.random_prefix_len, vocab_size, args.seed)
        if not requests:
            raise ValueError("no requests to send: --num-prompts or the dataset is empty")
        times = arrival_times(requests, args.request_rate, args.burstiness, args.seed)
        sampling = {"temperature": args.temperature, "ignore_eos": not args.no_ignore_eos}
        if args.num_warmups and here:
            warm_up(engine, requests[0], args.num_warmups)
        outputs, duration = run(engine, requests, times, args.max_concurrency, sampling, make_progress())
        result = summarize(outputs, duration, goodput, percentiles, args.max_concurrency)
        if add_figures:
            add_figures(result, engine, args)
        elif args.price_per_hour is not None:
            add_cost(result, args.price_per_hour)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
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
    if here and result["peak_rss_bytes"]:
        print(f"Peak memory of this process and its workers: {result['peak_rss_bytes'] / 2 ** 20:.0f} MiB")
    try:
        if args.records:
            with naming("--records", args.records):
                write_records(args.records, engine.records)
        if saved[1]:
            save_result(*saved, result, args.save_detailed)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
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
