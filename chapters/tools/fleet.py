"""A fleet (chapter 13): N replicas of an engine behind a router, all on one virtual clock.

    python chapters/tools/fleet.py --speed 30 --replicas 1 2 3 4 --max-model-len 16384 \\
                                   --dataset-path chapters/data/azure_llm_2023_conv_first600.csv
    python chapters/tools/fleet.py --policies round_robin least_loaded prefix_aware --block-size 512 \\
                                   --dataset-path chapters/data/mooncake_fast25_conv_first500.jsonl.gz

    Router     which replica gets a request: round_robin, least_loaded, prefix_aware
    Fleet      replicas that move only when somebody looks
    serve      a workload through a fleet, into a Summary

A replica is a SimulatedEngine, and knows nothing of the others.  What a router knows of it is what a router could know:
which requests it sent there, and which of them have ended by now.  Every choice follows from the workload, ties go to
the lowest number, so a run repeats to the last bit.

Mirrors the choice of vLLM's data-parallel front end, by load, and of SGLang's router, by prefix and load.  Leaves out
what lies between them: networks, failures, replicas that come and go.
vLLM: v1/engine/core_client.py:1468 DPLBAsyncMPClient.get_core_engine_for_request
"""
from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import math
import pathlib
import sys
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Iterable, Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich.table import Table  # noqa: E402

from ledger import named, title  # noqa: E402
from metrics import RequestFuncOutput, Summary, parse_goodput  # noqa: E402
from options import check_at_least, check_folder, end_quietly, make_console, naming  # noqa: E402
from request import RequestRefused, SamplingParams  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from show import LineChart, save_svg  # noqa: E402
from simulator import SimulatedEngine, output_of  # noqa: E402
from workloads import HASH_BLOCK, SampleRequest, read_requests  # noqa: E402

POLICIES = ("round_robin", "least_loaded", "prefix_aware")


def prefix_keys(request: SampleRequest) -> Iterable[int]:
    """A name for each whole block of 512 prompt tokens and all before it: the trace's own, if it has some."""
    if request.prefix_ids is not None:
        return request.prefix_ids[:len(request.prompt_token_ids) // HASH_BLOCK]
    tokens, key, keys = request.prompt_token_ids, 0, []
    for end in range(HASH_BLOCK, len(tokens) + 1, HASH_BLOCK):
        key = hash((key, *tokens[end - HASH_BLOCK:end]))        # of numbers: the same in every process
        keys.append(key)
    return keys


class Router:
    """Chooses a replica for each request.

    round_robin    one after the other
    least_loaded   the one with the fewest requests that have not ended
    prefix_aware   the one that was last sent the longest part of this prompt, at least `match` of it: its prefix cache
                   may still hold that.  Without such a part, or if that replica has over `slack` requests more than the
                   least loaded and over `factor` times as many, the least loaded: a cache is no use behind a queue

    `seen` is a guess, as a router's is: it remembers the last `memory` blocks sent, whatever the replicas have evicted.
    SGLang's router has the same three rules, with a tree of texts in place of the blocks."""

    def __init__(self, policy: str, num_replicas: int, match: float = 0.3, slack: int = 4, factor: float = 1.25,
                 memory: int = 1_000_000):
        if policy not in POLICIES:
            raise ValueError(f"--policies knows {', '.join(POLICIES)}, not {policy!r}")
        self.policy, self.match, self.slack, self.factor, self.memory = policy, match, slack, factor, memory
        self.loads = [0] * num_replicas         # requests sent there that have not ended
        self.turn = -1
        self.seen: OrderedDict[int, int] = OrderedDict()    # prefix block -> replica it was last sent to

    def choose(self, request: SampleRequest) -> int:
        """The replica, with the request already counted there."""
        if self.policy == "round_robin":
            self.turn = (self.turn + 1) % len(self.loads)
            chosen = self.turn
        else:
            chosen = self.loads.index(min(self.loads))
            if self.policy == "prefix_aware":
                chosen = self._nearest(request, chosen)
        self.loads[chosen] += 1
        return chosen

    def _nearest(self, request: SampleRequest, least: int) -> int:
        keys, length, owner = list(prefix_keys(request)), 0, None
        for key in keys:
            if key not in self.seen:
                break
            length, owner = length + HASH_BLOCK, self.seen[key]
        chosen = least
        if owner is not None and length >= self.match * len(request.prompt_token_ids):
            load, lowest = self.loads[owner], self.loads[least]
            if load <= lowest + self.slack or load <= self.factor * lowest:
                chosen = owner
        for key in keys:
            self.seen[key] = chosen
            self.seen.move_to_end(key)
        while len(self.seen) > self.memory:
            self.seen.popitem(last=False)
        return chosen


class Fleet:
    """Replicas on one clock.  A replica is brought to the present only when a request goes there, or when one of its
    requests may have ended: until then it decodes by itself, and nobody asks.

    `wake` holds for each replica that has work a time before which none of its requests can end."""

    def __init__(self, engines: list[SimulatedEngine], router: Router, summary: Summary):
        self.engines, self.router, self.summary = engines, router, summary
        self.wake: list[tuple[float, int]] = []         # (time, replica), one entry each that counts: self.next
        self.next = [math.inf] * len(engines)
        self.ended: list[tuple[float, int]] = []        # ends that lie ahead: a step had begun, and shows its end early
        self.num_sent = 0

    def send(self, request: SampleRequest) -> None:
        """A request arrives now, at its timestamp."""
        now = request.timestamp
        self.advance(now)
        chosen = self.router.choose(request)
        engine = self.engines[chosen]
        self._run(chosen, now)                          # it may have decoded unwatched
        engine.now = max(engine.now, now)
        self.num_sent += 1
        try:
            engine.add_request(str(self.num_sent), request.prompt_token_ids, SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=request.expected_output_len), now)
        except RequestRefused as refusal:
            self.router.loads[chosen] -= 1
            self.summary.add(RequestFuncOutput(len(request.prompt_token_ids), now, error=str(refusal)))
        self._set_wake(chosen)

    def advance(self, now: float) -> None:
        """Learn of every request that has ended by `now`."""
        while self.wake and self.wake[0][0] <= now:
            due, chosen = heapq.heappop(self.wake)
            if due == self.next[chosen]:                # or it was set anew since
                self._run(chosen, now)
                self._set_wake(chosen)
        while self.ended and self.ended[0][0] <= now:
            self.router.loads[heapq.heappop(self.ended)[1]] -= 1

    def _run(self, chosen: int, until: float) -> None:
        engine = self.engines[chosen]
        while engine.now < until and engine.has_unfinished_requests():
            for result in engine.step_until(until):
                heapq.heappush(self.ended, (engine.now, chosen))
                self.summary.add(output_of(result.metrics))

    def _set_wake(self, chosen: int) -> None:
        engine = self.engines[chosen]
        self.next[chosen] = engine.earliest_end()
        if self.next[chosen] < math.inf:
            heapq.heappush(self.wake, (self.next[chosen], chosen))

    def finish(self) -> float:
        """Let everybody end; returns when the last one did."""
        for chosen in range(len(self.engines)):
            self._run(chosen, math.inf)
        return max(engine.now for engine in self.engines)


def serve(ledger, config, requests: Iterator[SampleRequest], num_replicas: int, policy: str,
          goodput: dict | None = None, enable_prefix_caching: bool = True, num_kv_blocks: int | None = None) -> dict:
    """A workload, in order of time, through a fleet: the figures of a Summary, and how much each replica served."""
    # 256 pools are 20 million blocks, which Python's collector would look through again and again, and find in use.
    gc.disable()
    engines = [SimulatedEngine(ledger, config, num_kv_blocks, enable_prefix_caching, keep_records=False)
               for _ in range(num_replicas)]
    gc.freeze()
    gc.enable()
    fleet = Fleet(engines, Router(policy, num_replicas), Summary(goodput))
    last = 0.0
    for request in requests:
        if request.timestamp is None or request.timestamp < last:
            raise ValueError(f"a request comes at {request.timestamp}, the one before at {last}: a fleet needs "
                             "requests with times, in order")
        last = request.timestamp
        fleet.send(request)
    result = fleet.summary.result(fleet.finish())
    gc.unfreeze()
    steps = [engine.num_request_steps for engine in engines]
    return {"replicas": num_replicas, "policy": policy, **result, "num_request_steps": sum(steps),
            "busiest_over_mean": max(steps) * num_replicas / sum(steps) if sum(steps) else None}


def faster(read, speed: float, copies: int = 1) -> Iterator[SampleRequest]:
    """A trace with its time run `speed` times as fast, `copies` times, each beginning as the last ends.  `read(seed)`
    gives its requests; each copy is read anew, with other made-up tokens and no memory of the one before."""
    start = 0.0
    for copy in range(copies):
        end = start
        for request in read(copy):
            end = start + (request.timestamp or 0.0) / speed
            yield replace(request, timestamp=end)
        start = end


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="fleet.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--dataset-path", required=True, metavar="FILE", help="requests with times, see workloads.py")
    add("--num-prompts", type=int, help="the first so many [all]")
    add("--speed", type=float, default=1.0, help="run the trace's time so many times as fast [1]")
    add("--copies", type=int, default=1, help="the trace so many times, one after the other [1]")
    add("--replicas", type=int, nargs="+", default=[4], help="numbers of replicas to try [4]")
    add("--policies", nargs="+", default=["least_loaded"], metavar="POLICY", help=f"of {', '.join(POLICIES)}")
    add("--goodput", nargs="+", default=["ttft:2000", "tpot:50"], metavar="NAME:MS", help="SLO, of ttft, tpot and e2el")
    add("--model", default="llama-3-70b")
    add("--hardware", default="h100")
    add("--tensor-parallel-size", "-tp", type=int, default=8)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--max-model-len", type=int, default=131072)
    add("--block-size", type=int, default=64, help="an engine's 16 makes four times the work [64]")
    add("--num-kv-blocks", type=int)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--save", metavar="DIR", help="save the curve of goodput over replicas as SVG")
    args = parser.parse_args(argv)
    try:
        check_at_least(args, {1: "num_prompts copies block_size max_num_seqs max_model_len", 2: "num_kv_blocks"})
        if not args.speed > 0 or min(args.replicas) < 1:
            raise ValueError("--speed must be above 0, and --replicas at least 1")
        if args.save:
            check_folder("--save", args.save)
        goodput = parse_goodput(args.goodput)
        ledger = named(args.model, args.hardware, args.tensor_parallel_size, block_size=args.block_size)
        config = SchedulerConfig(args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len)
        results = []
        for policy, replicas in itertools.product(args.policies, args.replicas):
            began = time.process_time()
            requests = faster(lambda seed: itertools.islice(
                read_requests(args.dataset_path, ledger.model.vocab_size, None, seed, args.max_model_len),
                args.num_prompts), args.speed, args.copies)
            results.append(serve(ledger, config, requests, replicas, policy, goodput, args.enable_prefix_caching,
                                 args.num_kv_blocks))
            results[-1]["seconds"] = time.process_time() - began
        curve = pictures(results)
        make_console().print(title(ledger, args.model) + " a replica, simulated", *curve)
        with naming("--save", args.save):
            if args.save:
                save_svg(curve[1], pathlib.Path(args.save) / "fleet.svg")
    except (OSError, ValueError) as error:
        print(f"fleet.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def pictures(results: list[dict]):
    """The table, and goodput over replicas, a curve for each policy."""
    shown = Table("policy", "replicas", "req/s", "goodput", "hit %", "P50 TTFT", "P99 TTFT ms", "P99 TPOT", "CPU s")
    for r in results:
        shown.add_row(r["policy"], str(r["replicas"]), f"{r['request_throughput']:.2f}",
                      f"{r['request_goodput'] or 0:.2f}", f"{100 * (r['prefix_hit_rate'] or 0):.1f}",
                      *[f"{r[key] or 0:,.0f}" for key in ("median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")],
                      f"{r['seconds']:.1f}" if "seconds" in r else "")
    xs = sorted({r["replicas"] for r in results})
    series = {policy: [next(r["request_goodput"] or 0.0 for r in results if (r["policy"], r["replicas"]) == (policy, x))
                       for x in xs] for policy in dict.fromkeys(r["policy"] for r in results)}
    return shown, LineChart("Goodput (有效吞吐)", xs, series, "replicas", "requests/s within the SLO")


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
