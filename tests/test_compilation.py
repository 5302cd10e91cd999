"""Steps of decodes in few calls: recorded once and replayed, or compiled.

A GPU records launches. What surrounds that (which steps, padding, the tensors that a graph reads) is the same with a stand-in
that runs the function again, and that much is tested here. With a GPU: pytest -m gpu.
"""
import functools
import os
import shutil

import pytest
import torch

from compilation import CAPTURE_SIZES, CompiledDecode, DecodeGraphs, Matrix
from model import ForwardBatch
from nano_serve import EMBEDDED_MODEL, LLM, EngineArgs, LLMEngine, SamplingParams
from toys import greedy, ids_of, make_engine, make_toy, poison_unused, prompts_of, run, toy


def rerun(function):
    """A recording that runs the function anew."""
    function()
    return function


def with_graphs(engine):
    """The engine's worker, replaying; `.runs` lists the batch sizes of its replays and None for the other steps."""
    worker = engine.executor
    logits = torch.full((CAPTURE_SIZES[-1], engine.config.vocab_size), torch.nan)
    graphs = worker.fast_decode = DecodeGraphs(lambda batch: worker.model(batch, worker.kv_cache), logits, rerun)
    graphs.runs, fit = [], graphs.fit

    def watched(batch):
        fits = fit(batch)
        graphs.runs.append(len(batch.seq_lens) if fits else None)
        return fits
    graphs.fit = watched
    return engine


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 9, "block_size": 4}])
def test_replayed_steps_give_the_same_ids(options):
    """Twelve requests of unequal lengths, over a pool that is NaN wherever nobody wrote: the batch shrinks through sizes
    between those of the graphs, and tables widen; with a small budget chunks mix in, with a small pool preemptions."""
    folder, jobs = toy(), [(p, greedy(n)) for p, n in zip(prompts_of(12, seed=3), range(3, 15))]
    jobs[0] = jobs[0][0], SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
    want = ids_of(run(make_engine(folder, **options), jobs))
    engine = with_graphs(make_engine(folder, **options))
    assert ids_of(run(engine, jobs)) == want
    graphs = engine.executor.fast_decode
    sizes = {n for n in graphs.runs if n}
    assert None in graphs.runs and sizes
    if not options:
        assert sizes - set(CAPTURE_SIZES) and max(sizes) > 8                 # padded, too
        assert len(graphs.graphs) < sum(n is not None for n in graphs.runs)  # recorded once, replayed more often


def test_padding_writes_nothing_and_reads_nothing():
    """Three decodes in the graph for four rows, after a step of four: every slot that is not theirs keeps its bits, the null
    block's as well; and the fourth row's logits are finite, so it read none of the NaN around it."""
    engine = with_graphs(make_engine(toy()))
    for i, n in enumerate((8, 8, 8, 2)):                     # the fourth ends in the second step and leaves its row behind
        engine.add_request(str(i), [5 + i] * 9, greedy(n))
    engine.step()
    engine.step()
    poison_unused(engine)
    bits = lambda: torch.stack((engine.executor.kv_cache.k, engine.executor.kv_cache.v)).view(torch.int32).clone()
    before = bits()
    engine.step()
    changed = (before != bits()).any(-1).any(-1).any(0).any(0)               # [N, bs]
    tables = [engine.scheduler.kv_cache_manager.get_block_ids(str(i)) for i in range(3)]
    want = {(table[10 // 4], 10 % 4) for table in tables}                    # position 10, block size 4
    graphs = engine.executor.fast_decode
    assert graphs.runs == [None, 4, 3] and [rows for rows, _ in graphs.graphs] == [4]
    assert {tuple(i) for i in changed.nonzero().tolist()} == want
    assert graphs.logits[3].isfinite().all() and graphs.logits[4].isnan().all()


def batch_of(S, T=None, logits=None):
    empty = lambda *shape: torch.zeros(*shape, dtype=torch.int64)
    T = S if T is None else T
    return ForwardBatch(empty(T), empty(T), empty(T), empty(S + 1), empty(S), empty(S, 1), empty(S if logits is None else logits))


@pytest.mark.parametrize("batch, fits", [
    (batch_of(1), True), (batch_of(256), True), (batch_of(257), False),
    (batch_of(3, T=4), False),                       # a chunk of two tokens
    (batch_of(3, logits=2), False),                  # a chunk of one token that doesn't end its prompt
])
def test_which_batches_fit(batch, fits):
    assert DecodeGraphs.fit(batch) == fits


def test_a_result_is_where_the_recording_left_it():
    """What is replayed knows addresses only: another batch of the same size must go through the same tensors."""
    seen = []

    def forward(batch):
        seen.append([getattr(batch, name).data_ptr() for name in vars(batch)])
        return batch.token_ids[:, None] * 1.0
    graphs = DecodeGraphs(forward, torch.empty(CAPTURE_SIZES[-1], 1), rerun)
    for first in (10, 20, 30):
        batch = batch_of(3)
        batch.token_ids = torch.arange(first, first + 3)
        assert graphs.run(batch).flatten().tolist() == [first, first + 1, first + 2]
    assert len(graphs.graphs) == 1 and len({tuple(s) for s in seen}) == 1


# -- compiled ---------------------------------------------------------------------------------------------------------

# None of its matrices' numbers of outputs (80, 48, 74, 48, 97) is a multiple of COLUMNS; and eps is large enough to matter.
ODD = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 37, "vocab_size": 97,
       "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.3}


needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


@functools.lru_cache(None)
def folder_of(name):
    return make_toy(**ODD) if name == "odd" else toy(name)


def compiled_engine(name, **options):
    """An engine that lists in `.executor.fast_decode.fits` which of its steps ran as compiled."""
    engine = make_engine(folder_of(name), compile=True, **options)
    decoder = engine.executor.fast_decode
    decoder.fits, fit = [], decoder.fit
    decoder.fit = lambda batch: decoder.fits.append(fit(batch)) or decoder.fits[-1]
    return engine


def alone_and_in_company(vocabulary):
    """Three at once, of which the longest is soon alone, among them a prompt of one token; then one by itself, across
    several blocks."""
    prompts = [[i % vocabulary for i in p] for p in prompts_of(4, seed=5)]
    return [(prompts[0], greedy(3)), (prompts[1][:1], greedy(5)), (prompts[2], greedy(23))], [(prompts[3], greedy(30))]


@needs_compiler
@pytest.mark.parametrize("name, dtype", [("odd", "float32"), ("gqa", "bfloat16")])
def test_compiled_steps_give_the_same_ids(name, dtype):
    """Over a pool of NaN. In bf16 a function that keeps values in registers rounds less often, so there only the first ids of
    a sequence are compared."""
    plain, engine = make_engine(folder_of(name), dtype=dtype), compiled_engine(name, dtype=dtype)
    for jobs in alone_and_in_company(plain.config.vocab_size):
        want = ids_of(run(plain, jobs))
        with torch.compiler.set_stance("fail_on_recompile"):
            got = ids_of(run(engine, jobs))
        n = None if dtype == "float32" else 4
        assert [ids[:n] for ids in got] == [ids[:n] for ids in want]
    assert engine.executor.fast_decode.fits.count(True) > 30 and False in engine.executor.fast_decode.fits


@needs_compiler
def test_two_compiled_models_in_one_process():
    """PyTorch keeps what it compiled with the function's code: each must find its own, whatever mode its caller is in."""
    with torch._dynamo.config.patch(recompile_limit=1):      # as many versions of one code as PyTorch then allows
        engines = [compiled_engine(name) for name in ("odd", "gqa")]
    wants = [[ids_of(run(make_engine(folder_of(name)), jobs)) for jobs in alone_and_in_company(96)] for name in ("odd", "gqa")]
    with torch.compiler.set_stance("fail_on_recompile"):
        for round_ in range(2):
            for engine, want in zip(engines, wants):
                with torch.inference_mode(bool(round_)):
                    assert ids_of(run(engine, alone_and_in_company(96)[round_])) == want[round_]


@needs_compiler
def test_a_compiled_step_writes_one_slot():
    """And in all layers; the null block's slots stay as they are once the engine stands."""
    engine = compiled_engine("odd")
    engine.add_request("a", [1, 2, 3, 4, 5, 6], greedy(8))
    engine.step()
    poison_unused(engine)
    bits = lambda: torch.stack((engine.executor.kv_cache.k, engine.executor.kv_cache.v)).view(torch.int32).clone()
    before = bits()
    engine.step()
    changed = (before != bits()).any(-1).any(-1)                             # [2, layers, N, bs]
    block = engine.scheduler.kv_cache_manager.get_block_ids("a")[6 // 4]     # position 6, block size 4
    assert engine.executor.fast_decode.fits == [False, True]
    assert {tuple(i[2:]) for i in changed.nonzero().tolist()} == {(block, 6 % 4)} and changed.sum() == 2 * 2


@pytest.mark.parametrize("batch, seq_len, fits", [
    (batch_of(1), 2, True),
    (batch_of(1), 1, False),                         # a prompt of one token
    (batch_of(1, logits=0), 2, False),               # a chunk of one token that doesn't end its prompt
    (batch_of(2), 2, False), (batch_of(1, T=2), 2, False),
])
def test_which_batches_are_compiled(batch, seq_len, fits):
    batch.seq_lens.fill_(seq_len)
    assert CompiledDecode.fit(batch) == fits


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("out, n_in, bias", [(64, 48, False), (33, 7, True), (5, 100, True)])
def test_matrix_times_a_row(dtype, tolerance, out, n_in, bias):
    torch.manual_seed(0)
    weights = torch.nn.Linear(n_in, out, bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(1, n_in, dtype=dtype)
    got, want = Matrix.of(weights).times(x), torch.nn.functional.linear(x, weights.weight, weights.bias)
    assert got.shape == want.shape and got.dtype == dtype
    assert torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def test_compile_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="--compile is for one process on a CPU.*-tp 2"):
        LLMEngine(EngineArgs(folder_of("gqa"), compile=True, tensor_parallel_size=2))


def test_no_compiler():
    import torch._inductor.config
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        with pytest.raises(ValueError, match="--compile.*needs a C\\+\\+ compiler"):
            LLMEngine(EngineArgs(folder_of("mqa"), compile=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
class TestGPU:
    def answers(self, eager, dtype, jobs):
        """(token ids, log-probability) of each job, and the batch sizes of the graphs."""
        with LLM(EMBEDDED_MODEL, dtype=dtype, device="cuda", enforce_eager=eager) as llm:
            prompts, params = [p for p, _ in jobs], [SamplingParams(temperature=0, max_tokens=n, logprobs=0, ignore_eos=True)
                                                     for _, n in jobs]
            found = [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in llm.generate(prompts, params)]
            graphs = llm.engine.executor.fast_decode
            return found, set() if graphs is None else {rows for rows, _ in graphs.graphs}

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_replayed_and_eager_are_equal(self, dtype):
        """Eight requests of equal length fill the graph for eight rows: the same kernels over the same shapes, so the
        log-probabilities are equal to the last bit."""
        jobs = [(f"Question {i}: what is a KV cache?", 20) for i in range(8)]
        (eager, none), (replayed, sizes) = self.answers(True, dtype, jobs), self.answers(False, dtype, jobs)
        assert eager == replayed and not none and sizes == {8}

    def test_padded_replays_give_the_same_ids(self):
        """Eleven requests that end one by one: batches between the graphs' sizes. cuBLAS may sum products of another number
        of rows in another order, so what must be equal is the ids, in fp32."""
        jobs = [(f"Question {i}: what is a KV cache?" * (i % 3 + 1), 8 + 3 * i) for i in range(11)]
        (eager, _), (replayed, sizes) = self.answers(True, "float32", jobs), self.answers(False, "float32", jobs)
        assert [ids for ids, _ in eager] == [ids for ids, _ in replayed] and {1, 2, 4, 8, 16} <= sizes
