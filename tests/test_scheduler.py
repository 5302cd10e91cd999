"""scheduler.py (and the block bookkeeping under it) without a model: vLLM's recorded decisions, a paged stand-in for the model whose
text goes wrong if any block is, a state machine over everything that can happen, and the failures that serving engines had."""
import collections
import dataclasses
import gzip
import json
import pathlib
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, assume, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kv_cache
import scheduler as scheduler_module
from kv_cache import KVCacheManager
from request import Request, RequestRefused, RequestStatus, SamplingParams
from scheduler import Scheduler, SchedulerConfig, StepRecord, check_invariants

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCAB = 4  # small, so that different requests write the same text and share blocks


# --- a model without numbers ---

class PagedModel:
    """What a transformer does to a KV cache, with integers. Position p's entry depends on its token and on the entry before it, and the
    sampled token depends on every entry of the sequence, all read through the block table. A slot never written holds None, and
    reading it raises. All of a step's entries are written before any token is sampled, as each layer of the real model does."""

    def __init__(self, manager):
        self.manager, self.slots = manager, {}

    def entries(self, table, n):
        size = self.manager.block_size
        values = [self.slots.get(table[p // size] * size + p % size) for p in range(n)]
        assert None not in values, "a slot is read that nobody has written"
        return values

    def prepare(self, output):
        """The batch: who computes which positions, through which table. Built at once, as an engine does it."""
        return [(r, list(r.all_token_ids), self.manager.get_block_ids(r.request_id), output.num_computed_tokens[r.request_id], n)
                for r, n in zip(output.scheduled_requests, output.num_scheduled_tokens.values())]

    def run(self, batch):
        size, sampled = self.manager.block_size, {}
        # In the order of positions over the whole batch: whoever hits a block of this very step reads it behind its writer.
        todo = [(p, token_ids, table) for _, token_ids, table, start, n in batch for p in range(start, start + n)]
        for p, token_ids, table in sorted(todo, key=lambda item: item[0]):
            before = self.entries(table, p)[-1] if p else 0
            self.slots[table[p // size] * size + p % size] = hash((before, token_ids[p]))
        for request, token_ids, table, start, n in batch:
            if start + n == len(token_ids):
                sampled[request.request_id] = hash(tuple(self.entries(table, start + n))) % VOCAB
        return sampled


def expected_output(prompt, num_tokens):
    """The same text without pages: what every schedule must come to."""
    tokens, values = list(prompt), [0]
    for token in tokens:
        values.append(hash((values[-1], token)))
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(hash(tuple(values[1:])) % VOCAB)
        values.append(hash((values[-1], tokens[-1])))
    return tokens[len(prompt):]


class Engine:
    """E(bs, nb, tok, seqs, length, pc): the scheduler with the stand-in model, checked after every half step."""

    def __init__(self, bs=4, nb=64, tok=64, seqs=8, length=256, pc=True, **options):
        self.manager = KVCacheManager(nb, bs, pc)
        self.scheduler = Scheduler(SchedulerConfig(min(seqs, tok), tok, length, **options), self.manager)
        self.model = PagedModel(self.manager)
        self.all, self.outputs = {}, []

    def add(self, request_id, prompt, n=16, priority=0, arrival_time=None, **params):
        arrival_time = float(len(self.all)) if arrival_time is None else arrival_time
        request = Request(request_id, prompt, SamplingParams(max_tokens=n, **params), arrival_time, priority)
        self.scheduler.add_request(request)
        self.all[request_id] = request
        return request

    def step(self, between=lambda: None):
        output = self.scheduler.schedule()
        check_invariants(self.scheduler, output)
        batch = self.model.prepare(output)
        between()
        sampled = self.model.run(batch)
        finished = self.scheduler.update_from_output(output, sampled)
        check_invariants(self.scheduler)
        self.outputs.append(output)
        return output, sampled, finished

    def drain(self, limit=2000):
        while self.scheduler.has_unfinished_requests():
            self.step()
            assert len(self.outputs) < limit, "no end in sight"
        self.check_drained()
        return self

    def check_drained(self):
        assert not self.scheduler.running and len(self.scheduler.waiting) == 0 and not self.scheduler.requests
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks and self.manager.usage == 0.0
        assert all(block.ref_cnt == 0 for block in self.manager.block_pool.blocks)
        check_invariants(self.scheduler)

    def check_texts(self):
        for request in self.all.values():
            assert request.output_token_ids == expected_output(request.prompt_token_ids, request.num_output_tokens), request

    def preemptions(self):
        return sum(request.num_preemptions for request in self.all.values())


def tokens(n, seed=0):
    return [hash((seed, i)) % VOCAB for i in range(n)]


# --- vLLM's own decisions ---

RUNS = json.loads(gzip.decompress((ROOT / "tests/data/vllm_v0271_scheduler.json.gz").read_bytes()))


@pytest.mark.parametrize("run", RUNS, ids=[f"run{i}" for i in range(len(RUNS))])
def test_replays_vllm_decision_for_decision(run):
    options = dict(run["config"])
    manager = KVCacheManager(options.pop("num_blocks"), options.pop("block_size"), options.pop("enable_prefix_caching"))
    scheduler, events = Scheduler(SchedulerConfig(**options), manager), collections.deque(run["events"])
    for k, want in enumerate(run["steps"]):
        while events and events[0]["step"] <= k:
            event = events.popleft()
            if "abort" in event:
                scheduler.abort_request(event["abort"])
                continue
            add = dict(event["add"])
            params = SamplingParams(max_tokens=add.pop("max_tokens"), stop_token_ids=add.pop("stop_token_ids"), ignore_eos=True)
            scheduler.add_request(Request(sampling_params=params, **add))
        output = scheduler.schedule()
        check_invariants(scheduler, output)
        ids = list(output.num_scheduled_tokens)
        got = {"scheduled": [list(item) for item in output.num_scheduled_tokens.items()],
               "preempted": sorted(output.preempted_req_ids), "computed": output.num_computed_tokens,
               "block_ids": {i: manager.get_block_ids(i) for i in ids}, "free_blocks": manager.num_free_blocks,
               "sampled": {r.request_id: want["sampled"].get(r.request_id, "missing") for r in output.scheduled_requests
                           if r.num_computed_tokens == r.num_tokens},
               "finished": sorted(r.request_id for r in scheduler.update_from_output(output, want["sampled"]))}
        assert got == {key: want[key] for key in got}, f"step {k}"
        check_invariants(scheduler)
    assert not events and not scheduler.has_unfinished_requests()
    assert manager.num_free_blocks == manager.num_usable_blocks


def test_the_recorded_runs_cover_what_they_should():
    assert len(RUNS) == 60 and sum(len(run["steps"]) for run in RUNS) == 13978
    steps = [step for run in RUNS for step in run["steps"]]
    assert sum(len(step["preempted"]) for step in steps) > 400 and sum("abort" in e for run in RUNS for e in run["events"]) > 50


# --- everything that can happen, in any order ---

class AnySchedule(RuleBasedStateMachine):
    """Requests come, run, are aborted, also while a step runs; after every half step the accounts hold, and in the end every text is the
    one that a request alone would have got, and every block is free."""

    @initialize(bs=st.integers(1, 4), nb=st.integers(3, 14), tok=st.integers(1, 12), seqs=st.integers(1, 5), pc=st.booleans(),
                policy=st.sampled_from(["fcfs", "priority"]), threshold=st.sampled_from([0, 0, 1, 3]), reserve=st.booleans(),
                chunked=st.booleans())
    def start(self, bs, nb, tok, seqs, pc, policy, threshold, reserve, chunked):
        length = 24 if chunked else min(24, tok)
        self.engine = Engine(bs, nb, tok, seqs, length, pc, policy=policy, long_prefill_token_threshold=threshold,
                             scheduler_reserve_full_isl=reserve, enable_chunked_prefill=chunked)
        self.count, self.aborted = 0, {}

    @rule(base=st.integers(0, 2), length=st.integers(1, 16), n=st.integers(1, 12), priority=st.integers(0, 2),
          stop=st.sampled_from([None, None, [1]]), at=st.sampled_from([0.0, 1.0, 2.0]))
    def add(self, base, length, n, priority, stop, at):
        prompt = (tokens(length - 2, base) + [base, length % VOCAB])[-length:]  # three families with common beginnings
        scheduler = self.engine.scheduler
        assume(len(scheduler.requests) < 12)
        self.count += 1
        if length >= scheduler.max_model_len:
            with pytest.raises(RequestRefused):
                self.engine.add(f"r{self.count}", prompt, n)
            assert f"r{self.count}" not in scheduler.requests
        else:
            self.engine.add(f"r{self.count}", prompt, n, priority, at, stop_token_ids=stop)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.engine.all)
    @rule(data=st.data(), while_it_runs=st.booleans())
    def abort(self, data, while_it_runs):
        request = self.engine.all[data.draw(st.sampled_from(sorted(self.engine.all)))]
        was_finished = request.status is RequestStatus.FINISHED

        def abort():
            reason, length = request.finish_reason, request.num_output_tokens
            self.engine.scheduler.abort_request(request.request_id)
            assert request.finish_reason == (reason if was_finished else "abort")
            self.aborted[request.request_id] = length

        if while_it_runs:
            if not was_finished:
                self.engine.step(between=abort)
        else:
            abort()

    @rule()
    def reset(self):
        done = self.engine.manager.reset_prefix_cache()
        assert done == (not self.engine.scheduler.running)
        assert not done or not self.engine.manager.block_pool.cached_block_hash_to_block

    @invariant()
    def accounts(self):
        if hasattr(self, "engine"):
            check_invariants(self.engine.scheduler)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain(5000)
        self.engine.check_texts()
        limit = self.engine.scheduler.max_model_len
        for request in self.engine.all.values():
            params, out = request.sampling_params, request.output_token_ids
            if request.request_id in self.aborted and request.finish_reason == "abort":
                assert len(out) == self.aborted[request.request_id], "a token after the abort"
                continue
            stops = [i for i, token in enumerate(out) if token in params.stop_token_ids]
            if request.finish_reason == "stop":
                assert stops == [len(out) - 1] and request.stop_reason == out[-1]
            else:
                assert request.finish_reason == "length" and not stops
                assert len(out) == min(params.max_tokens, limit - request.num_prompt_tokens)


AnySchedule.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None,
                                         suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
TestAnySchedule = AnySchedule.TestCase


# --- KV and prefix cache: failures other engines had ---

def test_equal_tokens_at_another_place_are_no_hit():
    engine = Engine(bs=2, nb=4)
    for i, prompt in enumerate([[1, 2, 3, 4, 5], [1, 2, 5], [3, 4, 5], [1, 2, 3, 4, 5]]):
        engine.add(f"r{i}", prompt, n=1)
        engine.drain()
    assert engine.all["r3"].num_cached_tokens <= 2
    engine.check_texts()


def test_caching_changes_no_text_in_hundreds_of_small_pools():
    hits = 0
    for seed in range(400):
        engine = Engine(bs=2, nb=4 + seed % 3, length=10)
        for i in range(8):
            prompt = [t for k in range(hash((seed, i)) % 3) for t in divmod(hash((seed, i, k)) % 4, 2)] + [3]
            engine.add(f"r{i}", prompt, n=1)
            engine.drain()
            hits += engine.all[f"r{i}"].num_cached_tokens
        engine.check_texts()
    assert hits > 1000  # or the test would say nothing


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 13])
def test_the_last_known_token_is_always_computed(length):
    engine = Engine()
    first = engine.add("first", tokens(length), n=6)
    engine.drain()
    second = engine.add("second", tokens(length), n=6)
    output, sampled, _ = engine.step()
    assert second.num_cached_tokens == (length - 1) // 4 * 4 <= length - 1
    assert output.num_scheduled_tokens == {"second": length - second.num_cached_tokens} and "second" in sampled
    assert output.num_hit_blocks == {"second": (length - 1) // 4}
    engine.drain()
    assert first.output_token_ids == second.output_token_ids
    engine.check_texts()


@pytest.mark.parametrize("k", range(1, 13))
def test_a_partial_hit_leaves_no_gap(k):
    engine, p = Engine(tok=5), tokens(13)
    engine.add("start", p[:k], n=1)
    engine.drain()
    request = engine.add("whole", p)
    engine.drain()
    assert request.num_cached_tokens == k // 4 * 4
    engine.check_texts()


def test_two_requests_with_one_beginning_in_one_step():
    engine, p = Engine(tok=6), tokens(12)
    for request_id, prompt in [("a", p), ("b", p), ("c", p + tokens(5, seed=9))]:
        engine.add(request_id, prompt)
    engine.drain()
    engine.check_texts()
    engine = Engine()  # and with room for all at once: b and c hit blocks that a fills in the same step
    for request_id, prompt in [("a", p), ("b", p), ("c", p + tokens(5, seed=9))]:
        engine.add(request_id, prompt)
    output, *_ = engine.step()
    assert output.num_hit_blocks == {"a": 0, "b": 2, "c": 3}
    engine.drain()
    engine.check_texts()


def test_a_block_that_its_step_never_wrote_is_not_found():
    """long is given two blocks for tokens 16-23, and is then preempted in the same step by someone more urgent, who takes the second of
    them. The first was published for a step that will not run: long, coming back, must not be given it."""
    engine = Engine(bs=4, nb=8, tok=16, policy="priority", long_prefill_token_threshold=8, scheduler_reserve_full_isl=False)
    long = engine.add("long", tokens(24), n=2, priority=9)
    engine.step()
    engine.add("urgent", tokens(4, seed=5), n=3, priority=0)
    engine.step()
    assert long.num_computed_tokens == 16
    output, *_ = engine.step()
    assert output.preempted_req_ids == ["long"] and output.num_scheduled_tokens == {"urgent": 1}
    while not output.num_hit_blocks:
        output, *_ = engine.step()
    assert output.num_hit_blocks == {"long": 4}
    engine.drain()
    engine.check_texts()


@pytest.mark.parametrize("nb", [17, 60])
def test_blocks_with_one_content_both_stay(nb):
    engine = Engine(bs=4, nb=nb, tok=16)
    engine.add("a", tokens(8), n=20)
    engine.add("b", tokens(8), n=20)
    for _ in range(3):
        engine.step()
    engine.add("c", tokens(9, seed=3), n=20)
    engine.drain()
    engine.check_texts()


@pytest.mark.parametrize("n", [1, 3, 4, 5])
def test_accounts_after_two_hundred_repeats(n):
    engine = Engine(bs=4, nb=9, tok=8)
    stop = expected_output(tokens(6), 8)
    for i in range(200):
        kind = i % 4
        request = engine.add("same-id", tokens(6), n=8 if kind else n, stop_token_ids=[stop[n - 1]] if kind == 1 else None)
        if kind == 2:
            for _ in range(2):
                engine.step()
            engine.scheduler.abort_request("same-id")
        elif kind == 3:
            engine.step()
            engine.scheduler.finish_request("same-id", "stop", "a stop string")
        engine.drain(10**6)
        assert request.finish_reason == {0: "length", 1: "stop", 2: "abort", 3: "stop"}[kind]
        assert engine.manager.num_free_blocks == 8


def test_tokens_are_hashed_once_in_their_life(monkeypatch):
    calls = collections.Counter()
    original = kv_cache.hash_block_tokens

    def counting(parent, token_ids):
        calls[parent, tuple(token_ids)] += 1
        return original(parent, token_ids)

    monkeypatch.setattr(kv_cache, "hash_block_tokens", counting)
    engine = Engine(bs=4, nb=12, tok=16)
    for i in range(4):
        engine.add(f"r{i}", tokens(9, seed=20 + i) + [i], n=17)
    engine.drain()
    assert engine.preemptions() > 0
    assert sum(calls.values()) == sum(request.num_tokens // 4 for request in engine.all.values())


# --- the scheduler: failures other engines had ---

def test_larger_than_the_pool_is_refused_and_blocks_nobody():
    engine = Engine(bs=4, nb=9, length=64)
    with pytest.raises(RequestRefused, match=r"40 tokens.*32.*--num-kv-blocks"):
        engine.add("large", tokens(40))
    engine.add("a", tokens(4))
    engine.add("b", tokens(4, seed=1))
    engine.drain()
    engine.check_texts()


@pytest.mark.parametrize("prompt, outputs", [(1, 7), (5, 3), (7, 1)])
def test_what_fits_but_cannot_grow_ends_with_length(prompt, outputs):
    engine = Engine(bs=4, nb=3, length=64)
    request = engine.add("grows", tokens(prompt), n=50)
    engine.drain(100)
    assert (request.finish_reason, request.num_output_tokens) == ("length", outputs)  # prompt + output = the pool's 8 slots
    with pytest.raises(RequestRefused):
        engine.add("too long", tokens(8))
    engine.add("after", tokens(3), n=2)
    engine.drain()
    engine.check_texts()


def test_two_that_cannot_both_grow_take_turns():
    engine = Engine(bs=4, nb=5, length=64, scheduler_reserve_full_isl=False)
    for i in range(3):
        engine.add(f"r{i}", tokens(6, seed=i), n=50)
    engine.drain(500)
    assert [r.num_tokens for r in engine.all.values()] == [16, 16, 16] and engine.preemptions() > 0
    engine.check_texts()


@pytest.mark.parametrize("tok", [1, 4])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 41])
def test_a_prompt_longer_than_the_budget_is_cut(tok, length):
    engine = Engine(tok=tok, seqs=1)
    engine.add("a", tokens(length), n=5)
    engine.add("b", tokens(length, seed=1), n=5)
    engine.drain()
    engine.check_texts()
    chunks = [output.num_scheduled_tokens["a"] for output in engine.outputs if "a" in output.num_scheduled_tokens]
    assert chunks[:-4] == [tok] * (length // tok) + [length % tok] * (length % tok > 0) and chunks[-4:] == [1] * 4


def test_a_chunk_that_stops_short_yields_no_token():
    engine = Engine(tok=4)
    request = engine.add("a", tokens(11), n=3)
    for k in range(3):
        output = engine.scheduler.schedule()
        sampled = engine.model.run(engine.model.prepare(output))
        assert list(sampled) == ([] if k < 2 else ["a"])
        engine.scheduler.update_from_output(output, {"a": -1} if k < 2 else sampled)  # a token for a partial chunk is dropped
        assert request.num_output_tokens == (k == 2)
    engine.drain()
    assert request.num_output_tokens == 3
    engine.check_texts()


def test_a_missing_sampled_token_is_an_error():
    engine = Engine()
    engine.add("a", tokens(3))
    with pytest.raises(KeyError, match="a"):
        engine.scheduler.update_from_output(engine.scheduler.schedule(), {})


def test_resumed_requests_look_up_before_they_count():
    def run(nb):
        engine = Engine(bs=4, nb=nb, tok=16, seqs=6)
        for i in range(6):
            engine.add(f"r{i}", tokens(8, seed=max(i, 1)), n=16)
        return engine.drain()

    tight, roomy = run(11), run(200)
    assert tight.preemptions() > 0 and roomy.preemptions() == 0
    hits = {i: [output.num_hit_blocks[i] * 4 for output in tight.outputs if i in output.num_hit_blocks] for i in tight.all}
    assert any(later for first, *rest in hits.values() for later in rest)
    assert {i: request.num_cached_tokens for i, request in tight.all.items()} == {i: first for i, (first, *_) in hits.items()}
    tight.check_texts()
    assert [r.output_token_ids for r in tight.all.values()] == [r.output_token_ids for r in roomy.all.values()]


@pytest.mark.parametrize("pc", [True, False])
@pytest.mark.parametrize("index", range(1, 13))
def test_preempted_at_every_output_index(index, pc):
    engine = Engine(tok=5, pc=pc)
    request = engine.add("a", tokens(6), n=14)
    other = engine.add("b", tokens(7, seed=1), n=14)
    while request.num_output_tokens < index:
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request)
    check_invariants(engine.scheduler)
    assert (request.num_computed_tokens, request.num_output_tokens, request.status) == (0, index, RequestStatus.PREEMPTED)
    engine.drain()
    engine.check_texts()
    assert request.num_output_tokens == other.num_output_tokens == 14 and request.num_preemptions == 1


def test_no_thrashing():
    engine = Engine(bs=4, nb=13, tok=4, seqs=3)
    for i in range(3):
        engine.add(f"r{i}", tokens(24, seed=i), n=16)
    engine.drain(50 * 3 * 40)
    engine.check_texts()
    computed = sum(output.total_num_scheduled_tokens for output in engine.outputs)
    assert all(request.num_preemptions <= 3 for request in engine.all.values())
    assert computed <= 3 * sum(request.num_tokens - 1 for request in engine.all.values())


def test_nobody_is_admitted_in_a_step_that_preempts():
    engine = Engine(bs=4, nb=10, tok=16, seqs=6, scheduler_reserve_full_isl=False)
    for i in range(6):
        engine.add(f"r{i}", tokens(8, seed=i), n=16)
    engine.drain()
    assert engine.preemptions() > 0
    assert not any(output.preempted_req_ids and output.num_hit_blocks for output in engine.outputs)


def test_a_plan_may_be_empty_when_the_first_asker_is_the_victim():
    engine = Engine(bs=4, nb=5, tok=9, policy="priority", scheduler_reserve_full_isl=False)
    engine.add("late", tokens(7), n=8, priority=5)
    engine.step()                                              # late: two blocks, 7 computed
    engine.add("urgent", tokens(7, seed=1), n=8, priority=0)
    output, *_ = engine.step()                                 # urgent: the other two
    assert output.num_scheduled_tokens == {"late": 1, "urgent": 7}
    output, *_ = engine.step()                                 # late asks first, and ranks last: vLLM ends the loop here
    assert output.preempted_req_ids == ["late"] and output.num_scheduled_tokens == {}
    assert engine.step()[0].num_scheduled_tokens["urgent"] == 1
    engine.drain()
    engine.check_texts()


def test_a_victim_that_was_scheduled_leaves_the_plan_and_returns_its_budget():
    engine = Engine(bs=4, nb=5, tok=4, seqs=3, policy="priority", scheduler_reserve_full_isl=False)
    engine.add("c", tokens(4), n=9, priority=9)
    engine.step()
    engine.add("a", tokens(2, seed=1), n=9, priority=0)
    engine.add("b", tokens(1, seed=2), n=9, priority=1)
    while not engine.outputs[-1].preempted_req_ids:
        running, computed = [r.request_id for r in engine.scheduler.running], engine.all["c"].num_computed_tokens
        output, *_ = engine.step()
    # c stood first and its token fitted its last block, so it had been served before a asked for a block
    assert running == ["c", "a", "b"] and computed % 4 != 0 and output.preempted_req_ids == ["c"]
    assert output.num_scheduled_tokens == {"a": 1, "b": 1} and output.total_num_scheduled_tokens == 2
    assert output.num_computed_tokens.keys() == {"a", "b"} and engine.all["c"].num_computed_tokens == 0
    engine.drain()
    engine.check_texts()


def test_first_tokens_come_in_order_of_arrival():
    engine = Engine(bs=4, nb=8, tok=7, seqs=4)
    for i in "ABCDEF":
        engine.add(i, tokens(6 + ord(i) % 3, seed=ord(i)), n=12)
    order = []
    while engine.scheduler.has_unfinished_requests():
        _, sampled, _ = engine.step()
        order += [i for i in sampled if i not in order]
    assert order == list("ABCDEF") and engine.preemptions() > 0
    engine.check_texts()


def test_priority_admits_and_chooses_victims():
    engine = Engine(seqs=1, policy="priority")
    for i, priority, at in [("slow", 5, 0.0), ("b", 1, 3.0), ("a", 1, 2.0), ("tie", 1, 2.0)]:
        engine.add(i, [1, 2, 3], n=2, priority=priority, arrival_time=at)
    first = []
    while engine.scheduler.has_unfinished_requests():
        first += [i for i in engine.step()[0].num_hit_blocks]
    assert first == ["a", "tie", "b", "slow"]


# --- aborts ---

STATES = ["waiting", "mid-chunk", "final chunk", "decoding", "preempted", "finished", "unknown"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("while_step_runs", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state, while_step_runs, policy):
    engine = Engine(bs=4, nb=20, tok=6, policy=policy)
    engine.add("before", tokens(3), n=9)
    x = engine.add("x", tokens(11, seed=1), n=3 if state == "finished" else 9)
    engine.add("after", tokens(11, seed=1) + [1], n=9)
    steps = {"waiting": 0, "mid-chunk": 2, "final chunk": 2, "decoding": 5, "preempted": 5, "finished": 12, "unknown": 2}[state]
    for _ in range(steps):
        engine.step()
    if state == "preempted":
        engine.scheduler.running.remove(x)
        engine.scheduler._preempt_request(x)
    if state == "mid-chunk":
        assert 0 < x.num_computed_tokens < x.num_prompt_tokens
    target, reason, length = "nobody" if state == "unknown" else "x", x.finish_reason, x.num_output_tokens

    def abort():
        for _ in range(2):
            engine.scheduler.abort_request(target)
        check_invariants(engine.scheduler)

    if while_step_runs or state == "final chunk":
        _, _, finished = engine.step(between=abort)
        assert x not in finished or state in ("unknown", "finished")
    else:
        abort()
    if target == "x":
        assert x.finish_reason == (reason or "abort") and x.status is RequestStatus.FINISHED
        assert x.num_output_tokens == length and engine.manager.get_block_ids("x") == []
        again = engine.add("x", tokens(11, seed=1), n=9)  # the id is free again
        engine.drain()
        assert again.num_output_tokens == 9
    engine.drain()
    engine.check_texts()


def test_the_token_of_an_aborted_request_does_not_reach_its_successor():
    engine = Engine()
    old = engine.add("x", tokens(5))
    output = engine.scheduler.schedule()
    engine.scheduler.abort_request("x")
    new = engine.add("x", tokens(6, seed=1))
    engine.scheduler.update_from_output(output, {"x": 3})
    assert old.output_token_ids == new.output_token_ids == [] and new.status is RequestStatus.WAITING


# --- limits, refusals, the stop rule ---

@pytest.mark.parametrize("length, outputs", [(14, 2), (15, 1), (16, None), (17, None)])
def test_length_limit_edges(length, outputs):
    engine = Engine(length=16)
    if outputs is None:
        with pytest.raises(RequestRefused, match=rf"{length} tokens.*16.*--max-model-len"):
            engine.add("a", tokens(length), n=10)
    else:
        request = engine.add("a", tokens(length), n=10, min_tokens=5)  # min_tokens must not carry it past the limit
        engine.drain()
        assert (request.num_output_tokens, request.finish_reason, request.num_tokens) == (outputs, "length", 16)
    engine.add("b", tokens(4), n=2)
    engine.drain()


def test_refusals_leave_nothing_behind():
    engine = Engine(max_num_waiting=2, seqs=1)
    with pytest.raises(RequestRefused, match="empty"):
        engine.add("a", [])
    engine.add("a", [1])
    engine.step()
    with pytest.raises(RequestRefused, match="'a' is already in use"):
        engine.add("a", [2])
    engine.add("b", [1])
    engine.add("c", [1])
    with pytest.raises(RequestRefused, match=r"2 requests are waiting.*limit is 2.*'d'.*--max-num-waiting"):
        engine.add("d", [1])
    assert list(engine.scheduler.requests) == ["a", "b", "c"] and list(engine.all) == ["a", "b", "c"]
    engine.scheduler.abort_request("b")
    engine.add("d", [1])
    engine.drain()
    assert isinstance(RequestRefused("x"), ValueError)


@pytest.mark.parametrize("options, message", [
    (dict(max_num_seqs=0), "--max-num-seqs must be at least 1, got 0"),
    (dict(max_num_batched_tokens=0), "--max-num-batched-tokens must be at least 1"),
    (dict(max_model_len=0), "--max-model-len must be at least 1"),
    (dict(max_num_batched_tokens=3), "--max-num-batched-tokens 3 is below --max-num-seqs 4"),
    (dict(enable_chunked_prefill=False), "--max-num-batched-tokens 16 is below --max-model-len 64"),
    (dict(policy="lifo"), "--scheduling-policy must be fcfs or priority, got 'lifo'"),
    (dict(long_prefill_token_threshold=-1), "--long-prefill-token-threshold must be at least 0"),
    (dict(max_num_waiting=0), "--max-num-waiting must be at least 1")])
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{**dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64), **options})


NAN, INF = float("nan"), float("inf")
BAD_PARAMS = [("n", [0, -1, 1.5, None, True]), ("temperature", [-0.1, NAN, INF, -INF, "1", None]), ("top_p", [0, -0.5, 1.1, NAN]),
              ("top_k", [-2, 1.5]), ("min_p", [-0.1, 1.1, NAN]), ("seed", [1.5, 2**63, -2**63 - 1, "7"]),
              ("repetition_penalty", [0, -1, NAN, INF]), ("presence_penalty", [-2.1, 2.1, NAN]), ("frequency_penalty", [-2.1, 2.1]),
              ("max_tokens", [0, -1, 1.5, "5", True]), ("min_tokens", [-1, 17]), ("logprobs", [-1, 0.5]),
              ("stop", ["", ["", "x"], [1], 5]), ("stop_token_ids", [[-1], [1.5], [True], ["a"], 7])]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_PARAMS for value in values])
def test_bad_sampling_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        if name == "stop" and value == "":
            SamplingParams(stop=[""])
        SamplingParams(**{name: value})


def test_good_sampling_values_pass():
    params = SamplingParams(n=2, temperature=0, top_p=1, top_k=-1, min_p=0.0, seed=-2**63, max_tokens=None, min_tokens=5, stop="x",
                            stop_token_ids=[0], logprobs=0)
    assert params.stop == ["x"] and SamplingParams().stop == [] and SamplingParams().stop_token_ids == []
    assert SamplingParams(stop=["a", "b"]).stop == ["a", "b"]


@pytest.mark.parametrize("params, sampled, reason, stop_reason, length", [
    (dict(max_tokens=5), [1, 2, 7, 1], "stop", None, 3),                                    # 7 is EOS
    (dict(max_tokens=3), [1, 2, 7], "stop", None, 3),                                       # EOS on the last allowed token
    (dict(max_tokens=4, ignore_eos=True), [1, 7, 7, 7], "length", None, 4),
    (dict(max_tokens=5, stop_token_ids=[2]), [1, 2, 3], "stop", 2, 2),
    (dict(max_tokens=5, ignore_eos=True, stop_token_ids=[7]), [1, 7], "stop", 7, 2),
    (dict(max_tokens=6, min_tokens=3, stop_token_ids=[2]), [2, 7, 2, 9], "stop", 2, 3),     # held back until the third
    (dict(max_tokens=2, min_tokens=2), [7, 7], "stop", None, 2),
    (dict(max_tokens=1), [3], "length", None, 1),
    (dict(max_tokens=None), [3] * 61, "length", None, 61)])                                 # 3 + 61 = max_model_len
def test_stop_rule(params, sampled, reason, stop_reason, length):
    engine = Engine(length=64)
    request = Request("a", [1, 2, 3], SamplingParams(**params), eos_token_ids={7})
    engine.scheduler.add_request(request)
    for token in sampled:
        finished = engine.scheduler.update_from_output(engine.scheduler.schedule(), {"a": token})
        if finished:
            break
    assert finished == [request] and request.status is RequestStatus.FINISHED
    assert (request.finish_reason, request.stop_reason, request.output_token_ids) == (reason, stop_reason, sampled[:length])


# --- records, accounts, cost ---

def test_step_records_are_json_and_tell_the_step():
    engine = Engine(bs=4, nb=7, tok=8)
    engine.add("a", tokens(10), n=2)
    engine.add("b", tokens(3, seed=1), n=2)
    records = []
    while engine.scheduler.has_unfinished_requests():
        output, sampled, finished = engine.step()
        records.append(engine.scheduler.make_record(len(records), output, sampled, 1.5, 0.25, [r.request_id for r in finished]))
    a, b = records[1].requests
    assert all(isinstance(record, StepRecord) for record in records)
    assert (a.computed, a.scheduled, b.computed, b.scheduled) == (8, 2, 0, 3)
    assert a.sampled is not None and records[0].requests[0].sampled is None and b.num_prompt_tokens == 3
    assert (records[0].budget, records[0].used, records[0].running, records[0].waiting) == (8, 8, 1, 1)
    assert (records[1].free_blocks, records[1].total_blocks) == (2, 6)
    assert records[-1].finished == ["a", "b"] and records[-1].running == 2
    assert json.loads(json.dumps([dataclasses.asdict(record) for record in records]))[1]["requests"][0]["scheduled"] == 2


def test_records_alone_tell_who_holds_what_and_who_waits():
    """Played from the records, with nothing else known: the block tables after each step and the queue are the
    scheduler's own, through hits, preemptions, aborts of waiting and of running requests, and an id that comes again.
    What is recorded of a step doesn't grow with the length of the sequences."""
    engine, tables, waiting, records = Engine(bs=4, nb=12, tok=16, seqs=4), {}, set(), []
    preempted = hits = 0
    for i in range(9):
        engine.add(str(i), tokens(9, seed=i % 3), n=12)
    for number in range(80):
        if number == 4:
            engine.scheduler.abort_request("7")                           # waits
            engine.scheduler.abort_request(engine.scheduler.running[0].request_id)
            engine.add("7", tokens(5, seed=9), n=3)
            engine.add("brief", tokens(5), n=3)
            engine.scheduler.abort_request("brief")                       # no step has seen it
        if not engine.scheduler.has_unfinished_requests():
            break
        output, sampled, finished = engine.step()
        record = engine.scheduler.make_record(number, output, sampled, 0.0, 1.0, [r.request_id for r in finished])
        record = json.loads(json.dumps(dataclasses.asdict(record)))
        for name in record["aborted"]:
            tables.pop(name, None), waiting.discard(name)
        waiting |= record["arrived"].keys()
        for name in record["preempted"]:
            del tables[name]
            waiting.add(name)
        for part in record["requests"]:
            tables.setdefault(part["request_id"], []).extend(part["blocks"])
            waiting.discard(part["request_id"])
            hits += part["hit_blocks"]
            assert len(part["blocks"]) <= part["hit_blocks"] + -(-part["scheduled"] // 4) + 1
        for name in record["finished"]:
            del tables[name]
        preempted += len(record["preempted"])
        assert tables == engine.manager.req_to_block_ids, f"step {number}"
        assert waiting == {r.request_id for r in engine.scheduler.waiting.values()}, f"step {number}"
        assert "brief" not in record["arrived"] and "brief" not in record["aborted"]
        records.append(record)
    assert preempted and hits and records[4]["aborted"] and records[4]["arrived"] == {"7": 5}
    assert (records[0]["block_size"], records[0]["enable_prefix_caching"]) == (4, True)
    assert not tables and not waiting


def break_ref_cnt(engine):
    engine.manager.block_pool.blocks[engine.manager.get_block_ids("a")[0]].ref_cnt += 1


def break_free_list(engine):
    queue = engine.manager.block_pool.free_block_queue
    queue.append(engine.manager.block_pool.blocks[engine.manager.get_block_ids("a")[0]])


def break_null_block(engine):
    engine.manager.req_to_block_ids["a"][0] = 0


def break_name(engine):
    block = engine.manager.block_pool.blocks[engine.manager.get_block_ids("a")[0]]
    engine.manager.block_pool.uncache_block(block)
    engine.manager.block_pool.cache_full_block(block, b"another text")


def break_map(engine):
    engine.manager.block_pool.cached_block_hash_to_block.clear()


def break_lost_block(engine):
    engine.manager.block_pool.free_block_queue.popleft()


def break_table(engine):
    engine.manager.req_to_block_ids["a"].pop()


def break_running(engine):
    engine.scheduler.running.append(engine.scheduler.requests["b"])


def break_status(engine):
    engine.scheduler.requests["a"].status = RequestStatus.WAITING


def break_tokens(engine):
    engine.scheduler.requests["a"].all_token_ids.append(1)


def break_owner(engine):
    engine.manager.req_to_block_ids["ghost"] = []


@pytest.mark.parametrize("damage", [value for name, value in list(globals().items()) if name.startswith("break_")])
def test_check_invariants_sees_damage(damage):
    engine = Engine(seqs=1)
    engine.add("a", tokens(9))
    engine.add("b", tokens(9))
    engine.step()
    check_invariants(engine.scheduler)
    damage(engine)
    with pytest.raises(AssertionError):
        check_invariants(engine.scheduler)


@pytest.mark.parametrize("field, value", [("total_num_scheduled_tokens", 99), ("num_scheduled_tokens", {"a": 9, "b": 60}),
                                          ("scheduled_requests", [])])
def test_check_invariants_sees_a_bad_plan(field, value):
    engine = Engine(seqs=1)
    engine.add("a", tokens(9))
    output = engine.scheduler.schedule()
    check_invariants(engine.scheduler, output)
    setattr(output, field, value)
    with pytest.raises(AssertionError):
        check_invariants(engine.scheduler, output)


class CountedFloat(float):
    """A number whose comparisons are Python calls, so that a profile counts them even inside a heap or a sort."""

    def __lt__(self, other):
        return float(self) < float(other)

    def __eq__(self, other):
        return float(self) == float(other)

    __hash__ = float.__hash__


class CountedRequest(Request):
    """Likewise: a search through a list or a deque compares its items."""

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


COUNTED_FILES = {kv_cache.__file__, scheduler_module.__file__, __file__}


def count_calls(function):
    """Calls of Python and of C functions in the modules under test, comparisons of counted things included. A garbage collection that
    happens to run meanwhile calls hooks of others; those are not counted."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename in COUNTED_FILES

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def crowded(policy, num_waiting):
    manager = KVCacheManager(200, 16)
    scheduler = Scheduler(SchedulerConfig(8, 64, 256, policy=policy), manager)
    params = SamplingParams(max_tokens=200)
    for i in range(num_waiting + 8):
        scheduler.add_request(CountedRequest(f"r{i}", [i % 7, i % 5, i], params, CountedFloat(i)))
    step = lambda: scheduler.update_from_output(output := scheduler.schedule(), dict.fromkeys(output.num_scheduled_tokens, 1))  # noqa: E731
    step()
    assert len(scheduler.running) == 8 and len(scheduler.waiting) == num_waiting
    return scheduler, step


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_cost_does_not_grow_with_the_number_waiting(policy):
    """By counting, not by clock: a step, an arrival, an abort and an admission, before 1,000 and 100,000 waiting requests."""
    costs = []
    for num_waiting in (1_000, 100_000):
        scheduler, step = crowded(policy, num_waiting)

        def abort():
            for i in range(num_waiting // 2, num_waiting // 2 + 100):
                scheduler.abort_request(f"r{i}")

        def arrive():
            scheduler.add_request(CountedRequest("new", [1], SamplingParams(), CountedFloat(1e9)))

        def admit():
            scheduler.abort_request("r3")
            step()

        costs.append({"step": count_calls(step), "100 aborts": count_calls(abort), "arrival": count_calls(arrive),
                      "admission": count_calls(admit)})
        assert len(scheduler.waiting) == num_waiting - 100 and len(scheduler.running) == 8
    few, many = costs
    for what in few:  # a heap of a hundred times the size is 7 levels deeper, at two comparisons of two floats each
        assert many[what] <= few[what] + (0 if policy == "fcfs" or what in ("step", "100 aborts") else 60), (what, few, many)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborting_everybody_costs_a_few_operations_each_and_leaves_nothing(policy):
    costs = []
    for num_waiting in (500, 20_000):
        scheduler, step = crowded(policy, num_waiting)
        costs.append(count_calls(lambda: [scheduler.abort_request(f"r{i}") for i in range(8, num_waiting + 8)]) / num_waiting)
        assert len(scheduler.waiting) == 0 and list(scheduler.waiting.values()) == []
        assert len(getattr(scheduler.waiting, "_heap", ())) == 0
        step()
        check_invariants(scheduler)
    assert costs[1] <= costs[0] + 1 and costs[1] < 20


def test_a_chunk_is_not_planned_token_by_token():
    costs = []
    for length in (100, 4000):
        scheduler = Scheduler(SchedulerConfig(8, 4096, 4096), KVCacheManager(3, 4096))
        scheduler.add_request(Request("a", range(length), SamplingParams()))
        costs.append(count_calls(scheduler.schedule))
    assert costs[0] == costs[1]


def test_the_bookkeeping_is_plain_python():
    code = "import sys, scheduler, kv_cache; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_equals_in_everything_but_the_id_do_not_push_each_other_out_for_ever():
    """Two requests of one priority and one arrival time that never fit together: one must give way until the other ends."""
    engine = Engine(bs=1, nb=7, tok=6, seqs=2, length=6, pc=False, policy="priority", long_prefill_token_threshold=1,
                    scheduler_reserve_full_isl=False)
    engine.add("r1", [5], n=5, arrival_time=0.0)
    engine.add("r2", [5], n=5, arrival_time=0.0)
    engine.drain(40)
