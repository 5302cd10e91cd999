"""extras/async_engine.py: many callers on one engine, in asyncio."""
import asyncio
import threading
import time

import pytest
import toys

from engine_args import EngineArgs
from extras.async_engine import AsyncLLMEngine
from nano_serve import LLM
from request import RequestRefused, SamplingParams

PROMPTS = [f"Once upon a time {i}" for i in range(6)]


def greedy(n):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def run(body, **options):
    """body(engine) in an event loop of its own; afterwards nothing of the engine is left."""
    async def main():
        options.setdefault("num_kv_blocks", 200)
        async with AsyncLLMEngine.from_engine_args(EngineArgs(check_invariants=True, **options)) as engine:
            result = await asyncio.wait_for(body(engine), 60)
            assert not engine.slots
            await engine.call(lambda e: toys.check_drained(e))
        assert not engine.thread.is_alive()
        return result
    return asyncio.run(main())


async def last(engine, prompt, params, **more):
    """The last output; its deltas joined are its text."""
    joined = {}
    async for output in engine.generate(prompt, params, **more):
        answer = output.outputs[0]
        joined[answer.index] = joined.get(answer.index, "") + answer.delta
        assert joined[answer.index] == answer.text
    return output


def test_many_callers_get_what_each_would_get_alone():
    with LLM(num_kv_blocks=200) as llm:
        want = [llm.generate(p, greedy(12))[0].outputs[0].token_ids for p in PROMPTS]

    async def body(engine):
        outputs = await asyncio.gather(*(last(engine, p, greedy(12)) for p in PROMPTS))
        records = await engine.call(lambda e: list(e.records))
        assert max(len(r.requests) for r in records) > 1             # they did share steps
        return [o.outputs[0].token_ids for o in outputs]
    assert run(body) == want


def test_n_answers_come_in_one_stream():
    async def body(engine):
        seen = {}
        async for output in engine.generate(PROMPTS[0], SamplingParams(n=3, temperature=20.0, seed=1, max_tokens=5, ignore_eos=True)):
            answer = output.outputs[0]
            seen.setdefault(answer.index, [""])[0] += answer.delta
            seen[answer.index][1:] = [answer.text, answer.token_ids]
        assert sorted(seen) == [0, 1, 2] and all(joined == text and len(ids) == 5 for joined, text, ids in seen.values())
    run(body)


def test_a_slow_reader_costs_one_slot_and_loses_nothing():
    async def body(engine):
        slot = await engine.add(PROMPTS[0], greedy(30), "slow")
        quick = await last(engine, PROMPTS[1], greedy(40))           # more steps than the slow one's answer has
        assert len(quick.outputs[0].token_ids) == 40
        (output,) = await slot.take()                                # nobody has read it until now
        assert output.finished and len(output.outputs[0].token_ids) == 30 and output.outputs[0].delta == output.outputs[0].text
    run(body)


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_who_leaves_frees_its_blocks(how):
    async def body(engine):
        async def read():
            async for output in engine.generate(PROMPTS[0], greedy(100), "leaver"):
                if len(output.outputs[0].token_ids) >= 3 and how == "break":
                    break
                if len(output.outputs[0].token_ids) >= 3 and how == "abort":
                    engine.abort("leaver")
            return output
        task = asyncio.create_task(read())
        if how == "cancel":
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            output = await task
            assert how == "break" or output.outputs[0].finish_reason == "abort"
        for _ in range(200):
            if not await engine.call(lambda e: e.has_unfinished_requests()):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it still runs")
    run(body)


def test_a_refusal_is_its_callers_alone():
    async def body(engine):
        good = asyncio.create_task(last(engine, PROMPTS[0], greedy(8), request_id="a"))
        for prompt, params, id in (([10 ** 6], greedy(3), "b"), ("", SamplingParams(stop_token_ids=[10 ** 6]), "c")):
            with pytest.raises(RequestRefused):
                await last(engine, prompt, params, request_id=id)
        assert len((await good).outputs[0].token_ids) == 8
    run(body)


def test_a_failed_step_reaches_every_waiter_and_the_engine_serves_on():
    async def body(engine):
        execute, calls = engine.engine.executor.execute, []

        def fail(batch):
            calls.append(1)
            if len(calls) == 6:
                raise RuntimeError("the sixth step")
            return execute(batch)
        engine.engine.executor.execute = fail
        outputs = await asyncio.gather(*(last(engine, p, greedy(30)) for p in PROMPTS))
        for output in outputs:
            assert output.outputs[0].finish_reason == "error" and "the sixth step" in output.error
        assert max(len(o.outputs[0].token_ids) for o in outputs) >= 3
        assert len((await last(engine, PROMPTS[0], greedy(5))).outputs[0].token_ids) == 5
    run(body)


def test_shutdown_ends_those_who_wait_and_refuses_who_comes_next():
    async def main():
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(num_kv_blocks=200))
        task = asyncio.create_task(last(engine, PROMPTS[0], greedy(1500)))
        await asyncio.sleep(0.1)
        await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        output = await asyncio.wait_for(task, 10)
        assert output.outputs[0].finish_reason == "abort" and "closed" in output.error and output.outputs[0].token_ids
        with pytest.raises(RuntimeError, match="has ended"):
            await last(engine, PROMPTS[0], greedy(3))
        engine.shutdown()
    asyncio.run(main())


def test_a_reader_whose_event_loop_is_gone_does_not_stop_the_others():
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(num_kv_blocks=200))
    try:
        async def leave():
            await engine.add(PROMPTS[0], greedy(50), "gone")
        asyncio.run(leave())
        output = asyncio.run(asyncio.wait_for(last(engine, PROMPTS[1], greedy(60)), 60))
        assert len(output.outputs[0].token_ids) == 60
    finally:
        engine.shutdown()


def test_an_idle_engine_sleeps():
    before = threading.active_count()
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(num_kv_blocks=50))
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.1
    engine.shutdown()
    assert threading.active_count() == before
