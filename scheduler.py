"""Who runs in this step (chapter 4, the scheduler: 调度器, Token 预算, 连续批处理, 分块预填充, 抢占).

vLLM files mirrored: v1/core/sched/scheduler.py, v1/core/sched/request_queue.py, v1/core/sched/output.py,
v1/core/sched/utils.py (the stop rule) and config/scheduler.py.

There is no prefill phase and no decode phase. A request has some known tokens (its prompt, and what it has generated)
and a count of those whose K/V are computed; every step gives some requests a piece of the gap between the two, until
the step's token budget (Token 预算) is spent. A piece of a prompt is a prefill chunk (分块预填充); a gap of one, the token
sampled last, is a decode. Budget 8, prompts A of ten tokens and B of three:

    step 0   A 0→8                    the budget cuts A's prompt; a chunk that stops short of the end samples nothing
    step 1   A 8→10, B 0→3            A reaches its end and samples; B joins the same step: continuous batching (连续批处理)
    step 2   A 10→11, B 3→4           two decodes: each feeds in the token it sampled in step 1

Running requests are served first, oldest admission first; what is left of the budget admits waiting ones. When a
running request needs a block and none is free, the one admitted last gives all of its blocks back: preemption (抢占). It
keeps its tokens, waits at the front, and computes its K/V again: recompute (重计算).

Promises: the decisions of vLLM 0.27.1, step by step; Σ tokens ≤ budget and scheduled ⊆ running; a request that is
accepted ends, and one that could never end is refused when it is added; the cost of a step doesn't grow with the number
of waiting requests. No tensor, no clock, no randomness: an engine, a simulator and a test drive it alike.
Leaves out: speculative decoding, asynchronous scheduling (planning one step ahead), encoder inputs, structured output,
LoRA, pooling, KV connectors, the watermark, streaming input.

Read in this order: Request, in request.py; SchedulerConfig; the waiting queues; Scheduler.schedule and its two loops;
update_from_output and check_stop; then StepRecord and check_invariants as needed.
"""
from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from kv_cache import KVCacheManager
from records import RequestStep, StepRecord
from request import Request, RequestRefused, RequestStatus


@dataclass
class SchedulerConfig:
    """The options of the command line by their names. Raises ValueError when they contradict each other.

    max_num_seqs bounds the running requests, max_num_batched_tokens is the budget of a step, max_model_len bounds
    prompt + output, long_prefill_token_threshold > 0 bounds one request's share of a step. scheduler_reserve_full_isl
    admits a request only if all its known tokens fit the free blocks. max_num_waiting bounds the waiting queue (None:
    no bound). vLLM: config/scheduler.py SchedulerConfig; max_num_waiting is ours
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    max_num_waiting: int | None = None

    def __post_init__(self):
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 1),
                          ("long_prefill_token_threshold", 0), ("max_num_waiting", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"--scheduling-policy must be fcfs or priority, got {self.policy!r}")
        budget = f"--max-num-batched-tokens {self.max_num_batched_tokens} is below"
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"{budget} --max-num-seqs {self.max_num_seqs}: not everyone could have one token a step")
        if self.max_num_batched_tokens < self.max_model_len and not self.enable_chunked_prefill:
            raise ValueError(f"{budget} --max-model-len {self.max_model_len}: a longer prompt could never be "
                             "scheduled with --no-enable-chunked-prefill")


class FCFSRequestQueue(OrderedDict):
    """The waiting requests by id, first come first served (先来先服务). An ordered dict is a linked list with an index: it
    adds at both ends, takes from the front and removes from the middle (an abort) in O(1).

    Example: a, b, c arrive → a b c; a is admitted → b c; a is preempted → a b c; b is aborted → a c.
    vLLM: v1/core/sched/request_queue.py:75 FCFSRequestQueue (a deque; removal is O(n) there)
    """

    def add_request(self, request: Request) -> None:
        self[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """A preempted request goes to the front: it arrived before everybody who is still waiting."""
        self[request.request_id] = request
        self.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        return next(iter(self.values()))

    def remove_request(self, request: Request) -> None:
        del self[request.request_id]


class PriorityRequestQueue:
    """The waiting requests in a heap on (priority, arrival_time, request_id), lowest first: O(log n) to add or to take.

    To remove one from inside a heap would mean searching it. Instead the entry stays behind, dead, and is dropped when
    it comes to the top; `_alive` knows the one valid entry of each id. Once more than half are dead the heap is
    rebuilt, so a removal costs O(log n) on average and the dead don't pile up.

    Example: a (priority 5), b (1), c (5, later) wait → b a c; b is admitted → a c; b is preempted → b a c.
    vLLM: v1/core/sched/request_queue.py:131 PriorityRequestQueue (removal searches and heapifies there)
    """

    def __init__(self):
        self._heap: list[tuple] = []
        self._alive: dict[str, tuple] = {}
        self._count = 0  # tells two entries of one id apart, and keeps the heap from comparing requests

    def add_request(self, request: Request) -> None:
        self._count += 1
        entry = (request.priority, request.arrival_time, request.request_id, self._count, request)
        self._alive[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    prepend_request = add_request  # there is no front to return to: its old arrival time puts it ahead of its equals

    def peek_request(self) -> Request:
        while self._heap[0] is not self._alive.get(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][4]

    def remove_request(self, request: Request) -> None:
        del self._alive[request.request_id]
        if len(self._heap) > 2 * len(self._alive):
            self._heap = list(self._alive.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._alive)

    def values(self) -> list[Request]:
        return [entry[4] for entry in sorted(self._alive.values())]


@dataclass
class SchedulerOutput:
    """One step's plan; its dicts, and `scheduled_requests`, are in scheduling order.

    Example, the step 1 of the module's opening: num_scheduled_tokens {"A": 2, "B": 3}, num_computed_tokens {"A": 8,
    "B": 0}, num_hit_blocks {"B": 0}, total_num_scheduled_tokens 5. vLLM: v1/core/sched/output.py:193 SchedulerOutput
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: dict[str, int] = field(default_factory=dict)  # before this step's, prefix hits included
    num_hit_blocks: dict[str, int] = field(default_factory=dict)       # of those admitted in this step
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)  # what each block table gains, hits first
    arrived: dict[str, int] = field(default_factory=dict)              # since the last plan: id → prompt tokens
    aborted: list[str] = field(default_factory=list)                   # since the last plan; not who came since, too
    preempted_req_ids: list[str] = field(default_factory=list)
    scheduled_requests: list[Request] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0
    num_running: int = 0  # these three as planning left them
    num_waiting: int = 0
    num_free_blocks: int = 0


def check_stop(request: Request, max_model_len: int) -> bool:
    """Does the token just appended end the request? If so, its finish_reason and stop_reason are set.

    min_tokens holds back EOS and stop tokens, never the length: nobody may outgrow the model or the pool. EOS on the
    last allowed token is "stop". Stop *strings* are found where text is, in the front end.
    vLLM: v1/core/sched/utils.py:94 check_stop (there min_tokens holds back the length too)
    """
    params, token_id = request.sampling_params, request.output_token_ids[-1]
    may_stop = request.num_output_tokens >= params.min_tokens
    if may_stop and token_id in request.eos_token_ids:
        request.finish_reason = "stop"
    elif may_stop and token_id in params.stop_token_ids:
        request.finish_reason, request.stop_reason = "stop", token_id
    elif request.num_tokens >= max_model_len or request.num_output_tokens == params.max_tokens:
        request.finish_reason = "length"
    return request.finish_reason is not None


class Scheduler:
    """Decides every step who computes how many tokens, and keeps the life of each request.

    The caller repeats: schedule(), build the batch from the plan and the block tables, run it, update_from_output().
    Requests may come, and end from outside, at any time except between schedule() and the building of the batch, which
    reads their block tables. A planned step must be run, even if one of its requests was aborted meanwhile: others may
    already count on the K/V it writes.

    One limit bounds every sequence: `max_model_len`, or what the whole pool can hold if that is less. So a request that
    is alone can always grow to its end, and ends with "length"; vLLM refuses to start with so small a pool instead.
    vLLM: v1/core/sched/scheduler.py:69 Scheduler
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager):
        self.config, self.kv_cache_manager = config, kv_cache_manager
        self.requests: dict[str, Request] = {}  # everyone alive, running or waiting
        self.running: list[Request] = []        # in order of admission; schedule() serves it from the front
        self.waiting = FCFSRequestQueue() if config.policy == "fcfs" else PriorityRequestQueue()
        self.arrived, self.aborted = {}, []     # since the last plan, for its record
        self.pool_limit = kv_cache_manager.num_usable_blocks * kv_cache_manager.block_size
        self.max_model_len = min(config.max_model_len, self.pool_limit)
        self.max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused, and keeps nothing, if it can never run or the waiting queue is full.

        A prompt must leave room for one token: num_prompt_tokens < max_model_len, and < the slots of the whole pool.
        Without chunking no check against the budget is missing: SchedulerConfig keeps it >= max_model_len then.
        max_num_waiting counts preempted requests too, but those are never turned away.
        vLLM: v1/core/sched/scheduler.py:2213 Scheduler.add_request; for lengths v1/engine/input_processor.py:396
        """
        request_id, num_tokens, config = request.request_id, request.num_prompt_tokens, self.config
        if request_id in self.requests:
            raise RequestRefused(f"request id {request_id!r} is already in use by a request that has not ended")
        if num_tokens == 0:
            raise RequestRefused("the prompt is empty: no token to predict the next one from")
        if num_tokens >= self.pool_limit and self.pool_limit <= config.max_model_len:  # the tighter limit is named
            raise RequestRefused(f"the prompt has {num_tokens} tokens and the whole KV pool has room "
                                 f"for {self.pool_limit}, so not one could be generated (--num-kv-blocks)")
        if num_tokens >= config.max_model_len:
            raise RequestRefused(f"the prompt has {num_tokens} tokens and, with the output, may have "
                                 f"{config.max_model_len}, so not one could be generated (--max-model-len)")
        if config.max_num_waiting is not None and len(self.waiting) >= config.max_num_waiting:
            raise RequestRefused(f"{len(self.waiting)} requests are waiting and the limit is {config.max_num_waiting}, "
                                 f"so {request_id!r} has to come again later (--max-num-waiting)")
        self.kv_cache_manager.update_block_hashes(request)
        self.requests[request_id] = request
        self.waiting.add_request(request)
        self.arrived[request_id] = num_tokens

    def abort_request(self, request_id: str) -> Request | None:
        """End a request at once, in whatever state. Unknown or finished ids are ignored, so twice does no harm."""
        return self.finish_request(request_id, "abort")

    def finish_request(self, request_id: str, finish_reason: str, stop_reason: int | str | None = None):
        """End a request from outside: the front end found a stop string ("stop"), the client left ("abort"), its step
        failed ("error"). Returns it, or None if it isn't alive. While a step runs, that step's token for it is dropped.
        vLLM: v1/core/sched/scheduler.py:2237 Scheduler.finish_requests"""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        self._free_request(request)
        if self.arrived.pop(request_id, None) is None and finish_reason == "abort":
            self.aborted.append(request_id)
        return request

    def _free_request(self, request: Request) -> None:
        """The one place where a request ends. vLLM: v1/core/sched/scheduler.py:2300 Scheduler._free_request"""
        request.status = RequestStatus.FINISHED
        self.kv_cache_manager.free(request, forget=request.finish_reason == "error")
        del self.requests[request.request_id]

    def start_over(self) -> None:
        """Forget everybody and all that the pool holds. After a step that broke off, perhaps in the middle of planning,
        the accounts may be wrong in any way, so no request is ended one by one."""
        manager = self.kv_cache_manager
        for request in self.requests.values():
            request.status = RequestStatus.FINISHED
        num_blocks = manager.block_pool.num_blocks
        KVCacheManager.__init__(manager, num_blocks, manager.block_size, manager.enable_prefix_caching)
        Scheduler.__init__(self, self.config, manager)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Plan one step: first those who run, then, with the budget that is left, those who wait. It may come out
        empty.

        After a preemption nobody is admitted in this step: the pool is exhausted, and a newcomer would take the very
        blocks that were just set free, so that the next step preempts again.
        vLLM: v1/core/sched/scheduler.py:439 Scheduler.schedule
        """
        output = SchedulerOutput(arrived=self.arrived, aborted=self.aborted)
        self.arrived, self.aborted = {}, []
        token_budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        if not output.preempted_req_ids:
            token_budget = self._schedule_waiting(output, token_budget)
        # They count as computed from here on, although the model has yet to run: the next plan builds on this one.
        block_size, tables = self.kv_cache_manager.block_size, self.kv_cache_manager.req_to_block_ids
        for request, num_new_tokens in zip(output.scheduled_requests, output.num_scheduled_tokens.values()):
            held = 0 if request.request_id in output.num_hit_blocks else -(-request.num_computed_tokens // block_size)
            output.new_block_ids[request.request_id] = tables[request.request_id][held:]
            request.num_computed_tokens += num_new_tokens
        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - token_budget
        output.num_running, output.num_waiting = len(self.running), len(self.waiting)
        output.num_free_blocks = self.kv_cache_manager.num_free_blocks
        return output

    def _schedule_running(self, output: SchedulerOutput, token_budget: int, index: int = 0) -> int:
        """Loop 1. Returns the budget that is left. No budget is set aside for decodes: they go before a long prefill
        only because they were admitted, and so stand, before it. `index`: those before it are served already (a
        simulator's, which has the decodes done)."""
        running, scheduled, computed = self.running, output.num_scheduled_tokens, output.num_computed_tokens
        allocate_slots = self.kv_cache_manager.allocate_slots
        while index < len(running) and token_budget > 0:
            request = running[index]
            num_new_tokens = min(len(request.all_token_ids) - request.num_computed_tokens, self.max_chunk, token_budget)
            while not allocate_slots(request, num_new_tokens):
                victim = self._pop_victim()
                # Whoever was served in this step stands before `index`; any other victim stands at or behind it.
                if victim.request_id in scheduled:  # (by priority only): its share is given back
                    token_budget += scheduled.pop(victim.request_id)
                    del computed[victim.request_id]
                    output.scheduled_requests.remove(victim)
                    index -= 1
                self._preempt_request(victim)
                output.preempted_req_ids.append(victim.request_id)
                if victim is request:  # all others rank above the asker. Like vLLM, those behind it skip this step too
                    return token_budget
            scheduled[request.request_id] = num_new_tokens
            computed[request.request_id] = request.num_computed_tokens
            output.scheduled_requests.append(request)
            token_budget -= num_new_tokens
            index += 1
        return token_budget

    def _schedule_waiting(self, output: SchedulerOutput, token_budget: int) -> int:
        """Loop 2: admission (准入). Returns the budget that is left. It stops at the first request that doesn't fit.
        Nobody overtakes, however small: else a large request might wait for ever."""
        manager, config = self.kv_cache_manager, self.config
        while self.waiting and token_budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek_request()
            # Look up first, then count what is left to do: a preempted request often finds its own blocks untouched.
            hit_blocks = manager.get_computed_blocks(request)
            num_computed = len(hit_blocks) * manager.block_size
            num_new_tokens = min(request.num_tokens - num_computed, self.max_chunk)
            if num_new_tokens > token_budget:
                if not config.enable_chunked_prefill:
                    break
                num_new_tokens = token_budget
            if not manager.allocate_slots(request, num_new_tokens, hit_blocks, config.scheduler_reserve_full_isl):
                break
            self.waiting.remove_request(request)
            self.running.append(request)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_computed
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_computed
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            output.num_computed_tokens[request.request_id] = num_computed
            output.num_hit_blocks[request.request_id] = len(hit_blocks)
            output.scheduled_requests.append(request)
            token_budget -= num_new_tokens
        return token_budget

    def _pop_victim(self) -> Request:
        """Take out of `running` who matters least: the last admitted, or by priority who would stand last in the queue.
        So the first in that order is preempted by nobody else, gets on, and ends; then the next does.

        The id is the tie-breaker of the queue, and must be one here: of two requests with one priority and one arrival
        time each could else push the other out, in turns, for ever. (vLLM leaves it out, and takes the first of equals.)
        """
        if self.config.policy == "fcfs":
            return self.running.pop()
        victim = max(self.running, key=lambda r: (r.priority, r.arrival_time, r.request_id))
        self.running.remove(victim)
        return victim

    def _preempt_request(self, request: Request) -> None:
        """Send a request, already out of `running`, back to the front of the queue. Its tokens and block names stay,
        its K/V are given up. It returns with an ordinary prefill over prompt *and* output, whose last position yields
        the next output token. vLLM: v1/core/sched/scheduler.py:1274 Scheduler._preempt_request
        """
        self.kv_cache_manager.free(request)  # before the count is reset: it tells free() which blocks were written
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.prepend_request(request)

    def update_from_output(self, scheduler_output: SchedulerOutput, sampled_token_ids: dict[str, int]) -> list[Request]:
        """Take in what the model sampled; returns those who finished, in scheduling order, their blocks already free.
        `sampled_token_ids` must hold a token for each scheduled request that reached the end of its known tokens, or
        KeyError. A chunk that stops short of the end predicts a token that is known already: a token for it is ignored.
        vLLM: v1/core/sched/scheduler.py:1670 Scheduler.update_from_output
        """
        finished = []
        for request in scheduler_output.scheduled_requests:
            if request.status is not RequestStatus.RUNNING or request.num_computed_tokens < request.num_tokens:
                continue  # ended from outside while the step ran, or such a chunk
            request.append_output_token_id(sampled_token_ids[request.request_id])
            self.kv_cache_manager.update_block_hashes(request)
            if check_stop(request, self.max_model_len):
                self._free_request(request)
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return finished

    def make_record(self, step: int, output: SchedulerOutput, sampled: dict[str, int], time: float, duration: float,
                    finished: list[str], texts: dict[str, str] | None = None) -> StepRecord:
        """The step as a record, once it has run. `finished`: the ids that ended in it; `texts`: what each one's text
        gained; times in seconds."""
        requests = [RequestStep(request.request_id, output.num_computed_tokens[request.request_id], num_new_tokens,
                                output.num_hit_blocks.get(request.request_id, 0), sampled.get(request.request_id),
                                request.num_prompt_tokens, request.arrival_time,
                                output.new_block_ids[request.request_id], (texts or {}).get(request.request_id, ""))
                    for request, num_new_tokens in zip(output.scheduled_requests, output.num_scheduled_tokens.values())]
        return StepRecord(step, time, duration, requests, self.config.max_num_batched_tokens,
                          output.total_num_scheduled_tokens, output.num_running, output.num_waiting,
                          list(output.preempted_req_ids), output.num_free_blocks,
                          self.kv_cache_manager.num_usable_blocks, list(finished), output.arrived, output.aborted,
                          self.kv_cache_manager.block_size, self.kv_cache_manager.enable_prefix_caching)


def check_invariants(scheduler: Scheduler, output: SchedulerOutput | None = None) -> None:
    """Prove that the accounts agree, or raise AssertionError saying what is off. Call it between any two calls of the
    scheduler; right after schedule() give it the output too, to check the step itself. Cost: O(pool + requests)."""
    running, waiting, config = scheduler.running, list(scheduler.waiting.values()), scheduler.config
    scheduler.kv_cache_manager.check_invariants(scheduler.requests)
    assert len(running) <= config.max_num_seqs, f"{len(running)} requests run, --max-num-seqs is {config.max_num_seqs}"
    assert len(waiting) == len(scheduler.waiting), "the waiting queue miscounts"
    assert len(running) + len(waiting) == len(scheduler.requests), "someone is both running and waiting, or neither"
    running_ids = {request.request_id for request in running}
    for request in running + waiting:
        assert scheduler.requests.get(request.request_id) is request, f"{request} is not known to the scheduler"
        is_running = request.status is RequestStatus.RUNNING
        assert is_running == (request.request_id in running_ids), f"{request} is in the wrong queue"
        assert request.num_tokens < scheduler.max_model_len, f"{request} is past its limit and still alive"
        assert request.all_token_ids == request.prompt_token_ids + request.output_token_ids, f"{request} lost a token"
    if output is not None:
        used, limit = sum(output.num_scheduled_tokens.values()), config.max_num_batched_tokens
        assert used == output.total_num_scheduled_tokens <= limit, f"{used} tokens are scheduled, the budget is {limit}"
        assert [r.request_id for r in output.scheduled_requests] == list(output.num_scheduled_tokens), "two plans"
        assert output.num_scheduled_tokens.keys() <= running_ids, "someone is scheduled but not running"
        assert min(output.num_scheduled_tokens.values(), default=1) >= 1, "someone is scheduled without a token"


if __name__ == "__main__":       # the opening's example: budget 8, A has ten prompt tokens and B, who comes later, three
    from request import SamplingParams
    demo = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32), KVCacheManager(16, 4))
    demo.add_request(Request("A", range(10), SamplingParams(max_tokens=3)))
    for step in range(5):
        if step == 1:
            demo.add_request(Request("B", range(50, 53), SamplingParams(max_tokens=2)))
        plan = demo.schedule()
        pieces = [f"{i} {plan.num_computed_tokens[i]}→{plan.num_computed_tokens[i] + n}" for i, n in plan.num_scheduled_tokens.items()]
        ended = demo.update_from_output(plan, dict.fromkeys(plan.num_scheduled_tokens, 7))      # whatever the model says
        print(f"step {step}   {', '.join(pieces) or 'nothing to do':20}budget {'█' * plan.total_num_scheduled_tokens:8}"
              f" {plan.total_num_scheduled_tokens}/8   {', '.join(r.request_id + ' ends' for r in ended)}")
