"""Steps of decodes recorded once and replayed.

A GPU records launches. What surrounds that (which steps, padding, the tensors that a graph reads) is the same with a stand-in
that runs the function again, and that much is tested here. With a GPU: pytest -m gpu.
"""
import pytest
import torch

from cuda_graphs import CAPTURE_SIZES, DecodeGraphs
from model import ForwardBatch
from nano_serve import EMBEDDED_MODEL, LLM, SamplingParams
from toys import greedy, ids_of, make_engine, poison_unused, prompts_of, run, toy


def rerun(function):
    """A recording that runs the function anew."""
    function()
    return function


def with_graphs(engine):
    """The engine's worker, replaying; `.runs` lists the batch sizes of its replays and None for the other steps."""
    worker = engine.executor
    logits = torch.full((CAPTURE_SIZES[-1], engine.config.vocab_size), torch.nan)
    graphs = worker.graphs = DecodeGraphs(lambda batch: worker.model(batch, worker.kv_cache), logits, rerun)
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
    graphs = engine.executor.graphs
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
    graphs = engine.executor.graphs
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
class TestGPU:
    def answers(self, eager, dtype, jobs):
        """(token ids, log-probability) of each job, and the batch sizes of the graphs."""
        with LLM(EMBEDDED_MODEL, dtype=dtype, device="cuda", enforce_eager=eager) as llm:
            prompts, params = [p for p, _ in jobs], [SamplingParams(temperature=0, max_tokens=n, logprobs=0, ignore_eos=True)
                                                     for _, n in jobs]
            found = [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in llm.generate(prompts, params)]
            graphs = llm.engine.executor.graphs
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
