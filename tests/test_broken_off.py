"""Steps that end in the middle: a second Ctrl-C at any line of planning, a fault of the model in a prompt that several share."""
import sys

import pytest
import toys

from nano_serve import LLM, LLMEngine, EngineArgs, SamplingParams
from scheduler import check_invariants

PROMPTS = ["Once upon a time there was a", "The little dog ran to the big red", "One day a girl"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
INNER = {"schedule", "_schedule_running", "_schedule_waiting", "_preempt_request", "_pop_victim", "allocate_slots", "get_new_blocks",
         "uncache_block", "cache_full_block", "_cache_full_blocks", "touch", "free", "free_blocks", "update_from_output", "process",
         "output_of", "remove_request", "append_output_token_id", "update_block_hashes"}


def interrupted_at(k, work):
    """work() with a KeyboardInterrupt before the k-th line of those functions  →  where that was, None if never."""
    count, where = 0, None

    def on_line(frame, event, arg):
        nonlocal count, where
        count += event == "line"
        if event == "line" and count == k:
            where = f"{frame.f_code.co_name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return on_line

    def on_call(frame, event, arg):
        caller = frame.f_back and frame.f_back.f_code.co_name        # what the recovery calls is not interrupted
        return on_line if frame.f_code.co_name in INNER and caller not in ("end_all", "abort_request") else None
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_interrupted_at_any_line_of_a_step(policy):
    """Nobody lives on, no block is lost, nothing is hit that was never written, and the same prompts give the same text."""
    options = dict(num_kv_blocks=9, block_size=4, max_num_batched_tokens=32, scheduling_policy=policy)    # some are preempted
    with LLM(**options) as llm:
        ask = lambda: [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
        want, engine, k, places = ask(), llm.engine, 1, []
        assert any(record.preempted for record in engine.records)
        llm.reset_prefix_cache()
        while (where := interrupted_at(k, ask)) is not None:
            places.append(where)
            assert not engine.outputs.live and not engine.outputs.children and not engine.scheduler.requests, where
            toys.check_drained(engine)
            engine.executor.kv_cache.fill_(float("nan"))             # a hit on it would show
            engine.scheduler.kv_cache_manager.reset_prefix_cache() if k % 2 else None
            k += 67 + len(places) % 7
        assert len(set(places)) > 20, places
        assert ask() == want


def test_a_hit_on_wrong_blocks_fails_once_only():
    """Who wrote them was aborted before anybody looked at its logits. The one that hits them fails, and takes them along."""
    prompt = {"prompt_token_ids": list(range(100, 112))}
    engine = LLMEngine(EngineArgs(num_kv_blocks=50, block_size=4, max_num_batched_tokens=8, max_num_seqs=4, check_invariants=True))

    def run(request_id):
        engine.add_request(request_id, prompt, GREEDY)
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = output
        return last
    want = run("alone").outputs[0].token_ids
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    execute = engine.executor.execute
    engine.executor.execute = lambda batch: (execute(batch), engine.executor.kv_cache.fill_(float("nan")))[0]
    engine.add_request("writer", prompt, GREEDY)
    engine.step()                                # two blocks of three
    engine.abort_request("writer")
    engine.executor.execute = execute            # the fault is gone
    failed = run("first")
    assert failed.outputs[0].finish_reason == "error" and failed.num_cached_tokens == 8
    again = run("second")
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == want
    check_invariants(engine.scheduler)


def test_what_a_living_neighbour_wrote_stays_cached():
    """It failed after a hit on the blocks of somebody who is well: those keep their names while he lives."""
    shared = list(range(100, 112))
    engine = LLMEngine(EngineArgs(num_kv_blocks=50, block_size=4, check_invariants=True))
    engine.add_request("well", {"prompt_token_ids": shared + [5]}, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.step()
    weights = engine.executor.model.embed_tokens.weight
    kept = weights[77].clone()
    weights[77] = float("nan")
    engine.add_request("ill", {"prompt_token_ids": shared + [77]}, GREEDY)
    assert [o.outputs[0].finish_reason for o in engine.step() if o.request_id == "ill"] == ["error"]
    weights[77] = kept
    engine.add_request("next", {"prompt_token_ids": shared + [77]}, GREEDY)
    outputs = [o for o in engine.step() if o.request_id == "next"]
    assert outputs[0].num_cached_tokens == 12 and not outputs[0].error
