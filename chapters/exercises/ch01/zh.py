"""Chapter 1's rules in Chinese."""
ZH = {
    # 1  kv_bytes_per_token
    "A token leaves two vectors in the cache: its key and its value.": "一个 token 在缓存里留下两个向量：K 和 V。",
    "Each layer has a K and a V of its own for the token: twice the layers keep twice as much.":
        "每一层都为这个 token 存一份自己的 K 和 V：层数翻倍，缓存也翻倍。",
    "The vector of a head has head_dim numbers.": "每个头的向量有 head_dim 个数。",
    "Each KV head keeps a vector of its own: twice the KV heads keep twice as much.":
        "每个 KV 头都存一份自己的向量：KV 头翻倍，缓存也翻倍。",
    "Only KV heads are cached. With GQA several query heads read the same one; queries are never kept, and their "
    "number doesn't matter.":
        "缓存里只有 KV 头。GQA 下多个 Q 头共读同一个 KV 头；Q 用完即弃，有多少个 Q 头都无所谓。",
    "Each number takes dtype_bytes bytes, whatever the model is usually stored in.":
        "每个数占 dtype_bytes 字节，不管模型通常用什么精度存储。",
    "The answer is in bytes: not in numbers, bits, KiB or MB.": "答案以字节为单位：不是数的个数，也不是 bit、KiB 或 MB。",
    "It is one product: K and V, layers, KV heads, head_dim, bytes a number, and nothing is added to it.":
        "它就是一个连乘积：K 和 V、层数、KV 头数、head_dim、每个数的字节数，没有任何加项。",
    # 2  max_concurrency
    "As many requests fit as the blocks that can be handed out hold side by side: the pool's blocks divided by the "
    "blocks of one request.":
        "能同时容纳多少请求，看可分配的块够几个请求并排放：池里的块数除以一个请求占的块数。",
    "Whole requests are counted: what is left over holds a part of one, and that is none.":
        "只数完整的请求：剩下的块只放得下半个请求，那就不算。",
    "Prompt and output are both kept. A request is largest at its end, and that is what has to fit.":
        "prompt 和输出都要保留。请求在结束时最大，要放得下的正是那时的它。",
    "A request owns whole blocks, and shares none: its last block is its own even when almost empty.":
        "请求独占整块，不与别人共用：最后一块哪怕几乎是空的，也归它自己。",
    "Prompt and output are one sequence: the output goes on in the prompt's last block.":
        "prompt 和输出是同一个序列：输出接着写进 prompt 的最后一块。",
    "Block 0 is the null block. It is part of the memory, but never handed out.": "0 号块是空块：它占着显存，但从不分配出去。",
    "The token sampled last is never fed in, so it has no K and V: prompt + output - 1 are stored.":
        "最后采样出的 token 不会再输入模型，因此没有 K 和 V：实际存储的是 prompt + output - 1 个。",
    "The memory holds whole blocks only; what is left over at its end is too small for one.":
        "显存里只有完整的块；末尾剩下的那点不够一块。",
    "A block holds block_size tokens, whatever vLLM's default is.": "一个块放 block_size 个 token，不管 vLLM 的默认值是多少。",
    "A pool too small for one request holds none: 0.": "池子连一个请求都放不下时，答案就是 0。",
    "A pool without any block to hand out holds no request: 0, and never less than that.":
        "池子里没有可分配的块时，一个请求也放不下：答案是 0，不会比 0 更小。",
    # 3  latencies
    "The answer is a dict with exactly the keys ttft, itls, tpot and e2e.":
        "答案是一个字典，键恰好是 ttft、itls、tpot 和 e2e。",
    "All times are in seconds, as those that you are given: no milliseconds.": "所有时间都以秒为单位，与给你的一致：不是毫秒。",
    "Times are neither rounded nor cut.": "时间既不四舍五入，也不截断。",
    "TTFT runs from the arrival to the first token: the user feels the wait in the queue, too.":
        "TTFT 从请求到达算到第一个 token：排队的等待，用户同样感受得到。",
    "ITLs are the gaps between one token and the next, a list: N tokens have N - 1, in order, and the TTFT is none.":
        "ITL 是相邻两个 token 之间的间隔，按顺序列出：N 个 token 有 N - 1 个，TTFT 不在其中。",
    "TPOT is the mean gap after the first token: from the first token to the last, divided by N - 1.":
        "TPOT 是首个 token 之后的平均间隔：从第一个 token 到最后一个的时间，除以 N - 1。",
    "Two tokens have one gap between them, and that gap is their TPOT.": "两个 token 之间只有一个间隔，这个间隔就是 TPOT。",
    "A single token has no gap after it: its TPOT is None, and its list of ITLs is empty.":
        "只有一个 token 时，后面没有间隔：TPOT 为 None，ITL 列表为空。",
    "End-to-end latency runs from the arrival to the last token.": "端到端时延从请求到达算到最后一个 token。",
    "a dict with the keys {keys}": "一个字典，键为 {keys}",
    "{key} is {value}": "{key} 为 {value}",
    # 4  static_waste
    "The answer is a pair of token counts: first all that were computed, then those of them that were wasted.":
        "答案是一对 token 数：先是总共计算了多少，再是其中浪费了多少。",
    "The prompts are computed, too: a batch's first step feeds in every position of them.":
        "prompt 也要计算：一个批次的第一步要把它的每个位置都送进模型。",
    "The prefill yields the first token, and the last is never fed in: n tokens take n - 1 decodes.":
        "Prefill 产出第一个 token，最后一个又不再输入：n 个 token 需要 n - 1 次 Decode。",
    "All rows are computed until the batch's longest has its last token, those that have ended, too.":
        "所有行都要一直算到批次里最长的请求得到最后一个 token，已经结束的行也不例外。",
    "Prompts are padded to the batch's longest: the padding is computed, and nobody needs it.":
        "prompt 要填充到批次里最长的那个：填充部分照样参与计算，却没有人需要。",
    "A rectangle is as wide as the longest prompt, and then as the longest output, whosoever they are.":
        "矩形的宽度是最长的 prompt 加上最长的输出，两者不必来自同一个请求。",
    "Each batch is a rectangle of its own, as long as its own longest.": "每个批次自成一个矩形，长度由它自己最长的请求决定。",
    "Batches are taken in the order of the jobs, max_num_seqs at a time: nobody is sorted.":
        "按任务给出的顺序组批，每次取 max_num_seqs 个：不做任何排序。",
    "A row is a request: a batch that is not full has fewer rows, and no empty ones.":
        "一行就是一个请求：没满的批次行数更少，没有空行。",
    "The last batch counts as well, even if it is not full.": "最后一个批次即使没满，也要算进去。",
    "Wasted is what was computed and not needed: padding, and the rows of those that have ended.":
        "浪费的是算了却没人需要的部分：填充，以及已经结束的请求占着的行。",
    "Without jobs nothing is computed: (0, 0).": "没有任务就没有计算：(0, 0)。",
    # 5  continuous_batching
    "The answer is a list with a list of names for each step.": "答案是一个列表，每一步对应一个名字列表。",
    "A request takes part once in a step.": "一个请求在一步里只出现一次。",
    "Nobody takes part before having arrived.": "还没到达的请求不能参加。",
    "A step in which nobody is there is a step: an empty list, and the clock goes on.":
        "没有请求的一步也是一步：记为空列表，时钟照走。",
    "Who has had the last token is gone from the next step on.": "拿到最后一个 token 的请求，从下一步起就离开了。",
    "Who is running takes part in each step, until the last token: n tokens take n steps.":
        "正在运行的请求每一步都参加，直到最后一个 token：n 个 token 需要 n 步。",
    "Never more than max_num_seqs at once: a seat is free in the step after its owner's last, not before.":
        "同时参加的不能超过 max_num_seqs 个：座位要等占用者最后一步之后才空出来，不会更早。",
    "First come, first served: nobody overtakes, however short.": "先来先服务：再短的请求也不能插队。",
    "Who is there joins as soon as a seat is free: nobody waits for the others to end.":
        "只要有空位，已到达的请求就立刻加入：不必等别人都结束。",
    "It goes on until everybody has had all tokens, with an entry for each step, and then it ends.":
        "一直进行到所有请求都拿到全部 token，每一步都有一条记录，然后结束。",
    "a list of steps like {step}": "由每一步组成的列表，每一步形如 {step}",
    "step {i}: {names}": "第 {i} 步：{names}",
    "{n} steps, then everybody has ended": "共 {n} 步，之后所有请求都已结束",
    "ends after {n} steps": "{n} 步之后就结束了",
    "{n} steps; in step {i}: {names}": "共 {n} 步；第 {i} 步：{names}",
    "nobody": "无人",
    # the lab
    "A step begins by asking the scheduler, once: nobody else decides who computes how much.":
        "一步从询问调度器开始，而且只问一次：谁算多少，只由它决定。",
    "What the scheduler planned is run, all of it and once: one batch, one forward pass.":
        "调度器计划了什么就运行什么，全部运行，且只运行一次：一个批次，一次前向传播。",
    "A plan may be empty. Then nothing is run, and the scheduler is told all the same.":
        "计划可能是空的：这时不运行任何东西，但仍要把结果交还调度器。",
    "Logits have a row for each request that has now computed all its tokens, in the order of the plan: only those "
    "requests get a token, and each the one of its own row.":
        "凡是已算完全部 token 的请求，在 logits 里各占一行，顺序与计划一致：只有它们得到 token，而且各取自己那一行的。",
    "The tokens go back to the scheduler once, with the plan that they belong to.":
        "token 连同它们所属的计划一起交还调度器，只交一次。",
    "The scheduler appends the tokens: a step that appends them, too, has them twice.":
        "追加 token 是调度器的事：自己再追加一遍，就会重复。",
    "The token is drawn by sample, from the logits of this very step.": "token 由 sample 从本步的 logits 里采样得到。",
    "After each step the accounts hold: who runs, who waits, which blocks are whose.":
        "每一步之后账目都要对得上：谁在运行，谁在等待，哪些块归谁。",
    "sample answers None for a row that is not finite: that request is ended with \"error\", before the others' tokens "
    "are handed back, and the others go on.":
        "某一行不是有限数时，sample 返回 None：先以 \"error\" 结束那个请求，再交还其他请求的 token，其他请求继续。",
    "If the forward pass fails, the error gets out, and nobody goes on: the blocks of this step were counted as "
    "computed and are not. So all requests are aborted.":
        "前向传播失败时，异常要抛出去，谁也不能继续：本步的块已记为算好，其实没有。所以要中止所有请求。",
    "If the forward pass fails, the prefix cache is reset: schedule has published this step's blocks, and nothing is "
    "in them.":
        "前向传播失败时要清空前缀缓存：schedule 已经发布了本步的块，里面却什么也没有。",
    "trace {run}, step {k}: {what}": "轨迹 {run} 第 {k} 步：{what}",
    "{plan} planned": "计划了 {plan}",
    "{tokens} handed back": "交还了 {tokens}",
    "the scheduler was asked {n} times": "问了调度器 {n} 次",
    "{error}": "{error}",
    "an empty plan, and nothing to run": "计划为空，没有东西可运行",
    "{n} forward passes, of {tokens} tokens": "{n} 次前向传播，token 数为 {tokens}",
    "one of {n} tokens": "一次，{n} 个 token",
    "tokens handed back {n} times": "交还了 {n} 次 token",
    "{names} ended": "{names} 结束",
    "nothing": "无",
    "accounts that hold": "账目对得上",
    "prompt {i}, token {k}: {tokens}": "第 {i} 个 prompt，从第 {k} 个 token 起：{tokens}",
    "blocks are still held at the end": "结束时仍有块未释放",
    "request {i} ended with {reason}": "请求 {i} 的结束原因为 {reason}",
    "other tokens: {tokens}": "token 不同：{tokens}",
    "the error got out: {raised}; still there: {left}": "抛出的异常：{raised}；仍然留着的请求：{left}",
    "no": "没有",
    "a new request finds {n} blocks of it": "新请求能在其中命中 {n} 块",
    "vLLM's traces, 8 of its runs": "vLLM 的轨迹，取其中 8 次运行",
    "the tokens of the engine's own step, and the accounts after each": "与引擎自己的 step 生成同样的 token，且每一步之后账目都对",
    "a request whose logits are not finite": "某个请求的 logits 不是有限数",
    "a forward pass that fails": "前向传播失败",
}
