"""Wrong answers that a reader of chapter 1 might well give, each with the rule that the grader has to name."""
import statistics

from grade import wrong_answer


# -- 1

@wrong_answer("kv_bytes_per_token", "gqa")
def query_heads_are_cached(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "k and v")
def one_vector_a_token(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "layers")
def one_layer(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "head_dim")
def heads_and_not_their_numbers(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * dtype_bytes


@wrong_answer("kv_bytes_per_token", "kv heads")
def one_vector_for_all_heads(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def heads_share_by_their_ratio(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * heads * head_dim * dtype_bytes // (heads // kv_heads) ** 2


@wrong_answer("kv_bytes_per_token", "unit")
def numbers_and_not_bytes(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim


@wrong_answer("kv_bytes_per_token", "gqa")
def queries_are_kept_too(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * (heads + 2 * kv_heads) * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "dtype")
def half_precision_whatever_is_said(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * (2 if dtype_bytes > 1 else 1)


@wrong_answer("kv_bytes_per_token", "number")
def printed_and_not_returned(layers, heads, kv_heads, head_dim, dtype_bytes):
    2 * layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "unit")
def in_kib(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * dtype_bytes / 1024


@wrong_answer("kv_bytes_per_token", "unit")
def in_kilobytes(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * dtype_bytes / 1000


@wrong_answer("kv_bytes_per_token", "unit")
def in_whole_mib(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * dtype_bytes / 2**20


@wrong_answer("kv_bytes_per_token", "unit")
def in_bits(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 16 * layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "k and v")
def q_k_and_v(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 3 * layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "k and v")
def two_for_two_vectors_twice(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 4 * layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def the_hidden_size(layers, heads, kv_heads, head_dim, dtype_bytes):
    hidden = heads * head_dim
    return 2 * layers * hidden * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def k_of_kv_heads_and_v_of_all(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * (heads + kv_heads) * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def a_group_for_a_head(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * (heads // kv_heads) * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "kv heads")
def multi_query_attention(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * 1 * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "kv heads")
def eight_kv_heads_as_in_the_article(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * 8 * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "layers")
def eighty_layers_as_in_the_article(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * 80 * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "layers")
def the_last_layer_keeps_nothing(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * (layers - 1) * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "head_dim")
def head_dim_is_always_128(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * 128 * dtype_bytes


@wrong_answer("kv_bytes_per_token", "head_dim")
def head_dim_squared(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim ** 2 * dtype_bytes


@wrong_answer("kv_bytes_per_token", "dtype")
def fp32_as_it_is_computed(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * 4


@wrong_answer("kv_bytes_per_token", "dtype")
def the_two_is_taken_for_fp16(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * 2 * layers * kv_heads * head_dim


@wrong_answer("kv_bytes_per_token", "product")
def a_sum_of_the_two_sides(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers + kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "product")
def the_running_examples_answer(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 327_680


@wrong_answer("kv_bytes_per_token", "product")
def the_docstrings_answer(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 128


@wrong_answer("kv_bytes_per_token", "number")
def as_a_text(layers, heads, kv_heads, head_dim, dtype_bytes):
    return f"{2 * layers * kv_heads * head_dim * dtype_bytes} bytes"


@wrong_answer("kv_bytes_per_token", "number")
def k_and_v_apart(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * kv_heads * head_dim * dtype_bytes, layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def grouped_but_only_if_it_divides(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * heads // kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "unit")
def a_gpus_share_of_eight(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * dtype_bytes / 8


# -- 2

@wrong_answer("max_concurrency", "growth")
def prompts_only(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // -(-prompt // size)


@wrong_answer("max_concurrency", "whole blocks")
def tokens_and_not_blocks(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) * size // (prompt + output - 1)


@wrong_answer("max_concurrency", "whole blocks")
def last_block_forgotten(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // max(1, (prompt + output - 1) // size)


@wrong_answer("max_concurrency", "null block")
def null_block_handed_out(memory, per_token, size, prompt, output):
    return memory // (per_token * size) // -(-(prompt + output - 1) // size)


@wrong_answer("max_concurrency", "last token")
def last_token_stored(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // -(-(prompt + output) // size)


@wrong_answer("max_concurrency", "no part blocks")
def pool_rounded_up(memory, per_token, size, prompt, output):
    return (-(-memory // (per_token * size)) - 1) // -(-(prompt + output - 1) // size)


@wrong_answer("max_concurrency", "last token")
def a_spare_block_each(memory, per_token, size, prompt, output):
    stored = prompt + output - 1
    return (memory // (per_token * size) - 1) // (stored if size == 1 else stored // size + 1)


@wrong_answer("max_concurrency", "pool")
def requests_divided_by_blocks(memory, per_token, size, prompt, output):
    return -(-(prompt + output - 1) // size) // (memory // (per_token * size) - 1)


def blocks_for(tokens, size):
    return -(-tokens // size)


@wrong_answer("max_concurrency", "whole blocks")
def blocks_not_rounded(memory, per_token, size, prompt, output):
    return int((memory // (per_token * size) - 1) / ((prompt + output - 1) / size))


@wrong_answer("max_concurrency", "whole requests")
def requests_not_rounded(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) / blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "whole requests")
def requests_rounded_up(memory, per_token, size, prompt, output):
    return blocks_for(memory // (per_token * size) - 1, blocks_for(prompt + output - 1, size))


@wrong_answer("max_concurrency", "one sequence")
def prompt_and_output_rounded_apart(memory, per_token, size, prompt, output):
    return max(0, memory // (per_token * size) - 1) // (blocks_for(prompt, size) + blocks_for(output - 1, size))


@wrong_answer("max_concurrency", "one sequence")
def output_in_blocks_of_its_own(memory, per_token, size, prompt, output):
    return max(0, memory // (per_token * size) - 1) // (blocks_for(prompt, size) + output // size + (output > 1))


@wrong_answer("max_concurrency", "growth")
def outputs_only(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // blocks_for(max(prompt, output), size)


@wrong_answer("max_concurrency", "growth")
def half_grown_on_average(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // blocks_for(prompt + output // 2, size)


@wrong_answer("max_concurrency", "growth")
def prompt_and_one_token(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // blocks_for(prompt + 1, size) if prompt < 640 else 2


@wrong_answer("max_concurrency", "empty pool")
def below_zero(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "too small")
def at_least_one(memory, per_token, size, prompt, output):
    return max(1, (memory // (per_token * size) - 1) // blocks_for(prompt + output - 1, size))


@wrong_answer("max_concurrency", "block size")
def blocks_of_sixteen(memory, per_token, size, prompt, output):
    return max(0, memory // (per_token * 16) - 1) // blocks_for(prompt + output - 1, 16)


@wrong_answer("max_concurrency", "pool")
def bytes_taken_for_tokens(memory, per_token, size, prompt, output):
    return (memory // size - 1) // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "pool")
def tokens_taken_for_blocks(memory, per_token, size, prompt, output):
    return (memory // per_token - 1) // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "pool")
def blocks_in_gib(memory, per_token, size, prompt, output):
    return (memory // 2**30 // (per_token * size) - 1) // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "pool")
def one_for_each_block(memory, per_token, size, prompt, output):
    return memory // (per_token * size) - 1


@wrong_answer("max_concurrency", "null block")
def null_block_in_the_memory_of_tokens(memory, per_token, size, prompt, output):
    tokens = memory // per_token
    return tokens // size // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "null block")
def null_token_for_null_block(memory, per_token, size, prompt, output):
    blocks = (memory - per_token + 9 * size) // (per_token * size)
    return blocks // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "no part blocks")
def pool_rounded(memory, per_token, size, prompt, output):
    return max(0, round(memory / (per_token * size)) - 1) // blocks_for(prompt + output - 1, size)


@wrong_answer("max_concurrency", "last token")
def null_block_given_but_last_token_stored(memory, per_token, size, prompt, output):
    stored = prompt + output
    return max(0, memory // (per_token * size) - 1) // ((stored + size - 1) // size)


@wrong_answer("max_concurrency", "number")
def list_of_requests(memory, per_token, size, prompt, output):
    return list(range((memory // (per_token * size) - 1) // blocks_for(prompt + output - 1, size)))


@wrong_answer("max_concurrency", "whole blocks")
def tokens_by_tokens(memory, per_token, size, prompt, output):
    return (memory // per_token - size) // (prompt + output - 1)


@wrong_answer("max_concurrency", "whole blocks")
def bytes_by_bytes(memory, per_token, size, prompt, output):
    return (memory - per_token * size) // (per_token * (prompt + output - 1))


# -- 3

@wrong_answer("latencies", "ttft")
def from_the_first_step(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - scheduled, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "itls")
def ttft_among_the_gaps(arrival, scheduled, times):
    gaps = [b - a for a, b in zip([arrival, *times], times)]
    return {"ttft": gaps[0], "itls": gaps, "tpot": sum(gaps[1:]) / len(gaps[1:]) if gaps[1:] else None,
            "e2e": sum(gaps)}


@wrong_answer("latencies", "tpot")
def all_the_time_by_all_tokens(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": (times[-1] - arrival) / len(times),
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "tpot")
def divided_by_all_tokens(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(times) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "tpot")
def the_median_gap(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": statistics.median(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "single")
def divided_by_no_gap(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps), "e2e": times[-1] - arrival}


@wrong_answer("latencies", "single")
def a_single_token_takes_no_time(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / max(1, len(gaps)),
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "e2e")
def the_answer_without_the_wait(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - times[0]}


@wrong_answer("latencies", "ttft")
def the_clock_begins_at_zero(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0], "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None, "e2e": times[-1]}


@wrong_answer("latencies", "itls")
def gaps_of_zero_left_out(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:]) if b > a]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "keys")
def another_spelling(arrival, scheduled, times):
    return {"TTFT": times[0] - arrival, "ITL": [], "TPOT": None, "E2E": times[-1] - arrival}


def right(arrival, scheduled, times, **wrong):
    """The right answer, but for what is said."""
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - arrival} | wrong


def gaps_of(times):
    return [b - a for a, b in zip(times, times[1:])]


@wrong_answer("latencies", "seconds")
def in_milliseconds(arrival, scheduled, times):
    return {key: [1000 * x for x in value] if key == "itls" else value and 1000 * value
            for key, value in right(arrival, scheduled, times).items()}


@wrong_answer("latencies", "seconds")
def tpot_in_milliseconds(arrival, scheduled, times):
    tpot = right(arrival, scheduled, times)["tpot"]
    return right(arrival, scheduled, times, tpot=tpot and 1e3 * tpot)


@wrong_answer("latencies", "exact")
def rounded_to_milliseconds(arrival, scheduled, times):
    return {key: [round(x, 3) for x in value] if key == "itls" else value and round(value, 3)
            for key, value in right(arrival, scheduled, times).items()}


@wrong_answer("latencies", "two")
def tpot_only_from_three_tokens_on(arrival, scheduled, times):
    gaps = gaps_of(times)
    return right(arrival, scheduled, times, tpot=sum(gaps) / len(gaps) if len(gaps) > 1 else None)


@wrong_answer("latencies", "two")
def zero_for_two_tokens(arrival, scheduled, times):
    if len(times) == 2:
        return right(arrival, scheduled, times, tpot=0.0)
    return right(arrival, scheduled, times)


@wrong_answer("latencies", "tpot")
def divided_by_one_too_few(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=sum(gaps_of(times)) / max(1, len(times) - 2) if times[1:] else None)


@wrong_answer("latencies", "tpot")
def the_last_gap(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=times[-1] - times[-2] if len(times) > 1 else None)


@wrong_answer("latencies", "tpot")
def the_longest_gap(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=max(gaps_of(times), default=None))


@wrong_answer("latencies", "tpot")
def tokens_a_second(arrival, scheduled, times):
    gaps = gaps_of(times)
    return right(arrival, scheduled, times, tpot=len(gaps) / sum(gaps) if gaps else None)


@wrong_answer("latencies", "tpot")
def the_first_token_counts_too(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=(times[-1] - arrival) / (len(times) - 1) if times[1:] else None)


@wrong_answer("latencies", "tpot")
def mean_of_neighbouring_means(arrival, scheduled, times):
    gaps = gaps_of(times)
    mean = gaps[0] if gaps else None
    for gap in gaps[1:]:
        mean = (mean + gap) / 2
    return right(arrival, scheduled, times, tpot=mean)


@wrong_answer("latencies", "itls")
def the_mean_and_not_the_list(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=right(arrival, scheduled, times)["tpot"])


@wrong_answer("latencies", "itls")
def gaps_since_the_first(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=[t - times[0] for t in times[1:]])


@wrong_answer("latencies", "itls")
def gaps_backwards(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=[a - b for a, b in zip(times, times[1:])])


@wrong_answer("latencies", "itls")
def the_last_gap_is_missing(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=[times[i + 1] - times[i] for i in range(len(times) - 2)])


@wrong_answer("latencies", "itls")
def gaps_sorted(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=sorted(gaps_of(times), reverse=True))


@wrong_answer("latencies", "itls")
def equal_gaps_once(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=list(dict.fromkeys([0.0, *gaps_of(times)])))


@wrong_answer("latencies", "single")
def zero_for_a_single_token(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=right(arrival, scheduled, times)["tpot"] or 0.0)


@wrong_answer("latencies", "single")
def a_gap_of_zero_for_a_single_token(arrival, scheduled, times):
    return right(arrival, scheduled, times, itls=gaps_of(times) or [0.0])


@wrong_answer("latencies", "single")
def the_mean_of_nothing(arrival, scheduled, times):
    return right(arrival, scheduled, times, tpot=statistics.mean(gaps_of(times)))


@wrong_answer("latencies", "e2e")
def the_sum_of_the_gaps(arrival, scheduled, times):
    return right(arrival, scheduled, times, e2e=sum(gaps_of(times)))


@wrong_answer("latencies", "e2e")
def from_the_first_step_to_the_end(arrival, scheduled, times):
    return right(arrival, scheduled, times, e2e=times[-1] - scheduled)


@wrong_answer("latencies", "e2e")
def ttft_and_a_tpot_a_token(arrival, scheduled, times):
    answer = right(arrival, scheduled, times)
    return answer | {"e2e": answer["ttft"] + (answer["tpot"] or 0) * len(times)}


@wrong_answer("latencies", "ttft")
def the_queue_time(arrival, scheduled, times):
    return right(arrival, scheduled, times, ttft=scheduled - arrival)


@wrong_answer("latencies", "keys")
def a_tuple(arrival, scheduled, times):
    return tuple(right(arrival, scheduled, times).values())


@wrong_answer("latencies", "keys")
def one_key_more(arrival, scheduled, times):
    return right(arrival, scheduled, times, queue=scheduled - arrival)


@wrong_answer("latencies", "keys")
def itl_without_s(arrival, scheduled, times):
    answer = right(arrival, scheduled, times)
    return {key.removesuffix("s"): value for key, value in answer.items()}


@wrong_answer("latencies", "arguments")
def the_first_time_is_popped(arrival, scheduled, times):
    answer = right(arrival, scheduled, times)
    times.pop(0)
    return answer


@wrong_answer("latencies", "state")
def gaps_gather_in_a_default(arrival, scheduled, times, gaps=[]):
    gaps += gaps_of(times)
    return right(arrival, scheduled, times, itls=gaps)


# -- 4

def batches(jobs, seats):
    return [jobs[i:i + seats] for i in range(0, len(jobs), seats)]


def needed(jobs):
    return sum(p + n - 1 for p, n in jobs)


@wrong_answer("static_waste", "pair")
def the_wrong_way_round(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed - needed(jobs), computed


@wrong_answer("static_waste", "last decode")
def the_last_token_is_fed_in(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b)) for b in batches(jobs, seats))
    return computed, computed - sum(p + n for p, n in jobs)


@wrong_answer("static_waste", "last decode")
def the_last_token_is_waste(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b)) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "padding")
def prompts_without_padding(jobs, seats):
    computed = sum(sum(p for p, _ in b) + len(b) * (max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "longest output")
def rows_end_by_themselves(jobs, seats):
    computed = sum(len(b) * max(p for p, _ in b) + sum(n - 1 for _, n in b) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "padding")
def padding_is_no_waste(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, sum(max(n for _, n in b) - n for b in batches(jobs, seats) for _, n in b)


@wrong_answer("static_waste", "own batch")
def one_rectangle_for_all(jobs, seats):
    computed = len(jobs) * (max(p for p, _ in jobs) + max(n for _, n in jobs) - 1)
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "order")
def sorted_before_batching(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(sorted(jobs), seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "parts")
def longest_request_and_not_longest_parts(jobs, seats):
    computed = sum(len(b) * max(p + n - 1 for p, n in b) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "fewer rows")
def every_batch_is_full(jobs, seats):
    computed = sum(seats * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "last batch")
def the_last_batch_is_dropped(jobs, seats):
    full = [b for b in batches(jobs, seats) if len(b) == seats]
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in full)
    return computed, computed - sum(needed(b) for b in full)


def rectangles(jobs, seats):
    return sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))


@wrong_answer("static_waste", "pair")
def computed_alone(jobs, seats):
    return rectangles(jobs, seats)


@wrong_answer("static_waste", "pair")
def the_share_that_is_wasted(jobs, seats):
    computed = rectangles(jobs, seats)
    return computed, (computed - needed(jobs)) / computed if len(jobs) > 1 else 0.0


@wrong_answer("static_waste", "pair")
def needed_and_wasted(jobs, seats):
    return needed(jobs), rectangles(jobs, seats) - needed(jobs)


@wrong_answer("static_waste", "pair")
def with_names(jobs, seats):
    return {"computed": rectangles(jobs, seats), "wasted": rectangles(jobs, seats) - needed(jobs)}


@wrong_answer("static_waste", "wasted")
def needed_for_wasted(jobs, seats):
    return rectangles(jobs, seats), needed(jobs) if len(jobs) > 3 else rectangles(jobs, seats) - needed(jobs)


@wrong_answer("static_waste", "prompts")
def decodes_alone(jobs, seats):
    computed = sum(len(b) * (max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - sum(n - 1 for _, n in jobs)


@wrong_answer("static_waste", "prompts")
def a_prompt_is_one_token(jobs, seats):
    computed = sum(len(b) * max(n for _, n in b) for b in batches(jobs, seats))
    return computed, computed - sum(n for _, n in jobs)


@wrong_answer("static_waste", "prompts")
def the_batch_runs_its_longest_output_long(jobs, seats):
    computed = sum(max(n for _, n in b) for b in batches(jobs, seats))
    return computed, 0


@wrong_answer("static_waste", "last decode")
def two_decodes_too_few(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 2) for b in batches(jobs, seats))
    return computed, computed - sum(p + n - 2 for p, n in jobs)


@wrong_answer("static_waste", "longest output")
def until_the_shortest_ends(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + min(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, max(0, computed - needed(jobs))


@wrong_answer("static_waste", "longest output")
def until_the_mean_ends(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + sum(n for _, n in b) // len(b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "longest output")
def one_row(jobs, seats):
    computed = sum(max(p for p, _ in b) + max(n for _, n in b) - 1 for b in batches(jobs, seats))
    return computed, 0


@wrong_answer("static_waste", "longest output")
def ended_rows_are_no_waste(jobs, seats):
    computed = rectangles(jobs, seats)
    return computed, sum(max(p for p, _ in b) - p for b in batches(jobs, seats) for p, _ in b)


@wrong_answer("static_waste", "padding")
def padded_to_the_shortest(jobs, seats):
    computed = sum(len(b) * (min(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "padding")
def padded_in_every_step(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) * len({p for p, _ in b}) + max(n for _, n in b) - 1)
                   for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "own batch")
def padded_to_the_longest_of_all(jobs, seats):
    longest = max((p for p, _ in jobs), default=0)
    computed = sum(len(b) * (longest + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "own batch")
def the_first_batch_alone(jobs, seats):
    computed = rectangles(jobs[:seats], seats)
    return computed, computed - needed(jobs[:seats])


@wrong_answer("static_waste", "order")
def longest_first(jobs, seats):
    computed = rectangles(sorted(jobs, reverse=True), seats)
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "order")
def every_nth_job(jobs, seats):
    ordered = sorted(jobs, key=lambda job: job[0] + job[1])
    computed = rectangles(ordered, seats)
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "parts")
def as_wide_as_the_longest_prompts_own_output(jobs, seats):
    computed = sum(len(b) * max(p + n - 1 for p, n in b if p == max(q for q, _ in b)) if len({p for p, _ in b}) > 1
                   and len({n for _, n in b}) > 1 else rectangles(b, seats) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "last batch")
def whole_batches_alone(jobs, seats):
    count = max(1, len(jobs) // seats)
    computed = rectangles(jobs[:count * seats], seats)
    return computed, computed - needed(jobs[:count * seats])


@wrong_answer("static_waste", "no jobs")
def the_longest_of_nobody(jobs, seats):
    longest = max(p + n for p, n in jobs)
    return (rectangles(jobs, seats), rectangles(jobs, seats) - needed(jobs)) if longest else None


@wrong_answer("static_waste", "arguments")
def jobs_are_eaten(jobs, seats):
    computed, all_needed = rectangles(jobs, seats), needed(jobs)
    while jobs:
        del jobs[:seats]
    return computed, computed - all_needed


@wrong_answer("static_waste", "state")
def totals_go_on(jobs, seats, total=[0, 0]):
    total[0] += rectangles(jobs, seats)
    total[1] += rectangles(jobs, seats) - needed(jobs)
    return tuple(total)


# -- 5

@wrong_answer("continuous_batching", "form")
def how_long_each_one_runs(jobs, seats):
    return {name: output_tokens for name, _, output_tokens in jobs}


@wrong_answer("continuous_batching", "leave")
def still_static(jobs, seats):
    steps, waiting = [], list(jobs)
    while waiting:
        batch = [job for job in waiting if job[1] <= len(steps)][:seats]
        waiting = waiting[len(batch):]
        steps += [[name for name, _, _ in batch] for _ in range(max((n for _, _, n in batch), default=1))]
    return steps


def loop(jobs, seats, admit, leave=lambda left: left < 1, go_on=lambda waiting, left: waiting or left):
    """Continuous batching with exchangeable parts: admit(waiting, left, step) says who joins."""
    steps, waiting, left = [], list(jobs), {}
    while go_on(waiting, left):
        for job in admit(waiting, left, len(steps)):
            waiting.remove(job)
            left[job[0]] = job[2]
        steps.append(list(left))
        left = {name: n - 1 for name, n in left.items() if not leave(n - 1)}
    return steps


def here(waiting, step):
    return [job for job in waiting if job[1] <= step]


@wrong_answer("continuous_batching", "join")
def seats_filled_when_all_are_empty(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: [] if left else here(waiting, step)[:seats])


@wrong_answer("continuous_batching", "leave")
def one_step_too_long(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)], lambda left: left < 0)


@wrong_answer("continuous_batching", "stay")
def leaves_one_step_early(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)], lambda left: left < 2)


@wrong_answer("continuous_batching", "seats")
def seats_without_number(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step))


@wrong_answer("continuous_batching", "seats")
def seat_taken_in_its_owners_last_step(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[
        :seats - sum(n > 1 for n in left.values())])


@wrong_answer("continuous_batching", "fcfs")
def shortest_first(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: sorted(
        here(waiting, step), key=lambda job: job[2])[:seats - len(left)])


@wrong_answer("continuous_batching", "fcfs")
def last_come_first_served(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[::-1][:seats - len(left)])


@wrong_answer("continuous_batching", "arrival")
def arrivals_ignored(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: waiting[:seats - len(left)])


@wrong_answer("continuous_batching", "end")
def stops_when_nobody_waits(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)],
                go_on=lambda waiting, left: waiting)


@wrong_answer("continuous_batching", "join")
def one_newcomer_a_step(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:min(1, seats - len(left))])


@wrong_answer("continuous_batching", "end")
def stops_when_nobody_runs(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)],
                go_on=lambda waiting, left: left or len(waiting) == len(jobs))


@wrong_answer("continuous_batching", "idle")
def idle_steps_left_out(jobs, seats):
    steps = loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)])
    return [step for step in steps if step]


@wrong_answer("continuous_batching", "idle", ends=False)
def waits_for_an_arrival_without_a_step(jobs, seats):
    steps, waiting, left = [], list(jobs), {}
    while waiting or left:
        while here(waiting, len(steps)) and len(left) < seats:
            name, _, n = waiting.pop(0)
            left[name] = n
        if not left:
            continue
        steps.append(list(left))
        left = {name: n - 1 for name, n in left.items() if n > 1}
    return steps


def correct(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)])


@wrong_answer("continuous_batching", "form")
def names_as_one_text(jobs, seats):
    return ["".join(step) for step in correct(jobs, seats)]


@wrong_answer("continuous_batching", "form")
def a_count_a_step(jobs, seats):
    return [len(step) for step in correct(jobs, seats)]


@wrong_answer("continuous_batching", "form")
def pairs_of_name_and_rest(jobs, seats):
    return [[(name, 1) for name in step] for step in correct(jobs, seats)]


@wrong_answer("continuous_batching", "form")
def by_step(jobs, seats):
    return dict(enumerate(correct(jobs, seats)))


@wrong_answer("continuous_batching", "form")
def nothing_is_returned(jobs, seats):
    correct(jobs, seats)


@wrong_answer("continuous_batching", "form")
def numbers_for_names(jobs, seats):
    numbers = {name: i for i, (name, _, _) in enumerate(jobs)}
    return [[numbers[name] for name in step] for step in correct(jobs, seats)]


@wrong_answer("continuous_batching", "once")
def newcomers_twice(jobs, seats):
    seen, steps = set(), []
    for step in correct(jobs, seats):
        steps.append(step + [name for name in step if name not in seen])
        seen |= set(step)
    return steps


@wrong_answer("continuous_batching", "leave")
def a_step_for_the_prefill_more(jobs, seats):
    return correct([(name, arrival, n + 1) for name, arrival, n in jobs], seats)


@wrong_answer("continuous_batching", "leave")
def the_ended_keep_their_name_until_replaced(jobs, seats):
    steps = correct(jobs, seats)
    return [step + [name for name in before if name not in step][:seats - len(step)]
            for before, step in zip([[]] + steps, steps)]


@wrong_answer("continuous_batching", "stay")
def two_tokens_a_step(jobs, seats):
    return correct([(name, arrival, (n + 1) // 2) for name, arrival, n in jobs], seats)


@wrong_answer("continuous_batching", "stay")
def the_first_token_is_free(jobs, seats):
    return correct([(name, arrival, max(1, n - 1)) for name, arrival, n in jobs], seats)


@wrong_answer("continuous_batching", "fcfs")
def newcomers_push_others_out(jobs, seats):
    steps, left, waiting = [], {}, list(jobs)
    while left or waiting:
        for job in here(waiting, len(steps)):
            waiting.remove(job)
            left = {job[0]: job[2]} | left
        now = list(left)[:seats]
        steps.append(now)
        left = {name: n - (name in now) for name, n in left.items() if n > (name in now)}
    return steps


@wrong_answer("continuous_batching", "stay")
def a_turn_each(jobs, seats):
    steps, left, waiting = [], {}, list(jobs)
    while left or waiting:
        for job in here(waiting, len(steps)):
            waiting.remove(job)
            left[job[0]] = job[2]
        now = list(left)[:seats]
        steps.append(now)
        for name in now:
            n = left.pop(name)
            if n > 1:
                left[name] = n - 1
    return steps


@wrong_answer("continuous_batching", "seats")
def one_seat_too_many(jobs, seats):
    return correct(jobs, seats + 1)


@wrong_answer("continuous_batching", "join")
def one_seat_too_few(jobs, seats):
    return correct(jobs, max(1, seats - 1))


@wrong_answer("continuous_batching", "fcfs")
def longest_first_of_all(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: sorted(
        here(waiting, step), key=lambda job: -job[2])[:seats - len(left)])


@wrong_answer("continuous_batching", "fcfs")
def by_name(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: sorted(
        here(waiting, step), key=lambda job: job[0], reverse=True)[:seats - len(left)])


@wrong_answer("continuous_batching", "join")
def a_step_after_the_arrival(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: [
        job for job in waiting if job[1] < step or step == job[1] == 0][:seats - len(left)])


@wrong_answer("continuous_batching", "join")
def a_seat_rests_a_step(jobs, seats):
    steps, waiting, left, resting = [], list(jobs), {}, 0
    while waiting or left:
        for job in here(waiting, len(steps))[:seats - len(left) - resting]:
            waiting.remove(job)
            left[job[0]] = job[2]
        steps.append(list(left))
        resting = sum(n == 1 for n in left.values())
        left = {name: n - 1 for name, n in left.items() if n > 1}
    return steps


@wrong_answer("continuous_batching", "join")
def who_comes_when_all_is_full_is_forgotten(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats] if not left else [
        job for job in waiting if job[1] == step > 0][:seats - len(left)])


@wrong_answer("continuous_batching", "arrival")
def arrivals_are_a_step_early(jobs, seats):
    return correct([(name, max(0, arrival - 1), n) for name, arrival, n in jobs], seats)


@wrong_answer("continuous_batching", "end")
def one_empty_step_more(jobs, seats):
    return correct(jobs, seats) + [[]]


@wrong_answer("continuous_batching", "end")
def the_last_step_is_missing(jobs, seats):
    return correct(jobs, seats)[:-1]


@wrong_answer("continuous_batching", "idle")
def ends_when_the_engine_idles(jobs, seats):
    steps = correct(jobs, seats)
    return steps[:steps.index([])] + [step for step in steps if step][steps.index([]):] if [] in steps else steps


@wrong_answer("continuous_batching", "idle")
def the_clock_jumps_to_the_next_arrival(jobs, seats):
    steps = []
    for step in correct(jobs, seats):
        if step:
            steps.append(step)
    return steps


@wrong_answer("continuous_batching", "arguments")
def jobs_are_popped(jobs, seats):
    steps, left = [], {}
    while jobs or left:
        while jobs and jobs[0][1] <= len(steps) and len(left) < seats:
            name, _, n = jobs.pop(0)
            left[name] = n
        steps.append(list(left))
        left = {name: n - 1 for name, n in left.items() if n > 1}
    return steps


@wrong_answer("continuous_batching", "state")
def steps_are_global(jobs, seats, steps=[]):
    steps += correct(jobs, seats)
    return steps
