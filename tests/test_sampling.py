"""Sampling (sampling.py): from logits to a token, and what may change it."""
import math
from fractions import Fraction

import pytest
import toys
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import sampling
from sampling import likeliest, sample, top_logprobs, uniform
from nano_serve import LLM, SamplingParams
from request import Request

INF = math.inf


def request(prompt=(0,), outputs=(), eos=(), **params):
    """A Request that has generated `outputs` so far."""
    params = {"max_tokens": None, "seed": 0, **params}
    r = Request("r", prompt, SamplingParams(**params), eos_token_ids=eos)
    for token_id in outputs:
        r.append_output_token_id(token_id)
    return r


def share(logits, monkeypatch, n=1024, **params):
    """The probabilities [V] with which ids are drawn from one row of logits, found by laying n evenly spaced uniform numbers
    through the draw: each is right to 1/n."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: (seed + 0.5) / n)
    drawn = sample(torch.tensor(logits).float().expand(n, -1), [request(seed=i, **params) for i in range(n)])
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / n            # [V]


# -- The distribution -----------------------------------------------------------------------------------------------------

CUTS = [dict(), dict(temperature=0.3), dict(temperature=3.0), dict(top_k=3), dict(top_p=0.7), dict(min_p=0.2), dict(top_p=0.01),
        dict(top_k=5, top_p=0.6), dict(top_p=0.8, min_p=0.1, temperature=0.7), dict(top_k=4, top_p=0.9, min_p=0.3, temperature=2.0),
        dict(min_p=1.0), dict(top_k=1), dict(top_p=1.0, top_k=-1), dict(top_k=4, top_p=0.5, temperature=1.5)]


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_the_distribution_is_that_of_the_warpers_of_transformers(params, monkeypatch):
    """In vLLM's order: temperature, min_p, top_k, top_p."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    for seed in range(3):
        logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 2
        want = TemperatureLogitsWarper(float(params.get("temperature", 1.0)))(None, logits)
        if "min_p" in params:
            want = MinPLogitsWarper(params["min_p"])(None, want)
        if params.get("top_k", 0) > 0:
            want = TopKLogitsWarper(params["top_k"])(None, want)
        if params.get("top_p", 1.0) < 1:
            want = TopPLogitsWarper(params["top_p"])(None, want)
        got, want = share(logits[0].tolist(), monkeypatch, **params), want.softmax(-1)[0]
        assert not (got[want == 0]).any() and got[want > 1 / 1024].all()
        torch.testing.assert_close(got, want, atol=2 / 1024, rtol=0)


def test_uniform_numbers_are_uniform_and_independent():
    """Chi-square over 16 bins, for one seed's sequence, for many seeds' first numbers, and for neighbours as pairs (4 x 4 bins)."""
    sequences = {"one seed": [uniform(42, i) for i in range(8000)], "many seeds": [uniform(i, 0) for i in range(8000)],
                 "far seeds": [uniform(-2**63 + i, 3) for i in range(8000)]}
    for name, values in sequences.items():
        assert all(0 <= v < 1 for v in values)
        assert chi_square([int(v * 16) for v in values], [1 / 16] * 16) < LIMIT[15], name
        pairs = [int(a * 4) * 4 + int(b * 4) for a, b in zip(values[::2], values[1::2])]
        assert chi_square(pairs, [1 / 16] * 16) < LIMIT[15], name
    assert len({uniform(s, i) for s in range(50) for i in range(50)}) == 2500


LIMIT = {2: 13.8, 3: 16.3, 15: 37.7}      # chi-square's 0.999 quantile by degrees of freedom


def chi_square(drawn, probabilities):
    n = len(drawn)
    return sum((drawn.count(i) - n * p) ** 2 / (n * p) for i, p in enumerate(probabilities) if p > 0)


@pytest.fixture(scope="module")
def dice():
    """A checkpoint that throws four-sided dice: 65 66 67 68 with probabilities 0.4 0.3 0.2 0.1, whatever came before."""
    row = {i: -60.0 for i in range(259)} | {65 + i: math.log(p) for i, p in enumerate((0.4, 0.3, 0.2, 0.1))}
    with LLM(str(toys.table_checkpoint({t: row for t in (65, 66, 67, 68)})), num_kv_blocks=200) as llm:
        yield llm


@pytest.mark.parametrize("params, probabilities", [
    ({}, (0.4, 0.3, 0.2, 0.1)), ({"temperature": 0.5}, (16 / 30, 9 / 30, 4 / 30, 1 / 30)), ({"top_k": 3}, (4 / 9, 3 / 9, 2 / 9, 0)),
    ({"top_p": 0.71}, (4 / 9, 3 / 9, 2 / 9, 0)), ({"top_p": 0.69}, (4 / 7, 3 / 7, 0, 0)), ({"min_p": 0.3}, (4 / 9, 3 / 9, 2 / 9, 0)),
    ({"top_k": 3, "top_p": 0.75}, (4 / 7, 3 / 7, 0, 0))])
def test_what_the_engine_draws_has_the_distribution_asked_for(dice, params, probabilities):
    """Five requests of 300 tokens. The last case: top_p looks at what top_k has left, 4/9 + 3/9 = 0.78 of it."""
    drawn = dice.generate([[65]] * 5, [SamplingParams(seed=s, max_tokens=300, **params) for s in range(5)])
    drawn = [t - 65 for output in drawn for t in output.outputs[0].token_ids]
    support = [p for p in probabilities if p]
    assert len(drawn) == 1500 and set(drawn) <= set(range(len(support)))
    assert chi_square(drawn, probabilities) < LIMIT.get(len(support) - 1, 13.8)


def exact_draw(logits, u, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The walk itself, token by token in fractions: likeliest first, of equals the lower id first."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: Fraction(math.exp((logits[i] - logits[order[0]]) / temperature)) for i in order}
    if 0 < top_k < len(logits):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    order = [i for i in order if weight[i] >= min_p]
    kept, mass, total = [], 0, sum(weight[i] for i in order)
    for i in order:
        if mass < Fraction(top_p) * total:
            kept.append(i)
            mass += weight[i]
    left = Fraction(u) * mass
    for i in kept:
        if left < weight[i]:
            return i
        left -= weight[i]


@pytest.mark.parametrize("V, buckets", [(7, 4096), (50, 4096), (50, 3), (3000, 4096), (3000, 1)])
def test_the_draw_is_that_of_exact_arithmetic(V, buckets, monkeypatch):
    """Whatever is cut and however finely the row is searched, with ties and with tokens that are banned."""
    monkeypatch.setattr(sampling, "BUCKETS", buckets)
    generator, cuts = torch.Generator().manual_seed(V), [c for c in CUTS if c.get("min_p", 0) < 1]
    for i, params in enumerate(cuts * (1 if V > 50 else 10)):
        row = torch.randn(V, generator=generator) * 3 if i % 2 else torch.randint(-4, 5, (V,), generator=generator).float()
        row[torch.randint(0, V, (V // 5,), generator=generator)] = -INF if i % 3 else -1e9
        if row.max() > -1e9:
            got = sample(row.expand(4, -1), [request(seed=100 * i + j, **params) for j in range(4)])
            assert got == [exact_draw(row.tolist(), uniform(100 * i + j, 0), **params) for j in range(4)], params


def test_cuts_that_cut_nothing_change_no_draw():
    """Whichever way a row goes, and beside which neighbours: the seed alone decides."""
    row = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    draw = lambda **params: sample(row.expand(60, -1), [request(seed=s, **params) for s in range(60)])
    plain = draw()
    assert len(set(plain)) > 50
    for params in (dict(top_p=1 - 1e-12), dict(top_k=4999), dict(top_k=5000), dict(min_p=1e-30), dict(top_k=4999, top_p=1 - 1e-12)):
        assert draw(**params) == plain, params
    mixed = sample(row.expand(120, -1), [request(seed=s // 2, **(dict(top_k=3, top_p=0.5) if s % 2 else {})) for s in range(120)])
    assert mixed[::2] == plain and [sample(row[None], [request(seed=s)])[0] for s in range(60)] == plain


@pytest.mark.parametrize("u", [0.0, 5e-324, 1 - 2 ** -53])
def test_no_uniform_number_walks_off_the_end(u, monkeypatch):
    """Sums are whole numbers, so u < 1 of them is below them: nothing rounds up to the end."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: u)
    for row in (torch.zeros(100_003), torch.linspace(0, 40, 999), torch.tensor([0.0, -INF, -INF]), torch.tensor([-1e30, 1e30])):
        for params in (dict(), dict(top_p=0.3), dict(top_p=5e-324), dict(min_p=0.5), dict(top_k=2, top_p=0.999)):
            (token_id,) = sample(row[None], [request(**params)])
            assert row[token_id] > -INF
            assert u or token_id == row.argmax()


# -- Edges -----------------------------------------------------------------------------------------------------------------

LOGITS = [0.5, 3.0, 1.0, 2.0, -1.0]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-10, 1e-6, 1e-4, 1e-2])
def test_a_temperature_near_zero_is_greedy(temperature):
    scaled = torch.tensor([LOGITS, [1e4 * x for x in LOGITS], [-1e4 * x for x in LOGITS]])
    assert sample(scaled, [request(temperature=temperature, seed=s) for s in range(3)]) == [1, 1, 4]


def test_greedy_and_sampled_rows_in_one_batch(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: 0.999999)
    rows = torch.tensor([LOGITS] * 4)
    assert sample(rows, [request(temperature=t) for t in (0, 1.0, 0, 1e-6)]) == [1, 4, 1, 1]


@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e300, 10 ** 400], ids=["1e10", "1e38", "1e300", "1e400"])
@pytest.mark.parametrize("min_tokens", [0, 1])
def test_a_huge_temperature_is_uniform(temperature, min_tokens, monkeypatch):
    """min_tokens takes token 1 away: minus infinity divided by whatever must stay that."""
    got = share(LOGITS, monkeypatch, n=1000, temperature=temperature, min_tokens=min_tokens, eos=[1])
    assert got.tolist() == pytest.approx([0.2] * 5 if not min_tokens else [0.25, 0, 0.25, 0.25, 0.25], abs=2e-3)


def test_top_k_off_one_and_beyond_the_vocabulary(monkeypatch):
    ks = (0, -1, 1, 5, 6, 10 ** 6, 10 ** 400)
    everything = share(LOGITS, monkeypatch)
    assert (everything > 0).all()
    for k in ks:
        got = share(LOGITS, monkeypatch, top_k=k)
        assert torch.equal(got, everything if k != 1 else torch.tensor([0., 1., 0., 0., 0.])), k
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: 0.999999)
    for temperature, rest in ((1.0, 4), (0, 1)):
        assert sample(torch.tensor([LOGITS] * 7), [request(top_k=k, temperature=temperature) for k in ks]) == [rest, rest, 1, rest, rest, rest, rest]
    with pytest.raises(ValueError, match="top_k.*-2"):
        SamplingParams(top_k=-2)


def test_of_equal_probabilities_the_lower_id_stays(monkeypatch):
    logits = [1.0, 2.0, 2.0, 1.0, 2.0, 2.0]
    kept = lambda **params: (share(logits, monkeypatch, n=512, **params) > 0).nonzero().flatten().tolist()
    assert all(kept(top_k=k) == [1, 2, 4, 5] for k in (1, 2, 3, 4)), "all that equal the k-th stay"
    assert kept(top_k=5) == [0, 1, 2, 3, 4, 5]
    assert kept(min_p=1.0) == [1, 2, 4, 5], "min_p counts likelihood, not rank: equals stay together"
    assert kept(top_p=1e-9) == [1] and kept(top_p=0.3) == [1, 2]
    assert sample(torch.tensor([logits]), [request(temperature=0)]) == [1]
    assert share([0.0] * 4, monkeypatch, n=512, top_p=0.5).tolist() == [0.5, 0.5, 0, 0], "mass just reached: the next is out"


def test_top_p_one_keeps_even_what_rounding_would_lose(monkeypatch):
    """100,000 equal tokens: in fp32 their probabilities don't sum to what their running sum says."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: 1 - 2 ** -53)
    assert sample(torch.zeros(1, 100_000), [request()]) == [99_999]
    row = torch.cat([torch.full((1,), 15.0), torch.zeros(99_999)])
    assert sample(row[None], [request()]) == [99_999]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.just(-INF), st.floats(-2.0 ** 90, 2.0 ** 90, width=32)), min_size=1, max_size=8).filter(lambda row: max(row) > -INF),
       st.floats(0, 1e40), st.integers(-1, 10), st.floats(1e-12, 1), st.floats(0, 1), st.floats(1e-6, 1e6), st.integers(0, 2**62))
def test_any_finite_logits_give_a_token_of_finite_logit(row, temperature, top_k, top_p, min_p, repetition_penalty, seed):
    r = request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, presence_penalty=2.0, outputs=[0])
    (token_id,) = sample(torch.tensor([row]), [r])
    assert row[token_id] > -INF


# -- Penalties -------------------------------------------------------------------------------------------------------------

def adjusted(logits, **kwargs):
    row = torch.tensor(logits)
    sampling.adjust_logits(row, request(**kwargs))
    return row.tolist()


def test_penalties_by_hand():
    """Prompt 0 0 3, output 1 1 4: repetition sees 0 1 3 4, divides what is positive and multiplies what is negative; presence takes
    off once and frequency once a time, for 1 and 4 only."""
    logits, prompt, outputs = [2.0, 2.0, 2.0, -1.0, 0.0], [0, 0, 3], [1, 1, 4]
    assert adjusted(logits, prompt=prompt, outputs=outputs, repetition_penalty=2.0) == [1.0, 1.0, 2.0, -2.0, 0.0]
    assert adjusted(logits, prompt=prompt, outputs=outputs, repetition_penalty=0.5) == [4.0, 4.0, 2.0, -0.5, 0.0]
    assert adjusted(logits, prompt=prompt, outputs=outputs, presence_penalty=0.5) == [2.0, 1.5, 2.0, -1.0, -0.5]
    assert adjusted(logits, prompt=prompt, outputs=outputs, frequency_penalty=0.5) == [2.0, 1.0, 2.0, -1.0, -0.5]
    assert adjusted(logits, prompt=prompt, outputs=outputs, presence_penalty=-2, frequency_penalty=1.0) == [2.0, 2.0, 2.0, -1.0, 1.0]
    assert adjusted(logits, prompt=prompt, outputs=outputs, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25
                    ) == [1.0, -0.5, 2.0, -2.0, -1.25]
    assert adjusted(logits, prompt=prompt, outputs=[], presence_penalty=2.0, frequency_penalty=2.0) == logits


def test_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor
    g = torch.Generator().manual_seed(0)
    for penalty in (0.5, 0.9, 1.0, 1.1, 2.0):
        logits, ids = torch.randn(20, generator=g), torch.randint(0, 20, (15,), generator=g)
        want = RepetitionPenaltyLogitsProcessor(penalty)(ids[None], logits[None].clone())[0]
        got = adjusted(logits.tolist(), prompt=ids[:9].tolist(), outputs=ids[9:].tolist(), repetition_penalty=penalty)
        torch.testing.assert_close(torch.tensor(got), want)


def test_a_neighbour_without_penalties_is_left_alone_and_so_are_the_raw_logits():
    logits = torch.tensor([LOGITS, LOGITS])
    assert sample(logits, [request(temperature=0, prompt=[1], repetition_penalty=100.0), request(temperature=0, prompt=[1])]) == [3, 1]
    assert logits.tolist() == [LOGITS, LOGITS]


@pytest.mark.parametrize("value", [10 ** 400, 1e300, 1e-300], ids=["huge", "large", "tiny"])
def test_an_absurd_penalty_costs_nobody_else(value):
    logits = torch.tensor([LOGITS, LOGITS])
    first, second = sample(logits, [request(temperature=0, prompt=[1], repetition_penalty=value), request(temperature=0)])
    assert first in (3, None) and second == 1


REPEATING = dict(temperature=0.0, ignore_eos=True, max_tokens=24)


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 14}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}, {"enable_prefix_caching": False}],
                         ids=["plain", "preempted", "chunked", "no prefix cache"])
def test_repetition_penalty_through_the_engine_equals_transformers(options):
    """Prompt and output count, however the request was cut up, preempted or found in the prefix cache."""
    folder, prompts = toys.toy("gqa"), toys.prompts_of(4, seed=3, low=8, high=12)
    prompts[3] = prompts[0] + [5, 5]
    want = [_hf_penalised(folder, tuple(p)) for p in prompts]
    engine = toys.make_engine(folder, **options)
    outputs = toys.run(engine, [(p, SamplingParams(repetition_penalty=1.3, **REPEATING)) for p in prompts])
    assert toys.ids_of(outputs) == want
    assert ("num_kv_blocks" in options) == any(o.metrics.num_preemptions for o in outputs)


_PENALISED = {}


def _hf_penalised(folder, prompt):
    if prompt not in _PENALISED:
        ids = torch.tensor([prompt])
        out = toys.hf_model(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
                                             repetition_penalty=1.3)
        _PENALISED[prompt] = out[0, len(prompt):].tolist()
    return _PENALISED[prompt]


@pytest.mark.parametrize("blocks", [200, 14])
def test_presence_and_frequency_through_the_engine(blocks):
    """Against a loop over transformers' logits that keeps its own counts; 14 blocks force preemptions, which must not lose them."""
    folder, prompts = toys.toy("gqa"), toys.prompts_of(4, seed=5, low=8, high=12)
    want = []
    for prompt in prompts:
        outputs = []
        for _ in range(16):
            logits = toys.hf_logits(folder, prompt + outputs)[-1].clone()
            for t in set(outputs):
                logits[t] -= 1.5 + 0.7 * outputs.count(t)
            outputs.append(int(logits.argmax()))
        want.append(outputs)
    engine = toys.make_engine(folder, num_kv_blocks=blocks)
    got = toys.run(engine, [(p, SamplingParams(temperature=0.0, max_tokens=16, presence_penalty=1.5, frequency_penalty=0.7)) for p in prompts])
    assert toys.ids_of(got) == want
    assert (blocks == 14) == any(o.metrics.num_preemptions for o in got)


def test_bans_and_biases_by_hand():
    """In vLLM's order: allowed ids, bad words, min_tokens, bias, penalties; a bias lifts no ban."""
    logits = [2.0, 2.0, 2.0, -1.0, 0.0]
    assert adjusted(logits, allowed_token_ids=[1, 3]) == [-INF, 2.0, -INF, -1.0, -INF]
    assert adjusted(logits, allowed_token_ids=[1, 3], logit_bias={0: 100, 1: 0.5}, prompt=[1], repetition_penalty=2.0) == [-INF, 1.25, -INF, -1.0, -INF]
    assert adjusted(logits, logit_bias={0: -3.0}, prompt=[0], repetition_penalty=2.0) == [-2.0, 2.0, 2.0, -1.0, 0.0]
    assert adjusted(logits, min_tokens=1, eos=[2], stop_token_ids=[1], logit_bias={2: 100}) == [2.0, -INF, -INF, -1.0, 0.0]
    raw = torch.tensor([logits])
    assert sample(raw, [request(temperature=0, logit_bias={3: 50})]) == [3] and raw.tolist() == [logits]
    assert sample(raw, [request(allowed_token_ids=[4], top_p=0.1)]) == [4]


def test_bad_words_are_banned_where_they_would_be_completed_as_in_transformers():
    from transformers import NoBadWordsLogitsProcessor
    generator = torch.Generator().manual_seed(0)
    draw = lambda n, high=4: torch.randint(0, high, (n,), generator=generator).tolist()
    for _ in range(200):
        words = [draw(1 + i) for i in range(3)]
        outputs = draw(draw(1, 7)[0])
        r = Request("r", [0], SamplingParams(), bad_words_token_ids=words)
        for token_id in outputs:
            r.append_output_token_id(token_id)
        row = torch.zeros(4)
        assert sampling.adjusts_logits(r)
        sampling.adjust_logits(row, r)
        want = NoBadWordsLogitsProcessor(words, eos_token_id=None)(torch.tensor([outputs], dtype=torch.long), torch.zeros(1, 4))[0]
        assert torch.equal(row, want), (words, outputs)


def test_after_min_tokens_the_end_may_come_though_penalties_are_on():
    logits, common = torch.tensor([[0.0, 9.0, 1.0]]), dict(temperature=0, min_tokens=1, presence_penalty=0.1, eos=[1])
    assert sample(logits, [request(**common)]) == [2] and sample(logits, [request(outputs=[2], **common)]) == [1]


# -- Seeds -----------------------------------------------------------------------------------------------------------------

def test_a_seeded_request_draws_the_same_wherever_it_runs():
    """Alone, first of four, last of four, among unseeded ones, as the first of n, in chunks, preempted."""
    folder, (prompt, *others) = toys.toy("gqa"), toys.prompts_of(4, seed=7, low=9, high=12)
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=20)
    noise = [(p, SamplingParams(temperature=1.0, max_tokens=20)) for p in others]
    engine = toys.make_engine(folder)
    (alone,) = toys.ids_of(toys.run(engine, [(prompt, seeded)]))
    assert toys.ids_of(toys.run(engine, [(prompt, seeded), *noise]))[0] == alone
    assert toys.ids_of(toys.run(engine, [*noise, (prompt, seeded)]))[-1] == alone
    assert toys.ids_of(toys.run(engine, [*noise, (prompt, seeded)], arrivals=[0, 2, 5, 9]))[-1] == alone
    small = toys.make_engine(folder, max_num_batched_tokens=4, max_num_seqs=4)
    assert toys.ids_of(toys.run(small, [*noise, (prompt, seeded)]))[-1] == alone
    tight = toys.make_engine(folder, num_kv_blocks=13)
    outputs = toys.run(tight, [*noise, (prompt, seeded)])
    assert outputs[-1].metrics.num_preemptions > 0 and outputs[-1].outputs[0].token_ids == alone
    with LLM(str(folder), num_kv_blocks=50) as llm:
        (both,) = llm.generate([prompt], SamplingParams(temperature=0.8, seed=42, max_tokens=20, n=2))
        assert both.outputs[0].token_ids == alone != both.outputs[1].token_ids


def test_different_seeds_and_no_seed():
    folder, prompt = toys.toy("gqa"), [1, 2, 3]
    draw = lambda engine, seeds: toys.ids_of(toys.run(engine, [(prompt, SamplingParams(seed=s, max_tokens=12)) for s in seeds]))
    engine = toys.make_engine(folder)
    assert len(set(map(tuple, draw(engine, range(1, 21))))) > 15
    first, second = draw(engine, [None, None])
    assert first != second, "two requests without a seed are two draws"
    assert draw(toys.make_engine(folder, seed=7), [None, None]) == draw(toys.make_engine(folder, seed=7), [None, None])
    assert draw(toys.make_engine(folder, seed=7), [None]) != draw(toys.make_engine(folder, seed=8), [None])


# -- Ends --------------------------------------------------------------------------------------------------------------------

def test_eos_sets_from_both_files_with_ignore_eos_min_tokens_and_stop_ids():
    """70 leads to 7, which ends by config.json; 90 to 9, which ends by generation_config.json."""
    folder = toys.table_checkpoint({70: {7: 20.0, 80: 10.0}, 90: {9: 20.0, 80: 10.0}, 80: {7: 20.0, 9: 19.0, 81: 5.0},
                                    81: {9: 20.0, 82: 10.0}, 82: {7: 5.0, 83: 0.5}, 7: 60, 9: 60, 60: 61, 61: 62}, eos=7, generation_eos=[9])
    engine = toys.make_engine(folder)

    def ask(prompt, **params):
        (output,) = toys.run(engine, [(prompt, SamplingParams(temperature=0.0, **{"max_tokens": 5, **params}))])
        answer = output.outputs[0]
        return answer.token_ids, answer.finish_reason, answer.stop_reason
    assert ask([70]) == ([7], "stop", None) and ask([90]) == ([9], "stop", None)
    assert ask([70], max_tokens=1) == ([7], "stop", None), "on the last allowed token it is a stop, not the length"
    assert ask([70], ignore_eos=True, max_tokens=4) == ([7, 60, 61, 62], "length", None)
    assert ask([70], ignore_eos=True, stop_token_ids=[61]) == ([7, 60, 61], "stop", 61)
    assert ask([70], stop_token_ids=[7], ignore_eos=True) == ([7], "stop", 7)
    assert ask([70], min_tokens=3, max_tokens=9) == ([80, 81, 82, 7], "stop", None), "neither EOS among the first three"
    assert ask([60], stop_token_ids=[61], min_tokens=1)[0][0] != 61, "min_tokens holds stop tokens back as well"
    assert ask([70], min_tokens=2, ignore_eos=True) == ([7, 60, 61, 62, 0], "length", None), "an EOS that ends nothing is not held back"


def test_an_eos_id_outside_the_vocabulary_is_never_met_and_does_no_harm():
    engine = toys.make_engine(toys.table_checkpoint({65: 66, 66: 67}, eos=[67, 100_000, -1]))
    (output,) = toys.run(engine, [([65], SamplingParams(temperature=0.0, max_tokens=9, min_tokens=1))])
    assert output.outputs[0].token_ids == [66, 67] and output.outputs[0].finish_reason == "stop"


# -- Logprobs --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(temperature=1.0, top_k=1), dict(temperature=0.0, repetition_penalty=1.5),
                                    dict(temperature=5.0, seed=3), dict(temperature=2.0, seed=1, top_p=0.5, presence_penalty=1.0)])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 14}, {"max_num_batched_tokens": 4, "max_num_seqs": 4}], ids=["plain", "preempted", "chunked"])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(params, options):
    """Whatever sampling does to them. One neighbour asks for fewer, one for none."""
    folder, prompts = toys.toy("gqa"), toys.prompts_of(4, seed=11, low=8, high=10)
    jobs = [(p, SamplingParams(logprobs=n, max_tokens=14, **params)) for p, n in zip(prompts, (5, 0, None, 96))]
    outputs = toys.run(toys.make_engine(folder, **options), jobs)
    assert ("num_kv_blocks" in options) == any(o.metrics.num_preemptions for o in outputs)
    for (prompt, p), output in zip(jobs, outputs):
        answer = output.outputs[0]
        if p.logprobs is None:
            assert answer.logprobs is None and answer.cumulative_logprob is None
            continue
        reference = toys.hf_logits(folder, prompt + answer.token_ids)[len(prompt) - 1:-1].log_softmax(-1)       # [n, V]
        assert len(answer.logprobs) == len(answer.token_ids) == 14
        for token_id, entry, row in zip(answer.token_ids, answer.logprobs, reference):
            assert token_id in entry and len(entry) in {p.logprobs, p.logprobs + 1}
            for i, lp in entry.items():
                assert lp.logprob == pytest.approx(row[i].item(), abs=1e-4) and lp.rank == (row > row[i]).sum() + 1
            best = [i for i, lp in entry.items() if lp.rank <= p.logprobs]
            assert sorted(best, key=lambda i: -entry[i].logprob) == sorted(best, key=lambda i: entry[i].rank)
            assert set(best) == set(row.topk(p.logprobs).indices.tolist())
        assert answer.cumulative_logprob == pytest.approx(sum(r[t].item() for t, r in zip(answer.token_ids, reference)), abs=1e-3)


def test_top_logprobs_by_hand():
    rows = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(4), math.log(2), math.log(1), -INF]])
    even, skewed = top_logprobs(rows, [2, 3], 2)
    assert even[0] == (2, pytest.approx(math.log(1 / 4)), 4), "of four equals, and not among the two that are reported: the last"
    assert [(i, k) for i, _, k in even[1:]] == [(0, 1), (1, 2)], "of equals the lower id first"
    assert [i for i, _, _ in skewed] == [3, 0, 1] and skewed[0][1:] == (-INF, 4)
    assert skewed[1] == (0, pytest.approx(math.log(4 / 7)), 1) and skewed[2] == (1, pytest.approx(math.log(2 / 7)), 2)
    assert top_logprobs(rows, [0, 0], 0) == [[even[0][:0] + (0, pytest.approx(math.log(1 / 4)), 1)], [(0, pytest.approx(math.log(4 / 7)), 1)]]


def test_ranks_are_vllms_where_logits_are_equal():
    """Among those reported the order of the list, of equals the lower id first; else as many as are no smaller. Greedy is 1."""
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 3.0]])
    rank = lambda token_id, n: top_logprobs(rows, [token_id], n)[0][0][2]
    assert [rank(1, n) for n in range(7)] == [1] * 7
    assert [rank(5, n) for n in range(7)] == [3, 3, 3, 3, 3, 3, 3] and [rank(2, n) for n in range(7)] == [3, 3, 2, 2, 2, 2, 2]
    assert [rank(3, n) for n in range(7)] == [5, 5, 5, 5, 4, 4, 4] and rank(0, 0) == 6
    for n in range(7):
        assert [(i, k) for i, _, k in top_logprobs(rows, [0], n)[0][1:]] == [(i, k + 1) for k, i in enumerate([1, 2, 5, 3, 4, 0][:n])]
    assert top_logprobs(rows, [0], -1) == top_logprobs(rows, [0], 6) == top_logprobs(rows, [0], 99)


def test_prompt_logprobs_in_pieces_are_those_of_the_whole():
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    token_ids = list(range(11))
    whole = top_logprobs(logits, token_ids, 3)
    assert all(sampling.prompt_logprobs(logits, token_ids, 3, piece) == whole for piece in (1, 4, 11, 128))
    assert sampling.prompt_logprobs(logits[:0], [], 3) == []


# -- Logits that are no numbers -----------------------------------------------------------------------------------------------

def test_rows_that_are_not_finite_get_no_token_and_the_others_do():
    nan = math.nan
    rows = torch.tensor([LOGITS, [nan] * 5, [0, nan, 1, 2, 3], [0, INF, 1, 2, 3], [-INF] * 5, [-INF, -INF, -INF, 1.0, -INF]])
    for temperature in (0, 1.0):
        assert sample(rows, [request(temperature=temperature, top_k=1) for _ in rows]) == [1, None, None, None, None, 3]


def test_whose_fault_it_is_that_there_is_no_token():
    settings = request(prompt=[1], repetition_penalty=1e-40, temperature=0), request(prompt=[1], allowed_token_ids=[1], min_tokens=1, eos=[1])
    assert sample(torch.tensor([LOGITS] * 2), settings) == [None, None]
    says = [sampling.why_no_token(torch.tensor(LOGITS), r) for r in settings]
    assert says[0].endswith("repetition_penalty=1e-40") and says[1].endswith("allowed_token_ids=[1], min_tokens=1")
    for row in ([0.0, math.nan], [INF, 0.0], [-INF, -INF]):
        assert "model's logits are not finite" in sampling.why_no_token(torch.tensor(row), settings[0])


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_with_bad_logits_fails_alone(value, temperature):
    folder = toys.copy_of(toys.table_checkpoint({65: 66, 66: 67, 67: 65, 70: 71, 71: 72}))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][72, 72] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = toys.make_engine(folder)
    params = SamplingParams(temperature=temperature, top_k=1, max_tokens=9, logprobs=1)
    good, bad, prompt_bad, also_good = toys.run(engine, [([65], params), ([70], params), ([65, 72], params), ([66], params)])
    assert bad.outputs[0].token_ids == [71, 72] and bad.outputs[0].finish_reason == "error" and bad.outputs[0].text == "GH"
    assert prompt_bad.outputs[0].token_ids == [] and prompt_bad.outputs[0].finish_reason == "error"
    for output in (bad, prompt_bad):
        assert output.finished and "not finite" in output.error
    assert good.outputs[0].text == "BCABCABCA" and also_good.outputs[0].text == "CABCABCAB"
    assert good.error is also_good.error is None and good.outputs[0].finish_reason == "length"
    assert toys.run(engine, [([65], params)])[0].outputs[0].text == "BCABCABCA"


def test_half_precision_overflow_is_reported_not_served():
    """Weights that are too large for fp16 further in: an error that names a way out, not a text of one token over and over."""
    folder = toys.copy_of(toys.toy("gqa"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (output,) = toys.run(toys.make_engine(folder, dtype="float16"), [([1, 2, 3], toys.greedy(5))])
    assert output.outputs[0].finish_reason == "error" and "--dtype" in output.error
    (output,) = toys.run(toys.make_engine(folder, dtype="float32"), [([1, 2, 3], toys.greedy(5))])
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("V", [97, 96, 512, 128256])
def test_likeliest_is_the_first_of_the_largest(V):
    generator = torch.Generator().manual_seed(V)
    logits = torch.randint(0, 50, (5, V), generator=generator).float()       # many ties
    logits[3] = -torch.inf
    best, ids = likeliest(logits)
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()] and torch.equal(best, logits.amax(-1))
    logits[1, V // 2] = torch.nan
    assert likeliest(logits)[0].isnan().tolist() == [False, True, False, False, False]
