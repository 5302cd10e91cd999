"""extras/async_engine.py where callers leave at odd moments, and where event loops end before the engine does."""
import asyncio
import threading

import pytest
import toys

from engine_args import EngineArgs
from extras.async_engine import AsyncLLMEngine
from request import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def engine():
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(num_kv_blocks=200, check_invariants=True))
    yield engine
    engine.shutdown()
    assert not engine.slots
    toys.check_drained(engine.engine)


def within(body):
    return asyncio.run(asyncio.wait_for(body, 30))


async def read(engine, params, request_id=None):
    return [output async for output in engine.generate("Once upon a time", params, request_id)]


def pause(engine):
    """Keep the engine's thread at a command  →  a function that lets it go on."""
    go = threading.Event()
    engine.inbox.put(lambda: go.wait(20) and None)
    return go.set


@pytest.mark.parametrize("command", ["add", "call"])
def test_an_event_loop_that_ends_before_its_command_is_run(engine, command):
    """The engine's thread finds nobody to answer, and serves on."""
    go = pause(engine)

    async def leave():
        send = engine.add("Once upon a time", LONG) if command == "add" else engine.call(lambda e: 5)
        task = asyncio.create_task(send)
        await asyncio.sleep(0.01)
        assert not task.done()
    asyncio.run(leave())
    go()
    assert within(read(engine, SHORT))[-1].outputs[0].finish_reason == "length"


def test_who_is_refused_and_leaves_takes_nobody_along(engine):
    """A second request of the same id, cancelled before it is refused, must not abort the first."""
    async def body():
        first = asyncio.create_task(read(engine, LONG, "x"))
        while "x" not in engine.slots:
            await asyncio.sleep(0)
        second = asyncio.create_task(engine.add("The dog", LONG, "x"))
        await asyncio.sleep(0)
        second.cancel()
        assert (await first)[-1].outputs[0].finish_reason == "length"
    within(body())


def test_an_id_taken_again_is_not_ended_by_its_first_reader(engine):
    """The first request has ended, unread; its reader leaves when another request has that id already."""
    async def body():
        old = engine.generate("Once upon a time", SHORT, "x")
        await anext(old)
        while "x" in engine.slots:
            await asyncio.sleep(0)
        new = asyncio.create_task(read(engine, LONG, "x"))
        while "x" not in engine.slots:
            await asyncio.sleep(0)
        await old.aclose()
        assert (await new)[-1].outputs[0].finish_reason == "length"
    within(body())


def test_of_unread_answers_the_one_that_finishes_the_request_comes_last(engine):
    """Answer 0 waits unread from the first step on, and is the last to end."""
    async def body():
        slot = await engine.add("Once upon a time", SamplingParams(n=2, seed=0, max_tokens=3, ignore_eos=True), "x")
        while "x" in engine.slots:
            await asyncio.sleep(0)
        outputs = await slot.take()
        first = outputs[0].outputs[0].index
        for _ in range(2):                       # answer `first` gets an output again, and it is the request's last
            outputs[0].finished, outputs[1].finished = True, False
            slot.put(outputs[0]), slot.put(outputs[1]), slot.put(outputs[0])
        again = await slot.take()
        assert [o.outputs[0].index for o in again] == [1 - first, first] and again[-1].finished
    within(body())


def test_a_request_cancelled_at_each_moment_of_its_life(engine):
    async def body():
        for turns in range(60):
            task = asyncio.create_task(read(engine, LONG))
            for _ in range(turns):
                await asyncio.sleep(0 if turns < 40 else 0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while engine.slots:
            await asyncio.sleep(0.001)
        assert await engine.call(lambda e: len(e.scheduler.requests)) == 0
        with pytest.raises(TypeError, match="request_id"):
            await read(engine, SHORT, [])        # an id that no dict takes
        assert (await read(engine, SHORT))[-1].finished
    within(body())


def test_shutting_down_while_requests_come_in():
    """Each of them comes back in some way, whatever the moment."""
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(num_kv_blocks=200))

    async def body():
        tasks = [asyncio.create_task(read(engine, LONG)) for _ in range(200)]
        await asyncio.sleep(0.02)
        thread = threading.Thread(target=engine.shutdown)
        thread.start()
        tasks += [asyncio.create_task(read(engine, LONG)) for _ in range(200)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        thread.join()
        for r in results:
            assert isinstance(r, RuntimeError) or r[-1].finished
        assert any(isinstance(r, RuntimeError) for r in results)
    within(body())
    assert not engine.engine.outputs.live
