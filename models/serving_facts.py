"""What the tiny model knows about LLM serving: every fact that it may state.

A class reads these answers, so each is meant to be true word for word.  The little model learns them by heart:
one wording a fact, very many wordings of the question (serving_qa.py makes them).  Four things belong to a fact:

    names   how the term may be called; they fill general patterns ("What is X?", "Explain X briefly.", ...)
    ask     further questions for training, in the small grammar of `serving_qa.expand`: "{a|b}" picks one side
    held    questions that are kept out of the training text: part of the examination
    keys    what an answer must contain to count as right: groups joined by "&", each one "this|or that"
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One fact: `answer` is the only wording that the model is taught."""
    id: str
    names: str
    answer: str
    keys: str
    ask: tuple[str, ...] = ()
    held: tuple[str, ...] = ()

    def is_stated_in(self, text: str) -> bool:
        """The key-word rule of the evaluation: every group has at least one of its alternatives in `text`."""
        text = " ".join(text.lower().split())
        return all(any(word in text for word in group.split("|")) for group in self.keys.split("&"))


def why(*statements: str) -> tuple[str, ...]:
    """Training questions for a reason: "Can you explain why decode is memory-bound?" """
    return tuple(pattern.replace("S.", statement + ".").replace("S?", statement + "?")
                 for statement in statements for pattern in
         (
        "{Tell me|Explain|Please explain|Explain to me} why S.", "{Can|Could} you {explain|tell me|say} why S?",
        "{I wonder|I want to know} why S.", "Do you know why S?", "What is the reason that S?",
        "I {do not|don't} understand why S.", "{Is it true that|Is it so that} S?", "Why do we say that S?"))


def difference(p: str, q: str) -> tuple[str, ...]:
    """Training questions for two terms side by side, in both orders: "Compare ITL and TPOT." """
    return tuple(pattern.replace("<1>", first).replace("<2>", second)
                 for first, second in ((p, q), (q, p)) for pattern in
         (
        "What is the difference between <1> and <2>?", "What's the difference between <1> and <2>?",
        "{Compare|Explain|Describe} <1> and <2>.", "How does <1> differ from <2>?", "How do <1> and <2> differ?",
        "{Explain|Tell me|Describe|Please explain} the difference between <1> and <2>.",
        "One question: <1> {or|versus|against} <2>, {what is the difference|how do they differ}?",
        "Are <1> and <2> the same{?| thing?}", "Is <1> the same as <2>?", "{Can|Could} you compare <1> {and|with} <2>?",
        "I {mix up|do not know the difference between} <1> and <2>.", "What {are|do you know about} <1> and <2>?"))


LIFE_OF_A_REQUEST = """\
A request arrives as text. The tokenizer turns the prompt into tokens, and the request joins the waiting queue. \
Before each step the scheduler has a token budget to spend. Running requests get their tokens first. \
Then waiting requests are admitted, as long as budget, places in the batch and free KV blocks are left.

If the prefix cache already holds the first blocks of the prompt, these blocks are reused and their tokens are not \
computed again. The rest of the prompt is the prefill. If it is longer than the budget, chunked prefill spreads it \
over several steps.

In each step the tokens of all scheduled requests form one flat batch. Every layer computes a query, a key and a \
value for each token. The slot mapping says where each key and value is written in the KV cache. Paged attention \
then follows the block table of the request and reads the keys and values of all earlier tokens.

With tensor parallelism every GPU holds its share of the heads, and an all-reduce adds the partial results two times \
in each layer. Only the last position of the prompt needs logits. The first output token is sampled from them, and \
the time until then is TTFT.

From now on the request decodes. Each step computes one token, writes its key and value in every layer, and reads \
the whole cache of the request. The time between two tokens is ITL. If no free block is left, the request that \
started last is preempted, and later it is computed again.

The request ends at an end token or at its length limit. Its blocks are freed, and the full ones stay in the prefix \
cache until their memory is needed. A later request with the same first tokens finds them there."""


FACTS = (
    # -- how serving is measured
    Fact("ttft", "TTFT|time to first token|the time to first token",
         "TTFT is the time to first token: the time from the arrival of a request until its first output token. It "
         "includes the waiting in the queue and the prefill of the prompt.", "first token|first output token&arrival",
         ("How long does {a user|one} wait for the first token, and what is it called?",
          "What is the {wait|time} {for|until} the first token called?",
          "Which metric {measures|covers} the wait for the first token?"),
         ("What do we call the time until the first token?",)),
    Fact("itl", "ITL|inter-token latency|the inter-token latency",
         "ITL is the inter-token latency: the time between one output token and the next one of the same request. A "
         "request with n output tokens has n minus 1 of these gaps.", "between&token&next",
         ("Which metric is the {gap|time} between two tokens?",
          "What is the {time|gap} between two output tokens called?"),
         ("How do we call the gap between two output tokens?",)),
    Fact("tpot", "TPOT|time per output token|the time per output token",
         "TPOT is the time per output token: the mean time of the output tokens after the first one. It is the "
         "end-to-end latency minus TTFT, divided by the number of output tokens minus 1.",
         "per output token&mean|minus ttft",
         ("How {is TPOT computed|do you compute TPOT|do we get TPOT}?",
          "What is the formula {for|of} TPOT?"), ("How can I calculate TPOT?",)),
    Fact("itl_tpot", "",
         "ITL is each single gap between two output tokens. TPOT is the mean of these gaps over one request. So a "
         "stall shows in ITL, but it can hide in TPOT.", "single|each&mean", difference("ITL", "TPOT"),
         ("In what way are ITL and TPOT different?", "Tell me how TPOT differs from ITL.")),
    Fact("e2e", "E2E latency|end-to-end latency|the end-to-end latency|E2E",
         "E2E latency is the end-to-end latency: the time from the arrival of a request until its last output token. "
         "It is TTFT plus the sum of all gaps between its tokens.", "arrival&last",
         ("How long does {the whole|a whole} request take, and what is it called?",
          "Which metric {measures|covers} the whole request?", "What is the time until the last token called?"),
         ("Which metric covers a request from its arrival to its last token?",)),
    Fact("throughput", "throughput|the throughput|serving throughput",
         "Throughput is the work that the engine finishes per second, such as output tokens per second or requests "
         "per second. It counts all requests together and says nothing about the wait of a single user.", "per second",
         ("How {is throughput measured|do we measure throughput}?",),
         ("In which unit do people measure throughput?",)),
    Fact("goodput", "goodput|the goodput",
         "Goodput is the number of requests per second that meet the SLO. A request that breaks a latency limit "
         "counts for throughput, but not for goodput.", "per second&slo|latency limit",
         (*difference("goodput", "throughput"), "Which requests {count for|belong to} goodput?"),
         ("Why is goodput not the same as throughput?", "Which requests does goodput count?")),
    Fact("slo", "SLO|an SLO|the SLO|service level objective|a service level objective",
         "An SLO is a service level objective: a target for a measured quality of the service. An example is that P99 "
         "TTFT stays below one second.", "service level objective|target&example|p99|quality",
         ("What does SLO stand for?", "Give {me |}an example of an SLO."),
         ("Can you show me an example of an SLO?",)),
    Fact("p99", "P99|P99 latency|the P99|the 99th percentile",
         "P99 latency is the 99th percentile: 99 percent of the requests are at least that fast, and 1 percent are "
         "slower. It shows the slow tail that a mean hides.", "99 percent|99th percentile&slow",
         ("Why do we {look at|report|measure} P99?", *why("the mean is not enough", "we report P99"),
          "Why is the mean not enough?", "Why P99 and not the mean?"),
         ("Why should I report P99 instead of the mean?",)),
    Fact("p50", "P50|P50 latency|the median|the P50",
         "P50 latency is the median: half of the requests are at least that fast, and the other half are slower.",
         "median&half"),
    Fact("latency_throughput", "",
         "Latency is the time that one request takes, and throughput is the work per second of all requests together. "
         "A larger batch raises throughput, but it also raises the latency of each step.",
         "one request&throughput&larger batch|per second",
         (*difference("latency", "throughput"),
          "How are {latency and throughput|throughput and latency} related?",
          "Why is there a trade-off between {latency and throughput|throughput and latency}?"),
         ("Why do latency and throughput pull in different directions?", "What sets latency apart from throughput?")),
    Fact("batch_size", "",
         "A larger batch reads the weights once for more requests, so throughput rises. But each step takes longer, "
         "so ITL gets worse, and more KV cache memory is needed.", "weights&throughput&longer|worse",
         ("What does a {larger|bigger} batch {do|change}?",
          "What is the {effect|trade-off} of {the|a larger} batch size?",
          "Why does {a larger|a bigger} batch {help|raise throughput}?",
          "Why does batching {help|raise throughput|help decode}?",
          "What happens {if|when} the batch {is larger|gets bigger|grows}?",
          *why("a larger batch raises throughput", "a larger batch makes ITL worse", "batching helps decode"),
          "{How large should the batch be|Should I use a large batch|What is the best batch size}?",
          "{Explain the batch size trade-off.|What is the batch size trade-off?}"),
         ("What is good and bad about a big batch?", "What do we pay for increasing the batch size?",
          "How does the batch size change throughput and ITL?")),
    Fact("lower_ttft", "",
         "TTFT gets lower with prefix caching, with a shorter queue and with more compute for prefill. Chunks that "
         "are too small make it higher, because the prompt then needs more steps.", "prefix caching&queue",
         ("How can {I|we|one} {lower|reduce|improve} TTFT?", "What {lowers|reduces|improves} TTFT?",
          "How {do I|do we} make the first token {faster|come sooner}?", "My TTFT is too high. What can I do?"),
         ("What can be done about a high TTFT?", "How does one get a better TTFT?")),
    # -- where keys and values live
    Fact("kv_cache", "KV cache|a KV cache|the KV cache|the key-value cache",
         "The KV cache stores the keys and values of all earlier tokens, in every layer. So each decode step computes "
         "only the new token and reads the rest from the cache.", "keys and values&earlier tokens",
         ("Why do we {need|use|have} a KV cache?", "What {is stored|do we store} in the KV cache?",
          "What does the KV cache {store|hold|contain}?", "What {is the KV cache good|do we need the KV cache} for?"),
         ("Why would an engine keep a KV cache?", "What can be found inside the KV cache?")),
    Fact("kv_size", "",
         "A token needs 2 x layers x KV heads x head size x bytes per number. For Llama-3-70B in FP16 this is 2 x 80 "
         "x 8 x 128 x 2 = 327,680 bytes, or 320 KiB.", "320 kib|327,680",
         ("How {much memory|many bytes} does {one|a} token {need|take} in the KV cache?",
          "How {large|big} is the KV cache {of one token|per token|of a token}?",
          "{How do I compute|What is the formula for} the size of the KV cache{ per token|}?",
          "How {large|big} is the KV cache of Llama-3-70B?"),
         ("How much KV cache memory goes to each token?",
          "Calculate the KV cache size of one token.")),
    Fact("kv_block", "KV block|a KV block|a block of the KV cache|KV blocks",
         "A KV block holds the keys and values of a fixed number of tokens, for example 16, in every layer. KV cache "
         "memory is given out and taken back in whole blocks.", "fixed number",
         ("How many tokens fit into {a|one} KV block?",), ("How many tokens does one KV block take?",)),
    Fact("block_table", "block table|a block table|the block table",
         "A block table lists which physical blocks of the KV cache hold the tokens of one request, in order. With "
         "blocks of 16 tokens, entry 0 is the block of tokens 0 to 15 and entry 1 the block of tokens 16 to 31.",
         "blocks&in order|entry&request",
         ("What does {the|a} block table {list|store|hold|contain|say}?",
          "Why does {a|each} request {have|need} a block table?",
          "What is {the|a} block table {good for|used for|for}?"),
         ("What information is in a block table?", "Why must the engine keep a block table?")),
    Fact("slot_mapping", "slot mapping|the slot mapping|a slot mapping",
         "The slot mapping gives, for each token of the batch, the slot of the KV cache where its key and value are "
         "written. A slot is the block number times the block size plus the offset in the block.",
         "slot mapping gives|block number&slot",
         ("What does the slot mapping {give|say|do}?",
          "How is {a|the} slot {number |}computed?", "Where is the key of a new token written?"),
         ("How do I get the slot of a token?", "What does an engine do with the slot mapping?")),
    Fact("prefix_cache", "prefix caching|the prefix cache|a prefix cache|prefix cache",
         "Prefix caching keeps the full KV blocks of earlier requests and reuses them when a new prompt starts with "
         "the same tokens. The shared prefix is not computed again, so TTFT is lower.",
         "reuses&same tokens|shared prefix",
         ("How does prefix caching {work|help}?",
          "What {happens|is reused} when two prompts start {with the same text|the same way}?",
          "Why does {a|the} prefix cache {help|lower TTFT|save work}?",
          "Two requests {share|have} the same system prompt. What happens?"),
         ("What is saved when two requests begin with the same prompt?",
          "Why is prefix caching useful for a shared system prompt?")),
    Fact("paged_attention", "paged attention|PagedAttention",
         "Paged attention computes attention over a KV cache that is stored in blocks of fixed size. A block table "
         "says where each block is, so a request needs no contiguous memory and little memory is wasted.",
         "computes attention&blocks",
         ("How does {paged attention|PagedAttention} work?",
          "Why {do we use|is there|use} paged attention?", "What is the {idea|point} of paged attention?"),
         ("Which problem does paged attention solve?", "How is memory handled by paged attention?")),
    Fact("fragmentation", "fragmentation|memory fragmentation|internal fragmentation",
         "Fragmentation is memory that is set aside but cannot be used. With KV blocks of 16 tokens, a request wastes "
         "at most 15 slots, in its last block.", "cannot be used|wastes",
         ("How much {memory|KV cache} {is wasted|does a request waste} with {paging|blocks}?",
          "How many slots are wasted?"), ("How many slots can a request waste?",)),
    Fact("eviction", "eviction|cache eviction|block eviction",
         "Eviction removes a cached block that no request uses, to make room for new tokens. The block that was used "
         "least recently goes first.", "no request uses&least recently|room",
         ("Which block is evicted {first|}?", "When is a {cached |}block evicted?", "How does eviction work?"),
         ("Which cached block is thrown out first?",)),
    Fact("ref_count", "reference count|the reference count|the reference count of a block",
         "The reference count of a block says how many requests use it. At 0 the block is free: it may be given to "
         "another request, but it stays in the prefix cache until then.", "how many requests&free|0",
         ("When is a block free?", "When {does a block become|is a block} free{ again|}?", *why("a block is free"),
          "How {does the engine know|do we know} that a block is free?"),
         ("How can one tell that a block is free?",)),
    # -- who runs in this step
    Fact("step", "step|an engine step|one step|a step of the engine",
         "A step is one round of the engine: the scheduler chooses the tokens, the model runs one forward pass, and "
         "every request whose known tokens are all computed gets one new token.", "scheduler&forward pass",
         ("What happens in {one|a|each} step{ of the engine|}?", "What does the engine do in {one|each} step?"),
         ("What goes on during a single step?",)),
    Fact("scheduler", "scheduler|the scheduler|a scheduler",
         "The scheduler decides before each step which requests run and how many tokens each of them gets. It must "
         "respect the token budget, the limit on running requests and the free KV blocks.",
         "which requests&budget|blocks",
         ("What does the scheduler {do|decide}?",
          "{What is the job of the|Why do we need a} scheduler?", "Who {decides|says} which requests run{ next|}?",
          "Who makes the batch{ of a step|}?", "How are the requests of a step chosen?"),
         ("What is decided by the scheduler?", "Who chooses the requests of a step?")),
    Fact("token_budget", "token budget|the token budget|a token budget|max_num_batched_tokens",
         "The token budget is the largest number of tokens that one step may compute, for all requests together. "
         "Running requests get their tokens first, and the rest goes to waiting requests.", "number of tokens&step",
         ("What does the token budget {limit|do|say}?", "How many tokens {may|can} one step compute?",
          "What does max_num_batched_tokens {mean|do|limit}?", "Why {is there|do we need} a token budget?"),
         ("Which limit does the token budget set?", "Who gets tokens first from the token budget?")),
    Fact("max_num_seqs", "max_num_seqs",
         "max_num_seqs is the largest number of requests that may run at the same time. When it is reached, the other "
         "requests wait in the queue.", "number of requests&wait|same time",
         ("How many requests {may|can} run at {once|the same time}?", "What does max_num_seqs {limit|do}?"),
         ("Which limit does max_num_seqs set?",)),
    Fact("chunked_prefill", "chunked prefill|prefill chunking",
         "Chunked prefill cuts a long prompt into pieces and computes them over several steps, together with decode "
         "tokens of other requests. So a long prompt does not stall the others.", "long prompt&pieces|steps",
         ("How does chunked prefill {work|help}?", "Why {do we use|is there|use} chunked prefill?",
          "What happens {to|with} a {very |}long prompt?",
          "Why {should|do} we cut a long prompt into {chunks|pieces}?"),
         ("Which problem does chunked prefill solve?", "Why would an engine split a long prompt?")),
    Fact("continuous_batching", "continuous batching",
         "Continuous batching decides at every step which requests are in the batch. A finished request leaves at "
         "once, and a waiting one takes its place without waiting for the others.",
         "every step&leaves|finished&waiting",
         ("How does continuous batching {work|help}?",
          "Why {do we use|use} continuous batching?", "Why is continuous batching better?",
          "What happens when a request {finishes|ends} in continuous batching?"),
         ("What makes continuous batching faster?", "When may a waiting request join with continuous batching?")),
    Fact("static_batching", "static batching|a static batch",
         "Static batching keeps one fixed batch until its longest request has finished. Short requests end early, but "
         "their places stay empty and new requests must wait.", "fixed batch|longest&wait|empty",
         ("How does static batching work?", "What is {bad|wrong} {about|with} static batching?",
          "Why is static batching {slow|bad|worse}?"),
         ("What is the weak point of static batching?",
          "Why does static batching waste so much time?")),
    Fact("static_continuous", "",
         "Static batching waits for the longest request of the batch before new ones may start. Continuous batching "
         "fills a free place at the very next step.", "longest&next step",
         (*difference("static batching", "continuous batching"),
          "What is the difference between {static and continuous|continuous and static} batching?",
          "Compare {static and continuous|continuous and static} batching.",
          "How do {static and continuous|continuous and static} batching differ?"),
         ("In what way are static and continuous batching different?",
          "Tell me how continuous batching differs from static batching.")),
    Fact("preemption", "preemption|a preemption|being preempted",
         "Preemption takes the KV blocks away from a running request when no free block is left. The request goes "
         "back to the waiting queue, and later its tokens are computed again.", "running request&no free block",
         ("Why is a request preempted?", *why("a running request is preempted", "a request loses its blocks"),
          "When {does preemption happen|is a request preempted|do we preempt}?",
          "What happens {to|with} a preempted request?",
          "What happens when {there are no free blocks|no free block is left|the KV cache is full}?",
          "How does preemption work?"),
         ("What does the engine do when it runs out of KV blocks?",
          "Why would a running request be preempted?")),
    Fact("recompute", "recompute|recomputation|recompute after preemption",
         "Recompute is the way a preempted request comes back: its KV cache was given up, so the engine computes its "
         "prompt and its earlier output tokens again. No output token is lost.", "comes back&again",
         ("How does a preempted request {come back|continue|resume}?", "What happens after {a|the} preemption?",
          "Does a preempted request lose {its|any} tokens?", "How does {recompute|recomputation} work?"),
         ("How can a request go on after a preemption?",)),
    Fact("waiting_queue", "waiting queue|the waiting queue",
         "The waiting queue holds the requests that have arrived but do not run yet. The scheduler admits them when "
         "budget and free KV blocks are left.", "arrived&do not run|admits",
         ("Where do new requests wait?",
          "Where {is a request kept|does a request stay} {until|before} it {runs|starts}?",
          "Where does a request go {first|when it arrives}?"),
         ("In which place does a request sit before the engine runs it?",)),
    Fact("fcfs", "FCFS|first come, first served",
         "FCFS means first come, first served: requests are admitted in the order of their arrival. With the priority "
         "policy, the most important one goes first instead.", "first come&order|arrival",
         ("In which order {are requests admitted|do requests start}?", "What does FCFS stand for?"),
         ("In what order does FCFS admit requests?",)),
    Fact("admission", "admission|admission control",
         "Admission control decides whether a waiting request may start. It may start when budget, a place in the "
         "batch and enough free KV blocks are left. A request that can never fit is refused.",
         "may start&blocks|refused",
         ("When {may|can} a waiting request start?",
          "When is a request {admitted|refused}?", "What is needed to admit a request?"),
         ("What must be free before a request is admitted?",)),
    Fact("head_of_line", "head-of-line blocking",
         "Head-of-line blocking means that a large request at the front makes all requests behind it wait, even small "
         "ones that could run.", "front&wait"),
    # -- what is computed
    Fact("prefill", "prefill|the prefill|the prefill phase",
         "Prefill computes all tokens of the prompt in parallel, writes their keys and values to the KV cache and "
         "gives the first output token. It is mostly compute-bound.",
         "all tokens of the prompt&compute-bound|parallel",
         ("What happens {in|during} {the |}prefill?",
          "How is the prompt {processed|computed}?"), ("What takes place in the prefill?",)),
    Fact("decode", "decode|the decode phase|decoding",
         "Decode produces the answer, one token per step for each request. Every step reads all the weights and the "
         "KV cache of the request. It is mostly memory-bound.", "one token per step&weights|kv cache",
         ("What happens {in|during} {decode|decoding|a decode step}?", "How is the answer {written|produced}?"),
         ("What takes place in a decode step?",)),
    Fact("prefill_decode", "",
         "The prefill computes the whole prompt in parallel and is limited by compute. The decode computes one token "
         "per step and is limited by memory bandwidth.", "limited by compute&limited by memory bandwidth",
         (*difference("prefill", "decode"), *difference("the prefill phase", "the decode phase")),
         ("In what way are prefill and decode different?", "Tell me how decode differs from prefill.",
          "What separates the decode from the prefill?")),
    Fact("why_decode", "",
         "Decode is memory-bound because each step computes only one token per request but must read all the weights "
         "and the KV cache from memory. The GPU waits for the bytes, not for the arithmetic.",
         "only one token&weights",
         ("Why is {decode|decoding|the decode phase|a decode step} {memory-bound|memory bound|limited by memory}?",
          "Why {is decode limited by|does decode wait for} memory?", "What makes decode memory-bound?",
          *why("decode is memory-bound", "decoding is limited by memory", "decode is slow"),
          "Is decode compute-bound or memory-bound?", "Why is {decode|decoding} {so |}slow?"),
         ("How come decode is memory-bound?", "For what reason is the decode memory-bound?",
          "Why does memory bandwidth limit the decode?", "Please say why decoding is memory-bound.")),
    Fact("why_prefill", "",
         "Prefill is compute-bound because it computes many tokens at once, so each weight that is read serves many "
         "tokens. The arithmetic takes longer than reading the weights.", "many tokens&arithmetic|weight",
         ("Why is {prefill|the prefill|the prefill phase} {compute-bound|compute bound|limited by compute}?",
          "What makes prefill compute-bound?", *why("prefill is compute-bound", "the prefill is limited by compute"),
          "Is prefill compute-bound or memory-bound?",
          "Why is {prefill|the prefill} {so efficient|efficient|not memory-bound}?"),
         ("How come prefill is compute-bound?", "For what reason is the prefill compute-bound?",
          "Why does compute limit the prefill?", "Please say why prefill is compute-bound.")),
    Fact("last_logits", "",
         "Only the last position of the prompt predicts the next token, so only this position needs logits. The other "
         "positions are computed for their keys and values.", "only the last position",
         ("Why {do we compute logits for only the last position|does only the last position need logits}?",
          "Which positions {need|get} logits{ in prefill|}?",
          "Why {do we need|are there} no logits for the other positions?",
          *why("only the last position needs logits", "only the last logits are computed")),
         ("Why are logits not needed at every position?",)),
    Fact("memory_bound", "memory-bound|a memory-bound kernel|the term memory-bound",
         "A memory-bound kernel is limited by memory bandwidth: moving its bytes takes longer than its arithmetic.",
         "limited by memory&longer|bytes"),
    Fact("compute_bound", "compute-bound|a compute-bound kernel|the term compute-bound",
         "A compute-bound kernel is limited by arithmetic: its operations take longer than moving its bytes.",
         "limited by arithmetic&longer|bytes"),
    Fact("roofline", "roofline|the roofline model|the roofline",
         "The roofline model bounds the speed of a kernel by two limits: the peak compute of the GPU, and the memory "
         "bandwidth times the arithmetic intensity. The lower one holds.", "peak compute&bandwidth",
         ("How does the roofline model work?", "What does the roofline {show|say|tell us}?"),
         ("Which two limits does the roofline combine?",)),
    Fact("intensity", "arithmetic intensity|the arithmetic intensity",
         "Arithmetic intensity is the number of arithmetic operations per byte moved from or to memory. A low value "
         "means memory-bound and a high value means compute-bound.", "operations per byte",
         ("How {is arithmetic intensity computed|do we compute arithmetic intensity}?",),
         ("In which unit is arithmetic intensity given?",)),
    Fact("attention", "attention|self-attention",
         "Attention lets each token look at itself and the tokens before it. It compares its query with their keys, "
         "and a softmax of these scores says how much of each value is taken.", "query&keys&softmax",
         ("How does attention work?", "How is attention computed?"),
         ("What is computed by attention?",)),
    Fact("gqa", "GQA|grouped-query attention",
         "GQA is grouped-query attention: several query heads share one key head and one value head. With 64 query "
         "heads and 8 KV heads, the KV cache is 8 times smaller than without sharing.", "query heads&share|smaller",
         ("Why {do we use|use|do models use} GQA?", "How does GQA {save memory|work|help}?",
          "What {is shared|do heads share} in GQA?"),
         ("How much memory can GQA save?",
          "Which heads are shared in GQA?")),
    Fact("rope", "RoPE|rotary position embedding|rotary embeddings",
         "RoPE is rotary position embedding: it rotates pairs of numbers in each query and key by angles that grow "
         "with the position. So positions enter a score only as the distance between two tokens.", "rotates&position",
         ("How does RoPE work?", "How does the model know the {position|order} of {a token|the tokens}?"),
         ("How are positions handled by RoPE?",)),
    Fact("tp", "tensor parallelism|TP|tensor parallel",
         "Tensor parallelism splits the weight matrices of every layer over several GPUs. Each GPU computes its share "
         "of the heads and of the MLP, and an all-reduce adds the partial results.", "splits|share&all-reduce",
         ("How does tensor parallelism work?", "How {is a model|are the weights} split over {several|8} GPUs?",
          "What does TP {stand for|do}?", "Why {do we use|use} tensor parallelism?"),
         ("How are the weights divided in tensor parallelism?", "What does each GPU compute in tensor parallelism?")),
    Fact("tp_kv", "",
         "With TP=8 and 8 KV heads, each GPU holds one KV head, so it stores one eighth of the KV cache. With more "
         "GPUs than KV heads, the KV heads must be copied.", "one kv head|one eighth",
         ("Why {8 KV heads|are 8 KV heads good} for {TP=8|8 GPUs}?",
          "How many KV heads does each GPU {hold|have} with TP=8?",
          "What happens {to|with} the KV cache with {TP=8|tensor parallelism}?",
          "How is the KV cache split with TP=8?"), ("How much of the KV cache is on each GPU with TP=8?",)),
    Fact("all_reduce", "all-reduce|an all-reduce|the all-reduce",
         "An all-reduce adds up one tensor from every GPU and gives the sum to all of them. Tensor parallelism has "
         "two in each layer: one after attention and one after the MLP.", "sum|adds&two|all of them",
         ("What does an all-reduce do?", "How many all-reduces are there {in a|in each|per} layer?",
          "Why {do we need|is there} an all-reduce?"), ("Where in a layer do we find an all-reduce?",)),
    Fact("pp", "pipeline parallelism|PP",
         "Pipeline parallelism puts different layers on different GPUs. Each GPU computes its layers and sends the "
         "activations to the next one.", "different layers&next"),
    Fact("nvlink", "NVLink",
         "NVLink is a fast direct link between GPUs. Tensor parallelism needs such a link, because the GPUs exchange "
         "data two times in every layer.", "link&gpus"),
    Fact("disaggregation", "disaggregation|PD disaggregation|prefill-decode disaggregation|disaggregated serving",
         "Disaggregation runs prefill and decode on different GPUs. The prefill side sends the KV cache to the decode "
         "side, so prefills do not slow down the decoding of other requests.", "different gpus&kv cache",
         ("Why {should|do} we {separate|split} prefill and decode?", "How does disaggregation work?",
          "What is sent from the prefill side to the decode side?"),
         ("What is gained by disaggregation?", "What does the prefill side send in disaggregation?")),
    Fact("spec", "speculative decoding|speculation",
         "Speculative decoding lets a cheap draft propose several tokens, and the big model checks them all in one "
         "forward pass. Accepted tokens are kept, so one pass can give several tokens.", "draft&checks|accepted",
         ("How does speculative decoding work?", "What does the draft model do?",
          "Why {use|do we use} speculative decoding?"), ("Who proposes the tokens in speculative decoding?",)),
    # -- how it is computed
    Fact("flash", "FlashAttention|flash attention",
         "FlashAttention computes attention tile by tile in fast on-chip memory and never writes the full score "
         "matrix to GPU memory. It is exact, because it uses online softmax.", "tile&score matrix|memory",
         ("How does {FlashAttention|flash attention} work?", "Why is {FlashAttention|flash attention} fast?",
          "Is FlashAttention {exact|an approximation}?"), ("How does FlashAttention avoid the full score matrix?",)),
    Fact("online_softmax", "online softmax|the online softmax",
         "Online softmax computes a softmax in one pass over the scores. It keeps a running maximum and a running "
         "sum, and rescales the sum when a larger score appears.", "running maximum&running sum|rescale",
         ("How does online softmax work?", "What does online softmax keep?"),
         ("Which two numbers does online softmax keep?",)),
    Fact("cuda_graph", "CUDA graph|a CUDA graph|CUDA graphs",
         "A CUDA graph records the kernel launches of one step and replays them with a single call. This saves launch "
         "time on the CPU, which matters most for small decode batches.", "records|replays&launch",
         ("Why {do we use|use} CUDA graphs?", "How {does a CUDA graph|do CUDA graphs} {help|work}?"),
         ("What is saved by a CUDA graph?",)),
    Fact("fusion", "kernel fusion|a fused kernel",
         "Kernel fusion joins several operations into one kernel, so values in between stay on the chip and are not "
         "written to memory and read back.", "one kernel&memory"),
    Fact("triton", "Triton",
         "Triton is a language inside Python for writing GPU kernels. A program works on one tile of the data, and "
         "many programs run in parallel.", "python&kernels"),
    Fact("quantization", "quantization",
         "Quantization stores the weights or the KV cache with fewer bits, for example 8 or 4 instead of 16. It saves "
         "memory and bandwidth, but the numbers are less exact.", "fewer bits&memory"),
    # -- the model and its tokens
    Fact("llm", "language model|a language model|an LLM|a large language model",
         "A language model predicts the next token of a text. By adding one token after another, it writes whole "
         "answers.", "predicts&next token", ("How does a language model write {a text|an answer}?",)),
    Fact("token", "token|a token",
         "A token is a piece of text, such as a word or a part of a word. A language model reads and writes text as a "
         "row of tokens.", "piece of text&word"),
    Fact("logits", "logits|the logits",
         "The logits are the scores that the model gives to every token of the vocabulary. A softmax turns them into "
         "probabilities.", "scores&vocabulary|probabilities"),
    Fact("temperature", "temperature|the temperature|sampling temperature",
         "The temperature divides the logits before the softmax. At 0 the most likely token is always taken, and a "
         "higher temperature makes the output more random.", "logits|random&most likely|higher",
         ("What does {the|a high} temperature do?",), ("How does the temperature change the output?",)),
    Fact("top_p", "top-p|top-p sampling",
         "Top-p sampling keeps the smallest set of most likely tokens whose probabilities add up to at least p, and "
         "draws from it.", "smallest set&probabilities"),
    Fact("greedy", "greedy decoding|greedy sampling",
         "Greedy decoding always takes the token with the highest logit. It uses no randomness.",
         "highest logit&no random"),
    Fact("streaming", "streaming",
         "Streaming sends each output token to the user as soon as it is sampled. The user sees the first word after "
         "TTFT and not after the whole answer.", "as soon as&token"),
    Fact("vllm", "vLLM",
         "vLLM is an open-source engine for LLM serving. It introduced paged attention, and its scheduler uses "
         "continuous batching.", "open-source|engine&paged attention"),
    Fact("nano_serve", "nano-serve|this engine",
         "nano-serve is a small LLM serving engine that was written to be read. It has a scheduler, a paged KV cache, "
         "tensor parallelism and its own kernels, under the names that vLLM uses.", "small&engine"),
    Fact("life", "", LIFE_OF_A_REQUEST, "waiting queue&scheduler&prefill&kv cache&block table&freed",
         ("{Walk me through|Describe|Explain|Tell me about} the life of {a|one} request{.|, step by step.|, from its "
          "arrival to its last token.}",
          "What happens to a request {from its arrival to its last token|from start to end|in this engine|on its way "
          "through the engine}?", "How does {a|one} request travel through {the|this} engine?",
          "{Please walk|Walk} me through {one|a} request, from {the|its} {arrival|prompt} to {the|its} last token.",
          "{Explain|Describe} step by step {how a request is served|what happens to a request}.",
          "Please explain {step by step |}how a request {is served|travels through this engine}{.| from start to "
          "end.}"),
         ("Follow one request through the engine and say what you see.",
          "Which way does a request take through the engine?")),
)

BY_ID = {fact.id: fact for fact in FACTS}
