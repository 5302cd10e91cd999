"""The simulator (chapter 13): the engine's own Scheduler and KVCacheManager on the ledger's clock, with no model.

    python chapters/tools/simulator.py --model llama-3-70b -tp 8 --max-concurrency 64 --num-prompts 256 \\
                                       --random-prefix-len 2000 --random-input-len 50 --random-output-len 300
    python chapters/tools/simulator.py --dataset-path azure.csv --stream     a trace of any length, in little memory

    SimulatedEngine   an LLMEngine to bench.run: step; step_until, which takes many steps at once and decides the same
    stream            requests from an iterator, figures into a running summary: a million requests in bounded memory

The time of a step is `Ledger.step_time`, an estimate; what is decided in it is no estimate.  Read `step` first: it is
the engine's loop.  Then `step_until`, which exists because most steps of a real day decide nothing.
"""
from __future__ import annotations

import math
import operator
import pathlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import bench  # noqa: E402
from kv_cache import KVCacheManager  # noqa: E402
from ledger import HARDWARE, Work, named, work_of  # noqa: E402
from metrics import (Gauge, RequestFuncOutput, Summary, add_cost, add_efficiency, parse_goodput,  # noqa: E402
                     parse_percentiles, table)
from options import end_quietly  # noqa: E402
from request import Request, RequestRefused, SamplingParams  # noqa: E402
from scheduler import Scheduler, SchedulerConfig, SchedulerOutput  # noqa: E402
from workloads import read_requests  # noqa: E402


order_of = operator.attrgetter("order")


@dataclass(slots=True, eq=False)
class Lane:
    """A request that decodes, one token a step, while nobody looks.  `request` is as it was before step `at`; from then
    on each step has given it a token.  `ends`: the step that will give it its last."""
    request: Request
    order: int
    at: int
    ends: int


class SimulatedEngine:
    """An LLMEngine whose model is a Ledger and whose clock is virtual: same scheduler, same pool, same StepRecords.

    It answers to what bench.run needs of an engine, so workloads and metrics serve both.  A step takes `step_time`
    seconds of a clock that nobody waits for, and every sampled token is 0: requests end by max_tokens.  The CPU's time
    is whatever the ledger's step_overhead and request_overhead say, 0 if it was not measured.
    vLLM: v1/engine/core.py:584 EngineCore.step"""

    def __init__(self, ledger, config, num_kv_blocks=None, enable_prefix_caching=True, gpu_memory_utilization=0.92,
                 keep_records=True):
        blocks = num_kv_blocks or ledger.kv_cache_blocks(gpu_memory_utilization, config.max_num_batched_tokens,
                                                         config.max_num_seqs)
        self.ledger, self.now, self.keep_records = ledger, 0.0, keep_records
        self.scheduler = Scheduler(config, KVCacheManager(blocks, ledger.block_size, enable_prefix_caching))
        self.records, self.num_steps, self._seen = [], 0, 0.0
        self.work, self.kv_usage = [0] * len(Work._fields), Gauge()     # all steps' Work added up; blocks held
        # Of step_until: who decodes unwatched, in the order of `running`; in which step somebody must be looked at.
        self._lanes: dict[str, Lane] = {}
        self._agenda: dict[int, list[Lane]] = {}
        self._num_joined, self._context = 0, 0          # _context: positions that the lanes read in the next step
        self._times: list[float] = []                   # ends of the steps from _first_time on
        self._first_time = 0
        self._blocked: set | None = None                # the head of the queue cannot be admitted; its block names

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def add_request(self, request_id, prompt_token_ids, sampling_params, arrival_time=None, priority=0):
        self._see_usage(self.now)               # up to here it was idle, perhaps
        if not self.scheduler.waiting:
            self._blocked = None
        self.scheduler.add_request(Request(request_id, prompt_token_ids, sampling_params,
                                           self.now if arrival_time is None else arrival_time, priority))

    def abort_request(self, request_id):
        self._settle()
        self.scheduler.abort_request(request_id)

    def has_unfinished_requests(self):
        return self.scheduler.has_unfinished_requests()

    def step(self):
        """Plan a step, let its time pass, hand out the tokens; returns the requests that ended, as bench reads them."""
        self._settle()
        output, start = self.scheduler.schedule(), self.now
        chunks, sampling = [], []
        for request, scheduled in zip(output.scheduled_requests, output.num_scheduled_tokens.values()):
            chunks.append((request.num_computed_tokens - scheduled, scheduled))     # this step's are counted already
            if request.num_computed_tokens == len(request.all_token_ids):
                sampling.append(request)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
        duration = self._pass(work_of(chunks, len(sampling)))
        self._times, self._first_time = [], self.num_steps                  # no lane is left that would read them
        for request in sampling:
            request.token_times.append(self.now)
        sampled = {request.request_id: 0 for request in sampling}
        finished = self.scheduler.update_from_output(output, sampled)
        if self.keep_records:
            self.records.append(self.scheduler.make_record(self.num_steps - 1, output, sampled, start, duration,
                                                           [request.request_id for request in finished]))
        return self._results(finished)

    def _pass(self, work):
        """Let the time of a planned step pass, and put it down."""
        duration = self.ledger.step_time(work)
        self.now += duration
        self.num_steps += 1
        self._count(*work)
        self._see_usage(self.now)
        return duration

    def _count(self, tokens, sampled, pairs, context, requests):
        total = self.work
        total[0], total[1], total[2] = total[0] + tokens, total[1] + sampled, total[2] + pairs
        total[3], total[4] = total[3] + context, total[4] + requests

    def _see_usage(self, now):
        """The blocks held now were held since this was last called."""
        manager = self.scheduler.kv_cache_manager
        self.kv_usage.add(now - self._seen, manager.num_usable_blocks - manager.num_free_blocks)
        self._seen = now

    num_request_steps = property(lambda self: self.work[4])

    def _results(self, finished):
        for request in finished:
            request.finish_time = self.now
        return [SimpleNamespace(request_id=r.request_id, finished=True, metrics=r, error=None, outputs=[SimpleNamespace(
            text="", token_ids=r.output_token_ids, finish_reason=r.finish_reason)]) for r in finished]

    # -- many steps at once --------------------------------------------------------------------------------------------
    #
    # A step in which everybody decodes changes three things for most requests: one more token, one more computed, one
    # more time.  Those need not be written down step by step.  Two moments of a decode do matter to others, once each
    # in `block_size` steps: when it takes a new block, and when it fills one, whose name is published.  So the agenda
    # says in which step whose moment comes, or end; in between only the clock runs.  The rest (prefills, admission,
    # preemption) stays the scheduler's own code, which serves `running` from where the lanes end.

    def step_until(self, until=math.inf):
        """At least one step, then more until one ends at or after `until`, or somebody's last token came; returns those
        that ended.  Nobody may arrive in between.  Decides what as many calls of step would, to the last block and bit.

        Those who may stop at token 0 are stepped one by one, and everybody is by priority, or if records are kept."""
        if self.keep_records or self.scheduler.config.policy != "fcfs" or not self.scheduler.requests:
            return self.step()
        while True:
            self._adopt()
            if self._coast(until) and self.now >= until:
                return []
            finished = self._busy_step()
            if finished or self.now >= until or not self.scheduler.requests:
                return finished

    def earliest_end(self):
        """A time before which no request here can end, later than now; inf without requests.  While all decode that is
        known: no later step is quicker than the next one, as contexts grow.  Otherwise it is one small step away."""
        scheduler, ledger = self.scheduler, self.ledger
        if not scheduler.requests:
            return math.inf
        self._adopt()
        n = len(self._lanes)
        if not n or n < len(scheduler.running) or scheduler.waiting:
            return self.now + ledger.base_time(1, 0, 1)
        steps = min(lane.ends for lane in self._lanes.values()) - self.num_steps + 1
        return self.now + steps * (ledger.base_time(n, n, n)
                                   + self._context * (ledger.context_seconds + ledger.pair_seconds))

    def _adopt(self):
        """Whoever decodes, and stands in `running` right behind the lanes, becomes one."""
        running, limit = self.scheduler.running, self.scheduler.max_model_len
        while len(self._lanes) < len(running):
            request = running[len(self._lanes)]
            params, num_tokens = request.sampling_params, len(request.all_token_ids)
            may_stop = 0 in request.eos_token_ids or 0 in params.stop_token_ids
            if request.num_computed_tokens != num_tokens - 1 or request.num_output_tokens == 0 or may_stop:
                return
            left = min(params.max_tokens or limit, limit - request.num_prompt_tokens) - request.num_output_tokens
            lane = Lane(request, self._num_joined, self.num_steps, self.num_steps + left - 1)
            self._num_joined += 1
            self._lanes[request.request_id] = lane
            self._context += num_tokens
            self._enlist(lane, num_tokens - 1, self.num_steps)

    def _enlist(self, lane, num_computed, step):
        """Into the agenda: the next step, from `step` on, at which it needs a block, fills one, or ends."""
        manager = self.scheduler.kv_cache_manager
        wait = -num_computed % manager.block_size
        if manager.enable_prefix_caching:                       # position size - 1 fills the block
            wait = min(wait, (-num_computed - 1) % manager.block_size)
        self._agenda.setdefault(min(step + wait, lane.ends), []).append(lane)

    def _catch_up(self, lane, step):
        """Write down what its steps before `step` gave it."""
        request, new = lane.request, step - lane.at
        if new:
            request.output_token_ids.extend([0] * new)
            request.all_token_ids.extend([0] * new)
            request.num_computed_tokens += new
            request.token_times.extend(self._times[lane.at - self._first_time:step - self._first_time])
            lane.at = step

    def _settle(self):
        """Bring every request up to date; from here on anybody may look, or step."""
        for lane in self._lanes.values():
            self._catch_up(lane, self.num_steps)
            self.scheduler.kv_cache_manager.update_block_hashes(lane.request)
        self._lanes, self._agenda, self._context, self._blocked = {}, {}, 0, None

    def _coast(self, until):
        """Steps that the lanes take among themselves; returns how many.  The whole cost of such a step is this loop."""
        n, scheduler = len(self._lanes), self.scheduler
        if not n or n < len(scheduler.running) or (scheduler.waiting and self._blocked is None):
            return 0
        ledger, agenda, times, first = self.ledger, self._agenda, self._times, self.num_steps
        step, now, context = first, self.now, self._context
        base, per_context, per_pair = ledger.base_time(n, n, n), ledger.context_seconds, ledger.pair_seconds
        while now < until:
            if step in agenda:
                self._see_usage(now)
                if not self._serve_due(step, n):
                    break
            now += base + (context * per_context + context * per_pair)   # as step_time; a decode has as many pairs
            times.append(now)
            context += n
            step += 1
        if step > first:
            count = step - first
            read = (self._context + context - n) * count // 2                # the sum of an arithmetic series
            self._count(n * count, n * count, read, read, n * count)
            self.num_steps, self.now, self._context = step, now, context
            self._see_usage(now)
        return step - first

    def _serve_due(self, step, n):
        """Blocks for those on the agenda, before the step.  False, nothing given: for this the scheduler is needed, as
        somebody ends, blocks run out, or the first who waits may be admitted now."""
        manager, due = self.scheduler.kv_cache_manager, self._agenda[step]
        size, needed, caching = manager.block_size, 0, manager.enable_prefix_caching
        for lane in due:
            if lane.ends == step:
                return False
            self._catch_up(lane, step)
            computed = lane.request.num_computed_tokens
            needed += computed % size == 0
            if caching and (computed + 1) % size == 0:                      # it fills a block, to be published
                manager.update_block_hashes(lane.request)
                if self._blocked and lane.request.block_hashes[-1] in self._blocked:
                    return False
        if needed > manager.num_free_blocks:
            return False
        del self._agenda[step]
        due.sort(key=order_of)
        for lane in due:
            manager.allocate_slots(lane.request, 1)
            self._enlist(lane, lane.request.num_computed_tokens + 1, step + 1)
        return True

    def _busy_step(self):
        """One step in which not only lanes take part, or one of them ends: the lanes first, as they stand first in
        `running`, then the scheduler's own two loops for all others."""
        scheduler, manager, step = self.scheduler, self.scheduler.kv_cache_manager, self.num_steps
        due, size, needed = sorted(self._agenda.pop(step, ()), key=order_of), manager.block_size, 0
        for lane in due:
            self._catch_up(lane, step)
            needed += lane.request.num_computed_tokens % size == 0
        if needed > manager.num_free_blocks:
            return self.step()                                               # somebody is going to be preempted
        for lane in due:
            request = lane.request
            if (request.num_computed_tokens + 1) % size == 0:
                manager.update_block_hashes(request)
                if self._blocked and request.block_hashes[-1] in self._blocked:
                    self._blocked = None                                     # the head may hit one block more now
            manager.allocate_slots(request, 1)
        output, n = SchedulerOutput(), len(self._lanes)
        budget = scheduler._schedule_running(output, scheduler.config.max_num_batched_tokens - n, n)
        if output.preempted_req_ids:
            self._blocked = None
        elif scheduler.waiting and self._blocked is None:
            scheduler._schedule_waiting(output, budget)
            if scheduler.waiting and not output.scheduled_requests:
                # Only decodes, and the head was not admitted.  Blocks get fewer until somebody ends, so neither will it
                # be in the next steps, unless somebody publishes one of its blocks.
                self._blocked = set(scheduler.waiting.peek_request().block_hashes)
        sampling = self._run_busy_step(output, n)
        ending = self._ending(due, step)
        output.scheduled_requests[:0] = ending
        finished = scheduler.update_from_output(output, {r.request_id: 0 for r in ending + sampling})
        if finished:
            self._blocked = None
        if len(self._times) > 2048:                                       # what nobody will read any more
            oldest = min((lane.at for lane in self._lanes.values()), default=self.num_steps)
            del self._times[:oldest - self._first_time]
            self._first_time = oldest
        return self._results(finished)

    def _run_busy_step(self, output, n):
        """The time of `n` lanes and the chunks of `output`; returns the requests of these that sample."""
        sampling, start = [], self.now
        tokens, pairs, context = n, self._context, self._context
        for request, new in zip(output.scheduled_requests, output.num_scheduled_tokens.values()):
            computed = request.num_computed_tokens
            tokens, context = tokens + new, context + computed + new
            pairs += new * computed + new * (new + 1) // 2
            request.num_computed_tokens = computed + new
            if request.num_computed_tokens == len(request.all_token_ids):
                sampling.append(request)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
        self._pass(Work(tokens, n + len(sampling), pairs, context, n + len(output.scheduled_requests)))
        self._times.append(self.now)
        self._context += n
        for request in sampling:
            request.token_times.append(self.now)
        return sampling

    def _ending(self, due, step):
        """Of the due lanes, those whose last token this step gives, as requests that have computed and not sampled yet;
        the others are put on the agenda again."""
        ending = []
        for lane in due:
            request = lane.request
            if lane.ends > step:
                self._enlist(lane, request.num_computed_tokens + 1, step + 1)
                continue
            request.num_computed_tokens += 1
            request.token_times.append(self.now)
            self._context -= request.num_computed_tokens + 1
            del self._lanes[request.request_id]
            ending.append(request)
        return ending


# ----------------------------------------------------------------------------------------------------------------------
# A run too long to keep


def output_of(request):
    """A Request that has ended as the client saw it."""
    return RequestFuncOutput(request.num_prompt_tokens, request.arrival_time, request.token_times,
                             request.finish_reason, queue_time=request.first_scheduled_time - request.arrival_time,
                             num_cached_tokens=request.num_cached_tokens, num_preemptions=request.num_preemptions)


def stream(engine, requests, summary):
    """Send each request of an iterator at its timestamp; add each that ended to `summary`, then forget it.  Returns the
    duration.  ValueError: a request without a time, or earlier than the one before."""
    begin, last = engine.clock(), 0.0
    for number, request in enumerate(requests):
        if request.timestamp is None or request.timestamp < last:
            raise ValueError(f"request {number} comes at {request.timestamp}, the one before at {last}: to be "
                             "streamed, requests need times, in order")
        last = request.timestamp
        while engine.has_unfinished_requests() and engine.now < begin + last:
            for result in engine.step_until(begin + last):
                summary.add(output_of(result.metrics))
        engine.now = max(engine.now, begin + last)
        try:
            engine.add_request(str(number), request.prompt_token_ids, SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=request.expected_output_len), begin + last)
        except RequestRefused as refusal:
            summary.add(RequestFuncOutput(len(request.prompt_token_ids), begin + last, error=str(refusal)))
    while engine.has_unfinished_requests():
        for result in engine.step_until():
            summary.add(output_of(result.metrics))
    return engine.clock() - begin


# ----------------------------------------------------------------------------------------------------------------------
# The command line


def make_engine(args):
    """(engine, vocabulary size, no tokenizer) for the parsed options.  ValueError: options that cannot be had."""
    ledger = named(args.model, args.hardware, args.tensor_parallel_size, block_size=args.block_size)
    ledger = ledger.with_costs(step_overhead=args.step_overhead / 1e3, request_overhead=args.request_overhead / 1e6)
    config = SchedulerConfig(
        args.max_num_seqs or min(256, args.max_num_batched_tokens), args.max_num_batched_tokens,
        args.max_model_len or 8192, args.enable_chunked_prefill, args.scheduling_policy,
        args.long_prefill_token_threshold, max_num_waiting=args.max_num_waiting)
    engine = SimulatedEngine(ledger, config, args.num_kv_blocks, args.enable_prefix_caching,
                             args.gpu_memory_utilization, keep_records=bool(args.records))
    return engine, ledger.model.vocab_size, None


def add_figures(result, engine, args):
    """What only a ledger knows of a run: MFU, MBU, and KV use over time."""
    ledger, usable = engine.ledger, engine.scheduler.kv_cache_manager.num_usable_blocks
    work = Work(*engine.work)
    add_efficiency(result, ledger.model_flops(work), ledger.model_bytes(work, engine.num_steps), ledger.hardware,
                   ledger.tp)
    result["kv_usage_mean"], result["kv_usage_peak"] = engine.kv_usage.mean / usable, engine.kv_usage.peak / usable
    result["kv_usage"] = [(round(at, 3), round(blocks / usable, 4)) for at, blocks in engine.kv_usage.course()]
    if args.price_per_hour is not None:
        add_cost(result, args.price_per_hour, ledger.tp)


def make_parser():
    parser = bench.make_parser("simulator.py", "A workload in virtual time: the scheduler on the ledger's clock.")
    add = parser.add_argument_group("the simulation").add_argument
    add("--hardware", default="h100", help=f"{', '.join(HARDWARE)}, or here [h100]")
    add("--step-overhead", type=float, default=0.0, metavar="MS", help="the engine's CPU time a step, if not hidden")
    add("--request-overhead", type=float, default=0.0, metavar="US", help="and for each request in the step")
    add("--stream", action="store_true", help="read the dataset as it is sent, keep no request: any length in one run")
    parser.set_defaults(model="llama-3-70b", tensor_parallel_size=8)
    return parser


def run_stream(args):
    if not args.dataset_path:
        raise ValueError("--stream needs a --dataset-path to read from")
    for option in ("max_concurrency", "records", "result_filename"):
        if getattr(args, option):
            raise ValueError(f"--stream keeps nothing: it cannot be had with --{option.replace('_', '-')}")
    engine, vocab_size, _ = make_engine(args)
    summary = Summary(parse_goodput(args.goodput), parse_percentiles(args.metric_percentiles))
    requests = read_requests(args.dataset_path, vocab_size, None, args.seed, engine.scheduler.config.max_model_len)
    result = summary.result(stream(engine, requests, summary))
    add_figures(result, engine, args)
    print(table(result, metrics=args.percentile_metrics.split(",")))


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.stream:
        return bench.main(argv, parser, make_engine, "simulated", add_figures)
    try:
        run_stream(args)
    except (OSError, ValueError) as error:
        print(f"simulator.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
