"""Whatever the engine does with a request, its tokens are those that it would have alone (token equality).

The reference is transformers' LlamaForCausalLM.generate: greedy, fp32, each prompt by itself. Serving must not show:
not the batch, the order of arrival, the token budget, the block size, the prefix cache, the size of the pool, a
preemption, an abort next door. All engines here run over a pool of NaN (toys.make_engine) and are checked after every
step (toys.run).
"""
import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import toys
from nano_serve import LLM, SamplingParams
from request import RequestRefused
from toys import (BOS, EOS, TOYS, assert_same_ids, chain, check_drained, greedy, hf_greedy, ids_of, make_engine, poison,
                  preempt, prompts_of, run, table_checkpoint, toy)

N = 20                                                     # output tokens of a request, where nothing else is said
PREFIX = prompts_of(1, seed=7, low=13, high=13)[0]
# the last four share 13 tokens
PROMPTS = [[5]] + prompts_of(7, seed=6) + [PREFIX + tail for tail in prompts_of(4, seed=1, low=1, high=9)]


def check(folder, jobs, outputs):
    assert_same_ids(folder, [job[0] for job in jobs], ids_of(outputs))
    for (_, params, *_), output in zip(jobs, outputs):
        assert len(output.outputs[0].token_ids) == params.max_tokens and output.outputs[0].finish_reason == "length"


def chunks(engine):
    """How many steps ended within a prompt."""
    return sum(r.sampled is None for record in engine.records for r in record.requests)


def preemptions(engine):
    return sum(len(record.preempted) for record in engine.records)


def hit_blocks(engine):
    return sum(r.hit_blocks for record in engine.records for r in record.requests)


# -- The yardstick ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", TOYS)
def test_toys_have_something_to_say(name):
    """A toy that repeats itself would hide errors: most answers hold many different tokens, and no two are alike."""
    answers = hf_greedy(toy(name), PROMPTS, N)
    assert sorted(len(set(a)) for a in answers)[2] >= 8 and len(set(map(tuple, answers))) >= len(PROMPTS) - 1


def test_a_wrong_token_is_noticed():
    folder, (want,) = toy(), hf_greedy(toy(), PROMPTS[:1], N)
    for at in (0, 7, N - 1):
        with pytest.raises(AssertionError, match=f"output token {at} is"):
            assert_same_ids(folder, PROMPTS[:1], [want[:at] + [(want[at] + 1) % 96] + want[at + 1:]])


def test_a_tie_is_accepted_and_what_follows_it_is_checked():
    """Two tokens with the same head row tie whenever one of them is on top; the text goes on from the one that was
    chosen."""
    from safetensors.torch import load_file, save_file
    (want,), twin = hf_greedy(toy(), PROMPTS[:1], N), 95
    assert twin not in want
    folder = toys.copy_of(toy())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][twin] = weights["lm_head.weight"][want[5]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    start = hf_greedy(folder, PROMPTS[:1], N)[0][:5]
    assert start == want[:5]
    other = start + [twin] + hf_greedy(folder, [PROMPTS[0] + start + [twin]], N - 6)[0]
    before = len(toys.ties)
    assert_same_ids(folder, PROMPTS[:1], [other])
    assert len(toys.ties) > before and other != want
    with pytest.raises(AssertionError, match="output token 6 "):
        assert_same_ids(folder, PROMPTS[:1], [other[:6] + [(other[6] + 1) % 94] + other[7:]])


# -- The grid: every kind of model, every way to serve it -------------------------------------------------------------

def one_at_a_time(folder):
    engine = make_engine(folder)
    jobs = [(p, greedy(N)) for p in PROMPTS]
    check(folder, jobs, [run(engine, [job])[0] for job in jobs])
    # 13 common tokens: three blocks for each of the last three, even served apart
    assert hit_blocks(engine) == 9


def all_at_once(folder, **options):
    engine, jobs = make_engine(folder, **options), [(p, greedy(N)) for p in PROMPTS]
    check(folder, jobs, run(engine, jobs))
    return engine


def budget(size):
    def serve(folder):
        engine = all_at_once(folder, max_num_batched_tokens=size)
        assert chunks(engine) > 0
    return serve


def block_size(size):
    return lambda folder: all_at_once(folder, block_size=size, num_kv_blocks=1 + 800 // size)


def shuffled(folder):
    rng = random.Random(0)
    for _ in range(3):
        jobs = [(p, greedy(rng.randint(1, N))) for p in rng.sample(PROMPTS, len(PROMPTS))]
        check(folder, jobs, run(make_engine(folder, max_num_seqs=rng.choice([3, 5, 64])), jobs))


def staggered(folder):
    jobs = [(p, greedy(N)) for p in PROMPTS]
    engine = make_engine(folder, max_num_batched_tokens=16)
    check(folder, jobs, run(engine, jobs, arrivals=[random.Random(1).randint(0, 30) for _ in jobs]))
    kinds = [{r.sampled is None for r in record.requests} for record in engine.records]
    assert {True, False} in kinds             # prefill chunks and decodes did meet in one step


def served_twice(folder):
    """The second time all full blocks of prompt and output are found: of each request at most the last block is
    computed."""
    engine, jobs = make_engine(folder), [(p, greedy(N)) for p in PROMPTS]
    check(folder, jobs, run(engine, jobs))
    outputs = run(engine, jobs)
    check(folder, jobs, outputs)
    for prompt, output in zip(PROMPTS, outputs):
        assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4


def without_prefix_cache(folder):
    assert hit_blocks(all_at_once(folder, enable_prefix_caching=False)) == 0


def small_pool(folder):
    engine = all_at_once(folder, num_kv_blocks=20)
    assert preemptions(engine) > 5


def small_pool_small_budget(folder):
    for size, caching in ((7, True), (16, False)):
        assert preemptions(all_at_once(folder, num_kv_blocks=20, max_num_batched_tokens=size,
                                       enable_prefix_caching=caching)) > 0


def by_priority(folder):
    """The urgent ones come last, so they push out those who run, some of them in the very step in which those were
    scheduled."""
    engine = make_engine(folder, num_kv_blocks=20, max_num_batched_tokens=16, scheduling_policy="priority")
    jobs = [(p, greedy(N), -i % 5) for i, p in enumerate(PROMPTS)]
    check(folder, jobs, run(engine, jobs, arrivals=[2 * i for i in range(len(jobs))]))
    assert preemptions(engine) > 0


def long_prefill_threshold(folder):
    assert chunks(all_at_once(folder, long_prefill_token_threshold=3)) > 0


def without_chunking(folder):
    engine = all_at_once(folder, enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    assert chunks(engine) == 0


WAYS = {f.__name__: f for f in (one_at_a_time, all_at_once, shuffled, staggered, served_twice, without_prefix_cache,
                                small_pool, small_pool_small_budget, by_priority, long_prefill_threshold,
                                without_chunking)}
WAYS |= {f"budget_{b}": budget(b) for b in (1, 2, 3, 5, 7, 16, 64)}
WAYS |= {f"block_size_{b}": block_size(b) for b in (1, 2, 3, 5, 8, 16, 32)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TOYS)
def test_grid(name, way):
    WAYS[way](toy(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_product_of_options(name):
    """Budget x block size x prefix cache, over a pool that is too small for all."""
    jobs = [(p, greedy(N)) for p in PROMPTS]
    for tokens, size, caching in itertools.product((2, 5, 7, 16, 64), (1, 2, 4, 7, 16), (True, False)):
        engine = make_engine(toy(name), max_num_batched_tokens=tokens, block_size=size,
                             num_kv_blocks=1 + max(80 // size, 4), enable_prefix_caching=caching)
        check(toy(name), jobs, run(engine, jobs))


@pytest.mark.parametrize("value", [float("nan"), 1e30])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_poisoned_pool(size, value):
    """No slot beyond a sequence's length is read: prompts of 1 … 2 blocks + 1 tokens, alone and together, over NaN and
    over 1e30."""
    prompts = [prompts_of(1, seed=n, low=n, high=n)[0] for n in range(1, 2 * size + 2)]
    jobs = [(p, greedy(2 * size + 2)) for p in prompts]
    for caching in (True, False):
        engine = make_engine(toy(), value, block_size=size, enable_prefix_caching=caching)
        for job in jobs:
            check(toy(), [job], run(engine, [job]))
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        poison(engine, value)
        check(toy(), jobs, run(engine, jobs))


def test_long_contexts_and_many_requests():
    """300 positions are past what llama3's rope scaling and a chunk's mask get right by luck; 40 requests at once."""
    folder = toy("llama3")
    prompts = prompts_of(36, seed=3) + prompts_of(4, seed=4, low=250, high=330)
    jobs = [(p, greedy(12)) for p in prompts]
    check(folder, jobs, run(make_engine(folder, block_size=16, max_num_batched_tokens=50), jobs))


# -- Sampling with a seed ---------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=N, ignore_eos=True)


def seeded_ids(jobs=None, at=0, **options):
    """The ids of job `at`; the others are its neighbours."""
    return ids_of(run(make_engine(toy(), **options), jobs or [(PROMPTS[8], SEEDED)]))[at]


def test_a_seeded_draw_depends_on_seed_and_index_alone():
    alone = seeded_ids()
    assert len(set(alone)) > 8 and alone != hf_greedy(toy(), [PROMPTS[8]], N)[0]
    free = SamplingParams(temperature=1.3, max_tokens=N, ignore_eos=True)                  # neighbours without a seed
    mixed = [(p, params) for p, params in zip(PROMPTS[:3], (free, greedy(N), free))]
    job = (PROMPTS[8], SEEDED)
    for at in range(4):
        assert seeded_ids(mixed[:at] + [job] + mixed[at:], at) == alone
    for tokens in (1, 2, 3, 5, 7, 16):
        assert seeded_ids(max_num_batched_tokens=tokens) == alone
    for size in (1, 3, 16):
        assert seeded_ids(block_size=size) == alone
    assert seeded_ids(mixed * 3 + [job], 9, num_kv_blocks=20) == alone
    twice = make_engine(toy())
    # the second time from the prefix cache
    assert ids_of([run(twice, [job])[0], run(twice, [job])[0]]) == [alone, alone]


def test_seeds_differ_and_unseeded_requests_do_too():
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=N) for s in range(1, 21)]
    assert len({tuple(ids) for ids in ids_of(run(make_engine(toy()), [(PROMPTS[0], p) for p in params]))}) > 15
    engine, free = make_engine(toy()), SamplingParams(temperature=1.0, max_tokens=N)
    first, second = ids_of(run(engine, [(PROMPTS[0], free)] * 2))
    assert first != second
    # But two engines of the same --seed say the same: a run can be repeated.
    assert ids_of(run(make_engine(toy()), [(PROMPTS[0], free)] * 2)) == [first, second]
    assert ids_of(run(make_engine(toy(), seed=1), [(PROMPTS[0], free)] * 2)) != [first, second]


def test_n_answers_of_one_seed():
    """n = 2 with a seed: the first answer is the one of n = 1, the second another, and both can be had again."""
    with LLM(str(toy()), num_kv_blocks=100, block_size=4, dtype="float32") as llm:
        two = SamplingParams(n=2, temperature=0.8, seed=42, max_tokens=N, ignore_eos=True)
        first, second = (o.token_ids for o in llm.generate([PROMPTS[8]], two)[0].outputs)
        assert first == seeded_ids() != second
        assert [o.token_ids for o in llm.generate([PROMPTS[8]], two)[0].outputs] == [first, second]


# -- Preemption by recompute (抢占后重计算) at every point of a request's life -----------------------------------------------

@pytest.mark.parametrize("params", [greedy(13),
                                    SamplingParams(temperature=1.0, seed=5, max_tokens=13, ignore_eos=True)],
                         ids=["greedy", "seeded"])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_at_each_output_index(params, caching):
    """Prompts of 5 to 8 tokens and block size 4: the total length at the preemption takes every remainder. The text
    that was streamed is not streamed again, and each token is counted once."""
    folder = toys.copy_of(toy())
    toys.byte_tokenizer().save(str(folder / "tokenizer.json"))
    for prompt in (PREFIX[:length] for length in (5, 6, 7, 8)):
        (want,) = run(make_engine(folder), [(prompt, params)])
        if params.temperature == 0:
            assert_same_ids(toy(), [prompt], ids_of([want]))
        for index in range(1, 13):
            engine, stream = make_engine(folder, enable_prefix_caching=caching), []

            def each_step(step, outputs):
                stream.extend(o.outputs[0].delta for o in outputs)
                if len(outputs[0].outputs[0].token_ids) == index:
                    preempt(engine, "0-0")
            (got,) = run(engine, [(prompt, params)], each_step=each_step)
            assert got.metrics.num_preemptions == 1 and len(got.metrics.token_times) == 13
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
            assert "".join(stream) == got.outputs[0].text == want.outputs[0].text != ""


def test_preemption_within_a_prompt_and_again_and_again():
    """After each chunk of its prompt, then after every second step of its life."""
    prompt = PROMPTS[8]
    for after in (1, 2, 3):
        engine = make_engine(toy(), max_num_batched_tokens=4)
        once = lambda step, outputs: preempt(engine, "0-0") if step + 1 == after else None
        (got,) = run(engine, [(prompt, greedy(N))], each_step=once)
        check(toy(), [(prompt, greedy(N))], [got])
    for caching in (True, False):
        engine = make_engine(toy(), enable_prefix_caching=caching)
        often = lambda step, outputs: preempt(engine, "0-0") if step % 2 and engine.has_unfinished_requests() else None
        (got,) = run(engine, [(prompt, greedy(N))], each_step=often)
        check(toy(), [(prompt, greedy(N))], [got])
        assert got.metrics.num_preemptions == N // 2 - 1


# -- KV cache and prefix cache ----------------------------------------------------------------------------------------

def test_a_reused_block_loses_its_old_name():
    """The fourth prompt must not find [3, 4] as the third computed it: there these tokens stood at position 0."""
    engine = make_engine(toy(), block_size=2, num_kv_blocks=4)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 5], [3, 4, 5], [1, 2, 3, 4, 5]):
        (output,) = run(engine, [(prompt, greedy(1))])
        check(toy(), [(prompt, greedy(1))], [output])
    assert output.num_cached_tokens <= 2


@pytest.mark.parametrize("nb", [3, 4, 5])
def test_few_contents_in_a_tiny_pool(nb):
    """Runs of eight prompts made of four two-token contents and a tail, one after another: blocks are found, evicted,
    found again."""
    contents, rng, hits = [[1, 2], [3, 4], [1, 4], [3, 2]], random.Random(nb), 0
    engine = make_engine(toy(), block_size=2, num_kv_blocks=nb + 1)
    for _ in range(100):
        prompts = [sum(rng.choices(contents, k=rng.randint(1, nb - 1)), []) + [rng.choice([5, 6])] for _ in range(8)]
        jobs = [(p, greedy(1)) for p in prompts]
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
        outputs = [run(engine, [job])[0] for job in jobs]
        check(toy(), jobs, outputs)
        hits += sum(o.num_cached_tokens for o in outputs)
    assert hits > 400


@pytest.mark.parametrize("length", [3, 4, 5, 8, 12])
def test_whole_prompt_cached(length):
    """The last token is computed even if all blocks are there: someone has to give the logits."""
    engine, job = make_engine(toy()), (PREFIX[:length], greedy(6))
    for cached in (0, (length - 1) // 4 * 4):
        (output,) = run(engine, [job])
        check(toy(), [job], [output])
        assert output.num_cached_tokens == cached <= length - 1


def test_positions_after_a_hit():
    """13 tokens after any beginning of them: wherever the cached part ends, the rest stands at its own positions."""
    for k in range(1, 13):
        engine = make_engine(toy())
        for prompt in (PREFIX[:k], PREFIX):
            check(toy(), [(prompt, greedy(N))], run(engine, [(prompt, greedy(N))]))


@pytest.mark.parametrize("tokens", [6, 7, 12, 25, 64])
def test_common_prefix_in_one_step(tokens):
    """Three prompts that begin alike, submitted together, some of them cut into chunks: a name is good in the step that
    fills it."""
    p = PREFIX[:12]
    engine = make_engine(toy(), max_num_batched_tokens=tokens)
    jobs = [(prompt, greedy(N)) for prompt in (p, p, p + [7, 7, 3])]
    check(toy(), jobs, run(engine, jobs))
    assert hit_blocks(engine) > 0


def test_a_name_without_its_content():
    """A step gives V a chunk, then preempts V in favour of U, more urgent: the blocks of that chunk are named and never
    written. They must not be found when V comes back (it may find the six that were written), or it would read NaN."""
    engine = make_engine(toy(), num_kv_blocks=10, max_num_batched_tokens=11, long_prefill_token_threshold=8,
                         scheduling_policy="priority")
    jobs = [(prompts_of(1, low=33, high=33)[0], greedy(3), 5), (PREFIX[:3], greedy(4), 0)]             # V, U
    check(toy(), jobs, run(engine, jobs, arrivals=[0, 1]))
    assert [(record.step, record.preempted) for record in engine.records if record.preempted] == [(3, ["0-0"])]
    (back,) = [r for record in engine.records[4:] for r in record.requests if r.request_id == "0-0" and r.hit_blocks]
    assert back.hit_blocks == 6


@pytest.mark.parametrize("reset", [False, True])
def test_a_newcomer_takes_no_block_in_use(reset):
    engine = make_engine(toy(), num_kv_blocks=17)
    if reset:
        run(engine, [(PREFIX, greedy(N))])
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        poison(engine)
    twins, third = [(PREFIX[:8], greedy(20))] * 2, (PROMPTS[3], greedy(20))
    check(toy(), twins + [third], run(engine, twins + [third], arrivals=[0, 0, 2]))


def ends_on_the_last_token():
    """(name, SamplingParams, finish reason) for a table that says abcdef and then EOS."""
    greedy_until = lambda n, **more: SamplingParams(temperature=0.0, max_tokens=n, **more)
    yield from ((f"length {n}", greedy_until(n), "length") for n in (1, 3, 4, 5))
    yield "EOS on the last token", greedy_until(7), "stop"
    yield "stop string on the last token", greedy_until(4, stop="cd"), "stop"
    yield "stop string before the last", greedy_until(6, stop="cd"), "stop"
    yield "stop id on the last token", greedy_until(3, stop_token_ids=[ord("c")]), "stop"


def test_the_pool_is_whole_after_every_kind_of_end():
    """100 times each, 900 in all on one engine; run() looks at every block after each."""
    engine = make_engine(table_checkpoint(chain([BOS, *b"abcdef", EOS]), eos=EOS), num_kv_blocks=6)
    for name, params, reason in ends_on_the_last_token():
        for _ in range(100):
            (output,) = run(engine, [([BOS], params)])
            assert output.outputs[0].finish_reason == reason, name
    for i in range(100):                                   # aborted after two tokens
        engine.add_request(f"a{i}", [BOS], SamplingParams(temperature=0.0, max_tokens=5))
        engine.step(), engine.step()
        engine.abort_request(f"a{i}")
        check_drained(engine)
    assert engine.scheduler.kv_cache_manager.num_free_blocks == 5


# -- The scheduler, seen from outside ---------------------------------------------------------------------------------

def test_request_larger_than_the_pool():
    """Refused at once and alone; who comes behind it is served."""
    engine = make_engine(toy(), num_kv_blocks=9, max_model_len=64)
    with pytest.raises(RequestRefused, match=r"40 tokens .* 32.*--num-kv-blocks"):
        engine.add_request("large", prompts_of(1, low=40, high=40)[0], greedy(4))
    jobs = [(p, greedy(4)) for p in prompts_of(2, low=4, high=4)]
    check(toy(), jobs, run(engine, jobs))
    with LLM(str(toy()), num_kv_blocks=9, block_size=4, max_model_len=64, dtype="float32") as llm:
        with pytest.warns(UserWarning, match="--num-kv-blocks"):
            large, *small = llm.generate([prompts_of(1, low=40, high=40)[0]] + [job[0] for job in jobs], greedy(4))
        assert large.outputs[0].finish_reason == "error" and "--num-kv-blocks" in large.error
        check(toy(), jobs, small)


def test_fits_at_prefill_but_cannot_grow():
    """Two blocks of four: a prompt of 8 can't have a single token and is refused; one of 7 gets the one that fits, then
    ends."""
    engine = make_engine(toy(), num_kv_blocks=3)
    with pytest.raises(RequestRefused, match="whole KV pool"):
        engine.add_request("x", PREFIX[:8], greedy(4))
    for length, n in ((7, 1), (5, 3), (3, 4)):
        (output,) = run(engine, [(PREFIX[:length], greedy(4))])
        assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == n
        assert_same_ids(toy(), [PREFIX[:length]], ids_of([output]))


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 4, "max_num_seqs": 1}, {"max_num_batched_tokens": 1},
                                     {"max_num_seqs": 1}],
                         ids=str)
def test_prompts_longer_than_the_budget(options):
    jobs = [(prompts_of(1, seed=n, low=n, high=n)[0], greedy(8)) for n in (3, 4, 5, 8, 9, 41)]
    check(toy(), jobs, run(make_engine(toy(), **options), jobs))


def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="--max-num-batched-tokens 4 is below --max-num-seqs 8"):
        make_engine(toy(), max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="--no-enable-chunked-prefill"):
        make_engine(toy(), max_num_batched_tokens=32, max_model_len=64, enable_chunked_prefill=False)


def test_no_token_from_a_partial_chunk():
    """11 tokens at 4 a step: the first token comes from the third step."""
    engine, seen = make_engine(toy(), max_num_batched_tokens=4), []
    jobs = [(PREFIX[:11], greedy(5))]
    look = lambda step, outputs: seen.append([o.outputs[0].token_ids for o in outputs])
    (output,) = run(engine, jobs, each_step=look)
    check(toy(), jobs, [output])
    ids = output.outputs[0].token_ids
    assert seen == [[], []] + [[ids[:n]] for n in range(1, 6)]
    assert len(output.prompt_token_ids) == 11 and len(output.metrics.token_times) == 5


def test_a_resumed_request_finds_its_blocks():
    """Six prompts, two of them equal, in a pool for a third of them: preempted, resumed, found in the cache."""
    engine = make_engine(toy(), num_kv_blocks=11, max_num_batched_tokens=16, max_num_seqs=6)
    prompts = prompts_of(5, seed=11, low=8, high=8)
    jobs = [(p, greedy(16)) for p in prompts + [prompts[0]]]
    check(toy(), jobs, run(engine, jobs))
    assert preemptions(engine) > 0 and hit_blocks(engine) > 0


@pytest.mark.parametrize("caching", [True, False])
def test_no_thrashing(caching):
    """Three requests that each need ten of twelve blocks: little is computed twice, and nobody is preempted over and
    over."""
    engine = make_engine(toy(), num_kv_blocks=13, max_num_batched_tokens=4, max_num_seqs=3,
                         enable_prefix_caching=caching)
    jobs = [(p, greedy(16)) for p in prompts_of(3, low=24, high=24)]
    outputs = run(engine, jobs)
    check(toy(), jobs, outputs)
    assert max(o.metrics.num_preemptions for o in outputs) <= 3
    assert sum(record.used for record in engine.records) <= 3 * 3 * (24 + 15)


def test_arrival_order_is_first_token_order():
    """A … F in a pool for two of them: preempted requests come back before new ones, so first tokens come in order of
    arrival."""
    engine, firsts = make_engine(toy(), num_kv_blocks=10, max_num_batched_tokens=16), []

    def each_step(step, outputs):
        firsts.extend(o.request_id for o in outputs if len(o.outputs[0].token_ids) == 1)
    jobs = [(p, greedy(14)) for p in prompts_of(6, seed=2, low=9, high=14)]
    check(toy(), jobs, run(engine, jobs, each_step=each_step))
    assert firsts == [f"0-{i}" for i in range(6)] and preemptions(engine) > 0
    seen, out = set(), set()                               # who was ever served; who is preempted and not yet back
    for record in engine.records:
        for r in record.requests:
            assert r.request_id in seen or not out, f"{r.request_id} overtakes {out}"
            out.discard(r.request_id)
            seen.add(r.request_id)
        out |= set(record.preempted)


# state → is the request x in it?  Its prompt has 11 tokens; 2 a step are left for it beside two neighbours that decode
REACHED = {
    "waiting": lambda x: x.num_computed_tokens == 0,
    "within its prompt": lambda x: x.num_computed_tokens == 2,
    "before its last chunk": lambda x: x.num_computed_tokens == 10,
    "decoding": lambda x: len(x.output_token_ids) == 3,
    "preempted": lambda x: len(x.output_token_ids) == 3,
    "finished": lambda x: x.finish_reason is not None,
}


@pytest.mark.parametrize("state", [*REACHED, "unknown"])
def test_abort(state):
    """In any state, twice: no output afterwards, the neighbours' text unchanged, the pool whole, the id free for
    another."""
    neighbours = prompts_of(2, seed=5, low=2, high=2)
    engine = make_engine(toy(), max_num_batched_tokens=4, max_num_seqs=3)
    for i, p in enumerate(neighbours):
        engine.add_request(f"n{i}", p, greedy(30))
    while not all(len(engine.scheduler.requests[f"n{i}"].output_token_ids) for i in range(2)):
        engine.step()
    if state != "unknown":
        engine.add_request("x", PREFIX[:11], greedy(5))
        x = engine.scheduler.requests["x"]
        while not REACHED[state](x):
            assert engine.has_unfinished_requests()
            engine.step()
    if state == "preempted":
        preempt(engine, "x")
    assert ("x" in engine.scheduler.requests) == (state not in ("finished", "unknown"))
    engine.abort_request("x")
    engine.abort_request("x")
    results = {}
    for step in range(100):
        if step == 3:
            engine.add_request("x", PREFIX[:5], greedy(6))             # the same id for another request
        for o in engine.step():
            assert step >= 3 or o.request_id != "x", "a token after the abort"
            results[o.request_id] = o
        if not engine.has_unfinished_requests():
            break
    check_drained(engine)
    check(toy(), [(p, greedy(30)) for p in neighbours] + [(PREFIX[:5], greedy(6))],
          [results["n0"], results["n1"], results["x"]])


def test_a_living_id_is_not_given_twice():
    engine = make_engine(toy())
    engine.add_request("x", PREFIX, greedy(4))
    with pytest.raises(RequestRefused, match="'x' is already in use"):
        engine.add_request("x", PREFIX, greedy(4))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    check(toy(), [(PREFIX, greedy(4))], [output])


def test_length_limit():
    """--max-model-len 16 bounds prompt + output, the last token counted; a prompt of 16 leaves no room and is
    refused."""
    engine = make_engine(toy(), max_model_len=16)
    prompt = prompts_of(1, low=17, high=17)[0]
    for length, n in ((14, 2), (15, 1)):
        (output,) = run(engine, [(prompt[:length], greedy(10))])
        assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == n
        assert_same_ids(toy(), [prompt[:length]], ids_of([output]))
    for length in (16, 17):
        with pytest.raises(RequestRefused, match=rf"{length} tokens .* 16.*--max-model-len"):
            engine.add_request("x", prompt[:length], greedy(10))
    check(toy(), [(PREFIX, greedy(3))], run(engine, [(PREFIX, greedy(3))]))
    with pytest.raises(ValueError, match="--max-model-len 513 is more than the 512 positions"):
        make_engine(toy(), max_model_len=513)


def test_bad_requests_are_refused_alone():
    """Ids outside the vocabulary, no tokens, nonsense: refused before anything is kept, while a neighbour is served."""
    engine = make_engine(toy())
    engine.add_request("good", PREFIX, greedy(5))
    for prompt in ([], [96], [-1], [2**63], [True], ["a"], [1.0], None, {"prompt": "a", "prompt_token_ids": [1]},
                   "text without a tokenizer"):
        with pytest.raises(RequestRefused):
            engine.add_request("bad", prompt, greedy(5))
    with pytest.raises(RequestRefused, match="stop_token_ids: id 96"):
        engine.add_request("bad", [1], greedy(5, stop_token_ids=[96]))
    assert list(engine.scheduler.requests) == ["good"]
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    check(toy(), [(PREFIX, greedy(5))], [output])
    check(toy(), [([95], greedy(5))], run(engine, [([95], greedy(5))]))            # the last id of the vocabulary


# -- Numerics ---------------------------------------------------------------------------------------------------------

def test_bf16_flips_only_near_ties():
    """In bf16 other shapes round differently. Alone and in a batch the text may part only where the two tokens' logits
    are close: within four steps of bf16 at the logits' own size (2^-8 of the largest)."""
    folder, jobs = toy(), [(p, greedy(N)) for p in prompts_of(12, seed=6)]
    alone = [run(make_engine(folder, dtype="bfloat16"), [job])[0].outputs[0].token_ids for job in jobs]
    together = ids_of(run(make_engine(folder, dtype="bfloat16"), jobs))
    for (prompt, _), a, b in zip(jobs, alone, together):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if at is not None:
            logits = toys.hf_logits(folder, prompt + a[:at])[-1]
            assert abs(logits[a[at]] - logits[b[at]]) < 2 ** -6 * logits.abs().max()


def test_same_again():
    """48 requests, five times on one engine. Without the prefix cache a run repeats bit for bit, log-probabilities
    included; with it, later runs compute other shapes, so there the ids are the promise, and the log-probabilities to
    rounding."""
    drawn = lambda seed: SamplingParams(temperature=1.0, seed=seed, max_tokens=N, logprobs=2)
    params = [greedy(N, logprobs=2) if i % 2 else drawn(i) for i in range(48)]
    jobs = list(zip(prompts_of(48, seed=8), params))
    for caching in (False, True):
        engine, runs = make_engine(toy(), num_kv_blocks=301, enable_prefix_caching=caching,
                                   max_num_batched_tokens=100), []
        for _ in range(5):
            answers = [o.outputs[0] for o in run(engine, jobs)]
            logprobs = [[entry[t].logprob for t, entry in zip(a.token_ids, a.logprobs)] for a in answers]
            runs.append(([a.token_ids for a in answers], torch.tensor(logprobs)))
        for ids, logprobs in runs[1:]:
            assert ids == runs[0][0]
            torch.testing.assert_close(logprobs, runs[0][1], rtol=0, atol=1e-4 if caching else 0)


# -- Everything at once -----------------------------------------------------------------------------------------------

CONTENTS = [[1, 2], [3, 4], [1, 4]]
prompt_of_contents = st.builds(lambda parts, tail: sum(parts, []) + tail,
                               st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=6),
                               st.sampled_from([[], [5]]))


@st.composite
def scenarios(draw):
    """An engine's options, and requests: (prompt, output tokens, priority, arrival step, step of an abort or None)."""
    size, tokens = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64]))
    pool = -(-draw(st.integers(22, 60)) // size)           # a prompt of 13 and 8 tokens fit; more than one may not
    options = {"block_size": size, "max_num_batched_tokens": tokens, "num_kv_blocks": 1 + pool,
               "max_num_seqs": draw(st.integers(1, min(tokens, 6))), "enable_prefix_caching": draw(st.booleans()),
               "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
               "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 2, 5]))}
    request = st.tuples(prompt_of_contents, st.integers(1, 8), st.integers(0, 2), st.integers(0, 12),
                        st.one_of(st.none(), st.none(), st.integers(1, 20)))
    return options, draw(st.lists(request, min_size=1, max_size=8))


def play(scenario):
    options, requests = scenario
    engine = make_engine(toy(), **options)
    aborts = {f"0-{i}": arrival + abort for i, (*_, arrival, abort) in enumerate(requests) if abort is not None}
    got = {}

    def each_step(step, outputs):
        for o in outputs:
            assert o.request_id not in aborts or aborts[o.request_id] >= step, "a token after the abort"
            got[o.request_id] = o.outputs[0]
        for request_id, at in aborts.items():
            if at == step:
                engine.abort_request(request_id)
    jobs = [(prompt, greedy(n), priority) for prompt, n, priority, *_ in requests]
    run(engine, jobs, arrivals=[arrival for *_, arrival, _ in requests], each_step=each_step)
    for i, (prompt, params, _) in enumerate(jobs):
        ids = got[f"0-{i}"].token_ids if f"0-{i}" in got else []
        assert len(ids) == params.max_tokens or f"0-{i}" in aborts
        assert ids == hf_greedy(toy(), [prompt], 8)[0][:len(ids)]


QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
         "database": None}


@settings(max_examples=100, derandomize=True, **QUIET)
@given(scenarios())
def test_any_scenario(scenario):
    play(scenario)


@pytest.mark.slow
@settings(max_examples=600, **QUIET)
@given(scenarios())
def test_many_scenarios(scenario):
    play(scenario)
