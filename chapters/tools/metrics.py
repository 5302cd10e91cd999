"""What a run's figures mean (chapter 2, "如何衡量一个 LLM Serving 系统": TTFT, ITL, TPOT, 吞吐, SLO, 有效吞吐).

The definitions are those of `vllm bench serve`, the names those of its table and its JSON.  For a request sent at s
whose N tokens arrive at t1 .. tN, in seconds:

    TTFT = t1 - s     ITL = each gap, t2 - t1 and so on, N - 1 of them     TPOT = (tN - t1) / (N - 1)     E2EL = tN - s

A mean TPOT weighs each request alike, a mean ITL each token.  A token is what the engine sampled: text that is cut into
tokens once more gives another count, and a chunk of a stream may hold several.  All raw values go into a percentile;
averages of percentiles mean nothing.  What failed is counted as failed, and in no other figure: else a server that
refuses everybody looks fast.

What the machine did meanwhile:

    MFU   FLOPs of the model, over what the GPUs could have computed in that time.  Counted is what was computed: a
          prefix hit is not, a recompute is
    MBU   bytes that had to be read, the weights once a step, K and V once a request and step, over the bandwidth
    prefix hit rate   prompt tokens that the cache saved, over all prompt tokens (queue time: sent -> first scheduled)
    KV use            blocks that requests hold, over the pool: its mean over time, its peak, its course
    cost              GPUs x price an hour x hours, over a million output tokens, or of all tokens

Mirrors vLLM's benchmarks/serve.py.  Differs: where nothing succeeded, a latency is null instead of 0.
Read in this order: RequestFuncOutput, percentile, summarize; Summary, the same without keeping anything; the rest is
how they are printed.
"""
from __future__ import annotations

import math
import operator
import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RequestFuncOutput:
    """What the client saw of one request.  Times in seconds on the engine's clock.

    Example: sent at 10.0, tokens at 11.0, 11.1, 11.1, 11.4: TTFT 1.0, ITLs 0.1, 0.0, 0.3, TPOT 0.4 / 3, E2EL 1.4.
    vLLM: benchmarks/lib/endpoint_request_func.py:89 RequestFuncOutput
    """
    prompt_len: int
    start_time: float                 # sent, after waiting for a place under --max-concurrency
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    client_queue_time: float = 0.0    # that wait
    generated_text: str = ""
    queue_time: float | None = None   # sent -> first scheduled, inside the engine
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def success(self) -> bool:
        """Ended by itself, with a token to show.  An abort, an error or no token at all is a failure."""
        return not self.error and self.finish_reason in ("stop", "length") and bool(self.token_times)

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def ttft(self) -> float | None:
        """Time to first token: sent -> first token, queueing and prefill included."""
        return self.token_times[0] - self.start_time if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: every gap between two tokens; N - 1 values, TTFT not among them."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last - first) / (N - 1); None for a single token."""
        gaps = self.output_tokens - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps > 0 else None

    @property
    def latency(self) -> float | None:
        """End-to-end latency (E2EL): sent -> last token."""
        return self.token_times[-1] - self.start_time if self.token_times else None


def percentile(values: list[float], p: float) -> float | None:
    """The p-th percentile, 0..100, interpolated linearly between the nearest ranks (numpy's default, which vLLM uses).

    1..100: p99 is 99.01.  One value is all its percentiles; no value has none: None."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def statistics_ms(name: str, values: list[float], percentiles: list[float]) -> dict:
    """mean, median, std (of the population) and percentiles of seconds, in milliseconds, under vLLM's field names."""
    mean = math.fsum(values) / len(values) if values else None
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)) if values else None
    figures = {f"mean_{name}_ms": mean, f"median_{name}_ms": percentile(values, 50), f"std_{name}_ms": std}
    figures |= {f"p{p:g}_{name}_ms": percentile(values, p) for p in percentiles}
    return {key: None if value is None else value * 1000 for key, value in figures.items()}


def is_good(output: RequestFuncOutput, goodput: dict[str, float]) -> bool:
    """Within every limit of the SLO (服务等级目标), in ms: ttft, tpot, e2el.  As in vLLM, a single token has a TPOT of 0."""
    figures = {"ttft": output.ttft, "tpot": output.tpot or 0.0, "e2el": output.latency}
    return all(figures[name] <= limit / 1000 for name, limit in goodput.items())


def peaks(outputs: list[RequestFuncOutput]) -> tuple[float, int]:
    """(most output tokens in a second, in whole seconds from the first send; most requests under way at once)."""
    start = min((o.start_time for o in outputs), default=0.0)
    per_second: dict[int, int] = {}
    for t in (t for o in outputs for t in o.token_times):
        per_second[int(t - start)] = per_second.get(int(t - start), 0) + 1
    # Half-open intervals: at equal times, who leaves (-1) sorts before who comes (+1).
    events = sorted([(o.start_time, 1) for o in outputs] + [(o.start_time + o.latency, -1) for o in outputs])
    alive = most = 0
    for _, delta in events:
        alive += delta
        most = max(most, alive)
    return float(max(per_second.values(), default=0)), most


def summarize(outputs: list[RequestFuncOutput], duration: float, goodput: dict[str, float] | None = None,
              percentiles: tuple = (50, 90, 99), max_concurrency: int | None = None) -> dict:
    """Many requests in one dict, under the names that `vllm bench serve --save-result` writes.  goodput: limits in ms.

    Failed requests are counted in `failed` and nowhere else: neither their tokens nor their times enter any figure.
    request_throughput, output_throughput: successful requests, and their output tokens, a second.
    total_token_throughput: with their prompts.  request_goodput (有效吞吐): requests within the SLO a second.
    vLLM: benchmarks/serve.py:556 calculate_metrics"""
    good = [o for o in outputs if o.success]
    total_input, total_output = sum(o.prompt_len for o in good), sum(o.output_tokens for o in good)
    peak_tokens, peak_requests = peaks(good)
    seconds = duration or math.inf       # 0 if all were refused at once: a rate of 0 then
    result = {
        "duration": duration, "completed": len(good), "failed": len(outputs) - len(good),
        "total_input_tokens": total_input, "total_output_tokens": total_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(is_good(o, goodput) for o in good) / seconds if goodput else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "max_output_tokens_per_s": peak_tokens, "max_concurrent_requests": peak_requests,
        "input_lens": [o.prompt_len for o in outputs],
        "output_lens": [o.output_tokens if o.success else 0 for o in outputs],
        "ttfts": [o.ttft for o in outputs], "itls": [o.itls for o in outputs],
        "latencies": [o.latency for o in outputs],
        "start_times": [o.start_time for o in outputs], "queue_times": [o.client_queue_time for o in outputs],
        "generated_texts": [o.generated_text for o in outputs], "errors": [o.error for o in outputs],
    }
    result |= statistics_ms("ttft", [o.ttft for o in good], percentiles)
    result |= statistics_ms("tpot", [o.tpot for o in good if o.tpot is not None], percentiles)
    result |= statistics_ms("itl", [gap for o in good for gap in o.itls], percentiles)
    result |= statistics_ms("e2el", [o.latency for o in good], percentiles)
    if max_concurrency is not None:
        result |= statistics_ms("client_queue_time", [o.client_queue_time for o in good], percentiles)
    # Ours: what happened inside the engine.
    result |= statistics_ms("engine_queue_time", [o.queue_time for o in good if o.queue_time is not None], percentiles)
    result["cached_tokens"] = sum(o.num_cached_tokens for o in good)
    result["prefix_hit_rate"] = result["cached_tokens"] / total_input if total_input else None
    result["preemptions"] = sum(o.num_preemptions for o in good)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# The same of a run too long to keep


class Sketch:
    """Values put into boxes that are each 1 % wider than the last: any percentile to half a percent, in the memory of a
    few hundred counts, however many values there were.  Means and deviations are exact."""
    WIDTH = math.log(1.01)

    def __init__(self):
        self.counts, self.count, self.total, self.squares = {}, 0, 0.0, 0.0

    def add(self, value: float, times: int = 1) -> None:
        box = math.floor(math.log(value) / self.WIDTH) if value > 0 else None     # None: exactly 0
        self.counts[box] = self.counts.get(box, 0) + times
        self.count += times
        self.total += value * times
        self.squares += value * value * times

    def percentile(self, p: float) -> float | None:
        """The middle of the box in which the p-th percentile lies."""
        rank, seen = (self.count - 1) * p / 100, 0
        for box in sorted(self.counts, key=lambda box: -math.inf if box is None else box):
            seen += self.counts[box]
            if seen > rank:
                return 0.0 if box is None else math.exp((box + 0.5) * self.WIDTH)
        return None

    def statistics_ms(self, name: str, percentiles) -> dict:
        """As statistics_ms below gives them of a list."""
        mean = self.total / self.count if self.count else None
        std = math.sqrt(max(0.0, self.squares / self.count - mean * mean)) if self.count else None
        figures = {f"mean_{name}_ms": mean, f"median_{name}_ms": self.percentile(50), f"std_{name}_ms": std}
        figures |= {f"p{p:g}_{name}_ms": self.percentile(p) for p in percentiles}
        return {key: None if value is None else value * 1000 for key, value in figures.items()}


class Summary:
    """summarize() for requests that come one by one and are forgotten.  Leaves out the lists, and the two peaks."""

    def __init__(self, goodput: dict[str, float] | None = None, percentiles: tuple = (50, 90, 99)):
        self.goodput, self.percentiles = goodput, percentiles
        self.completed = self.failed = self.good = self.input = self.output = self.cached = self.preemptions = 0
        self.sketches = {name: Sketch() for name in ("ttft", "tpot", "itl", "e2el", "engine_queue_time")}
        self.gaps, self.gap_seconds = Counter(), 0.0

    def add(self, output: RequestFuncOutput) -> None:
        if not output.success:
            self.failed += 1
            return
        self.completed += 1
        self.good += bool(self.goodput) and is_good(output, self.goodput)
        self.input, self.output = self.input + output.prompt_len, self.output + output.output_tokens
        self.cached += output.num_cached_tokens
        self.preemptions += output.num_preemptions
        for name, value in (("ttft", output.ttft), ("tpot", output.tpot), ("e2el", output.latency),
                            ("engine_queue_time", output.queue_time)):
            if value is not None:
                self.sketches[name].add(value)
        # Of gaps there are hundreds a request: they are counted by whole microseconds, in C, and boxed by the thousand.
        times = output.token_times
        self.gaps.update(map(int, map((1e6).__mul__, map(operator.sub, times[1:], times))))
        self.gap_seconds += times[-1] - times[0]
        if len(self.gaps) > 4096:
            self._box_gaps()

    def _box_gaps(self) -> None:
        for microseconds, count in self.gaps.items():
            self.sketches["itl"].add((microseconds + 0.5) / 1e6, count)
        self.gaps.clear()

    def result(self, duration: float) -> dict:
        self._box_gaps()
        self.sketches["itl"].total = self.gap_seconds           # exact, whatever the boxes made of it
        seconds = duration or math.inf
        result = {
            "duration": duration, "completed": self.completed, "failed": self.failed,
            "total_input_tokens": self.input, "total_output_tokens": self.output,
            "request_throughput": self.completed / seconds,
            "request_goodput": self.good / seconds if self.goodput else None,
            "output_throughput": self.output / seconds, "total_token_throughput": (self.input + self.output) / seconds,
            "cached_tokens": self.cached, "prefix_hit_rate": self.cached / self.input if self.input else None,
            "preemptions": self.preemptions}
        for name, sketch in self.sketches.items():
            result |= sketch.statistics_ms(name, self.percentiles)
        return result


class Gauge:
    """A quantity over time: its mean, its peak, its course in at most 512 points.  `add(seconds, value)` says what it
    was for so long.  When the points become too many, neighbours are joined and each stands for twice the time."""

    def __init__(self, seconds_a_point: float = 0.25):
        self.width, self.seconds, self.area, self.peak = seconds_a_point, 0.0, 0.0, 0
        self.areas: list[float] = []        # value x seconds in each point's time

    def add(self, seconds: float, value: float) -> None:
        begin, self.seconds = self.seconds, self.seconds + seconds
        self.area += seconds * value
        if value > self.peak:
            self.peak = value
        if self.seconds < len(self.areas) * self.width:             # within the last point, as most are
            self.areas[-1] += seconds * value
            return
        while self.seconds > 512 * self.width:
            self.width *= 2
            self.areas = [sum(self.areas[i:i + 2]) for i in range(0, len(self.areas), 2)]
        point = int(begin / self.width)
        while begin < self.seconds:
            end = min((point + 1) * self.width, self.seconds)
            self.areas += [0.0] * (point + 1 - len(self.areas))
            self.areas[point] += (end - begin) * value
            begin, point = max(end, begin), point + 1

    mean = property(lambda self: self.area / self.seconds if self.seconds else 0.0)

    def course(self) -> list[tuple[float, float]]:
        """[(seconds from the start, mean value of the time until the next point)]"""
        widths = [min(self.width, self.seconds - i * self.width) for i in range(len(self.areas))]
        return [(i * self.width, area / width) for i, (area, width) in enumerate(zip(self.areas, widths)) if width > 0]


# ----------------------------------------------------------------------------------------------------------------------
# What the machine did, and what it cost


def add_cost(result: dict, price_per_hour: float, num_gpus: int = 1) -> None:
    """What a million tokens cost, in the currency of the price: of output, and of prompt and output together."""
    if not price_per_hour >= 0:
        raise ValueError(f"--price-per-hour is {price_per_hour}, must be at least 0")
    paid = price_per_hour * num_gpus * result["duration"] / 3600
    for name, tokens in (("output", result["total_output_tokens"]),
                         ("total", result["total_input_tokens"] + result["total_output_tokens"])):
        result[f"cost_per_million_{name}_tokens"] = paid / tokens * 1e6 if tokens else None


def add_efficiency(result: dict, flops: float, num_bytes: float, hardware, num_gpus: int) -> None:
    """MFU and MBU: `flops` and `num_bytes` on all GPUs together, over `hardware`'s peaks for the whole duration."""
    seconds = result["duration"] * num_gpus
    result["mfu"] = flops / (seconds * hardware.peak_flops) if seconds else None
    result["mbu"] = num_bytes / (seconds * hardware.bandwidth) if seconds else None


METRICS = {"ttft": ("TTFT", "Time to First Token"), "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
           "itl": ("ITL", "Inter-token Latency"), "e2el": ("E2EL", "End-to-end Latency"),
           "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
           "engine_queue_time": ("Engine Queue Time", "Queueing in the engine")}


# What vLLM's table doesn't show: label, and what to multiply by.
OURS = {"cached_tokens": ("Cached prompt tokens:", 1), "prefix_hit_rate": ("Prefix cache hit rate (%):", 100.0),
        "kv_usage_mean": ("Mean KV cache usage (%):", 100.0), "kv_usage_peak": ("Peak KV cache usage (%):", 100.0),
        "mfu": ("MFU (%):", 100.0), "mbu": ("MBU (%):", 100.0),
        "cost_per_million_output_tokens": ("Cost per million output tokens:", 1.0),
        "cost_per_million_total_tokens": ("Cost per million tokens:", 1.0)}


def table(result: dict, max_concurrency: int | None = None, request_rate: float = math.inf,
          metrics: tuple = ("ttft", "tpot", "itl", "e2el", "client_queue_time")) -> str:
    """The result as the table that vLLM's users know, line for line."""
    def line(label: str, value) -> str:
        text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        return f"{label:<40} {text:<10}".rstrip()

    lines = [f"{' Serving Benchmark Result ':=^50}", line("Successful requests:", result["completed"]),
             line("Failed requests:", result["failed"])]
    lines += [line("Maximum request concurrency:", max_concurrency)] if max_concurrency is not None else []
    lines += [line("Request rate configured (RPS):", float(request_rate))] if not math.isinf(request_rate) else []
    lines += [line("Benchmark duration (s):", result["duration"]),
              line("Total input tokens:", result["total_input_tokens"]),
              line("Total generated tokens:", result["total_output_tokens"]),
              line("Request throughput (req/s):", result["request_throughput"])]
    if result["request_goodput"] is not None:
        lines.append(line("Request goodput (req/s):", result["request_goodput"]))
    lines.append(line("Output token throughput (tok/s):", result["output_throughput"]))
    if "max_concurrent_requests" in result:
        lines += [line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
                  line("Peak concurrent requests:", float(result["max_concurrent_requests"]))]
    lines.append(line("Total token throughput (tok/s):", result["total_token_throughput"]))
    lines += [line(label, result[key] if unit == 1 else unit * result[key])
              for key, (label, unit) in OURS.items() if result.get(key) is not None]
    for name in [name for name in metrics if f"mean_{name}_ms" in result]:
        lines.append(f"{METRICS[name][1]:-^50}")
        for key in result:
            found = re.fullmatch(rf"(mean|median|p[\d.]+)_{name}_ms", key)
            if found:
                lines.append(line(f"{found[1].capitalize()} {METRICS[name][0]} (ms):", result[key]))
    return "\n".join(lines + ["=" * 50])


def parse_goodput(pairs: list[str] | None, names: tuple = ("ttft", "tpot", "e2el")) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> limits in ms.  vLLM: benchmarks/serve.py:1454 parse_goodput"""
    limits = {}
    for pair in pairs or []:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"an SLO is NAME:MILLISECONDS, as in ttft:500, not {pair!r}") from None
        if name not in names or not limits[name] >= 0:
            raise ValueError(f"an SLO is of {', '.join(names)} with a limit of at least 0 ms, not {pair!r}")
    return limits


def parse_percentiles(text: str) -> list[float]:
    """"90,99" -> [90.0, 99.0]"""
    try:
        percentiles = [float(p) for p in text.split(",")]
    except ValueError:
        percentiles = [math.nan]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ValueError(f"--metric-percentiles is {text!r}, must be numbers from 0 to 100, as in 90,99")
    return percentiles
