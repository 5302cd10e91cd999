"""A simulated server under load, as the walk-throughs ask for it: real lengths, a Poisson process, one figure more.

    server = Server(slo={"ttft": 500, "tpot": 30})      Llama-3-70B on 8 H100s, in virtual time
    outputs, figures = server.at_rate(8)                Azure's conversations, 8 a second, whatever the server does
    server.at_rate(8, max_num_seqs=24)                  with another option of the scheduler
    server.send(requests, times, max_concurrency=3)     your own workload; in a closed loop
    rank_interval(n)                                    how sure a P99 of n values is

Figures are those of metrics.summarize, with MFU, MBU and cost, and besides: kept (the share of all requests within the
SLO), kv_use (mean share of the pool), kv_peak (blocks), recomputed (tokens computed once more after preemptions).
"""
from __future__ import annotations

import gc
import math
import pathlib
import sys
from dataclasses import replace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import bench  # noqa: E402
from ledger import Ledger, Work  # noqa: E402
from metrics import add_cost, add_efficiency, summarize  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402
from workloads import arrival_times, file_requests  # noqa: E402


def real_lengths(which="conv", n=300):
    """n requests with the lengths of Azure's conversations ("conv") or code completions ("code") of 2023, in their
    order, from the beginning again if there are not so many. When they are sent is the caller's to say."""
    (path,) = (HERE.parent / "data").glob(f"azure_llm_2023_{which}_first*.csv")
    known = [replace(request, timestamp=None) for request in file_requests(str(path))]
    return (known * -(-n // len(known)))[:n]


class Server:
    """The engine's own scheduler and pool on a ledger's clock, without prefix cache."""

    def __init__(self, ledger=None, slo=None, price=0.0, requests=300):
        self.ledger, self.slo, self.price = ledger or Ledger(), slo, price
        self.requests, self.known = real_lengths(n=requests), {}

    def send(self, requests, times, max_concurrency=None, num_kv_blocks=None, progress=None, **options):
        """Returns (what each request saw, the figures). progress(engine): a function that bench.run calls after steps.
        options: of SchedulerConfig, before these defaults."""
        config = SchedulerConfig(**{"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 16384,
                                    **options})
        gc.disable()        # a pool of 90,000 blocks is made, none of them garbage: four times as fast without a search
        engine = SimulatedEngine(self.ledger, config, num_kv_blocks, enable_prefix_caching=False, keep_records=False)
        gc.enable()
        outputs, seconds = bench.run(engine, requests, times, max_concurrency, progress=progress and progress(engine))
        figures, work = summarize(outputs, seconds, self.slo, (50, 95, 99), max_concurrency), Work(*engine.work)
        add_efficiency(figures, self.ledger.model_flops(work), self.ledger.model_bytes(work, engine.num_steps),
                       self.ledger.hardware, self.ledger.tp)
        add_cost(figures, self.price, self.ledger.tp)
        needed = sum(o.prompt_len + o.output_tokens - 1 for o in outputs if o.success)     # the last is never fed in
        good = (figures["request_goodput"] or 0.0) * seconds
        return outputs, figures | {
            "kept": good / len(outputs), "recomputed": work.tokens - needed, "kv_peak": engine.kv_usage.peak,
            "kv_use": engine.kv_usage.mean / engine.scheduler.kv_cache_manager.num_usable_blocks}

    def at_rate(self, rate, requests=None, burstiness=1.0, **options):
        """An open loop of `rate` requests a second; without requests, the server's own. The same is run only once."""
        key = rate, burstiness, *sorted(options.items())
        if requests is None and key in self.known:
            return self.known[key]
        some = requests or self.requests
        result = self.send(some, arrival_times(some, rate, burstiness), **options)
        if requests is None:
            self.known[key] = result
        return result


def freeze(at, seconds):
    """For `progress`: once, at the first step that ends after `at`, the server does nothing for so many seconds."""
    def watch(engine):
        done = []

        def progress(*_):
            if engine.now >= at and not done:
                done.append(engine.now)
                engine.sleep(seconds)
        return progress
    return watch


def rank_interval(n, p=99, confidence=0.95):
    """Ranks, from 0, of n sorted values between which the true p-th percentile lies with this confidence, whatever the
    distribution: how many values lie below it is binomial, n draws of p each. None where no rank is low or high enough.

    Example: of 1,000 values the true P99 lies between the 983rd and the 997th, with 95 %."""
    q, tail, below, low, high = p / 100, (1 - confidence) / 2, 0.0, None, None
    for k in range(n):                          # below: the chance that at most k values lie below the true percentile
        log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        chance = math.exp(log + k * math.log(q) + (n - k) * math.log1p(-q))
        if below + chance <= tail:
            low = k                             # value number k (from 0) lies above it with at most this chance
        below += chance
        if high is None and below >= 1 - tail:
            high = k
    return low, high
