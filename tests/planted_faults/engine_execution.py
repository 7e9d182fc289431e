"""Faults in what runs a step: batch, sampler, calibration, reference kernels."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

_BATCH = ("engine/execution/test_batch.py",)
_SAMPLER = ("engine/execution/test_sampler.py",)
_LOGPROBS = ("engine/execution/test_logprobs.py",)
_RUNNER = ("engine/execution/test_model_runner.py",)
_REQUEST = ("engine/test_request.py",)
_ENGINE = ("engine/test_engine.py",)
_LLM = ("engine/test_llm.py",)
_RECORDED = ("engine/execution/test_recorded_steps.py",)
_KERNELS = (
    "kernels/test_cpu_attention.py",
    "kernels/test_cpu_elementwise.py",
    "engine/models/test_models_parity.py",
)

EXECUTION: list[Fault] = [
    Fault(
        "engine/execution/batch.py",
        "    positions = np.arange(total) + (starts - query_start[:-1])[rows]",
        "    positions = np.arange(total) - query_start[:-1][rows]",
        _BATCH,
        "a chunk's positions begin at 0",
    ),
    Fault(
        "engine/execution/batch.py",
        "query_start[1:][samples] - 1",
        "query_start[:-1][samples]",
        _BATCH,
        "a chunk samples from its first row",
    ),
    Fault(
        "engine/execution/batch.py",
        "context_lens=_tensor(ends.astype(np.int32), device)",
        "context_lens=_tensor(lengths.astype(np.int32), device)",
        _BATCH,
        "the context is the new tokens alone",
    ),
    Fault(
        "engine/execution/random.py",
        "    return _signed(_mix(outer ^ ((position + 1) * _GOLDEN & _MASK)))",
        "    return _signed(outer)",
        _SAMPLER,
        "every position draws the same number",
    ),
    Fault(
        "engine/seeds.py",
        '    digest = hashlib.blake2b(f"{seed}#{sequence}".encode(), digest_size=8).digest()',
        '    digest = hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest()',
        ("engine/test_llm_sequences.py",),
        "all choices of a request but the first draw alike",
    ),
    Fault(
        "engine/execution/sampler.py",
        "        if row.forbidden:\n",
        "        if row.forbidden and index == 0:\n",
        _SAMPLER,
        "only the first row of a batch heeds its forbidden tokens",
    ),
    Fault(
        "engine/execution/sampler.py",
        "    scaled.div_(temperature).exp_()",
        "    scaled.div_(temperature[0]).exp_()",
        _SAMPLER,
        "all rows take the first one's temperature",
    ),
    Fault(
        "engine/execution/sampler.py",
        "    thresholds = [row.params.min_p for row in rows]",
        "    thresholds = [0.0 for row in rows]",
        _SAMPLER,
        "min_p is ignored",
    ),
    Fault(
        "engine/execution/sampler.py",
        "min(rows[i].params.top_k, width) - 1] for i in limited]",
        "min(rows[i].params.top_k, width - 1)] for i in limited]",
        _SAMPLER,
        "top_k keeps one token more",
    ),
    Fault(
        "engine/execution/sampler.py",
        "    place = int(np.searchsorted(np.cumsum(likely, dtype=np.float64), top_p * total))",
        "    place = int(np.searchsorted(np.cumsum(likely, dtype=np.float64), top_p * total)) - 1",
        _SAMPLER,
        "top_p drops the token that completes the nucleus",
    ),
    Fault(
        "engine/execution/logprobs.py",
        "        tuple(next(values) - normaliser for _ in several)",
        "        tuple(next(values) for _ in several)",
        _LOGPROBS,
        "log probabilities are not normalized",
    ),
    Fault(
        "engine/execution/logprobs.py",
        "            found[index].append((-value, token))",
        "            found[index].append((-value, -token))",
        _LOGPROBS,
        "ties go to the higher id",
    ),
    Fault(
        "engine/execution/calibration.py",
        "        if 0.0 < each <= one:",
        "        if 0.0 < each:",
        ("engine/kv/test_kv_cache.py",),
        "a copy's fixed cost can become negative",
    ),
    Fault(
        "engine/execution/calibration.py",
        "int(rate * STEP_SECONDS + 8) // 16 * 16",
        "int(rate * STEP_SECONDS)",
        ("engine/kv/test_pool_size.py",),
        "the token budget is no multiple of 16",
    ),
    Fault(
        "engine/execution/model_runner.py",
        "params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)",
        "() if params.ignore_eos else self.eos_token_ids",
        _RUNNER,
        "a stop token may come before min_tokens",
    ),
    Fault(
        "engine/execution/model_runner.py",
        "            first, last = chunk.start // size, (chunk.start + chunk.length - 1) // size",
        "            first, last = chunk.start // size, chunk.start // size",
        _RUNNER,
        "a chunk is said to write its first block alone",
    ),
    Fault(
        "kernels/reference.py",
        "            visible = k_position <= q_position\n",
        "            visible = k_position <= q_position.max()\n",
        _KERNELS,
        "attention is not causal within a chunk",
    ),
    Fault(
        "kernels/reference.py",
        "                visible &= k_position > q_position - window",
        "                visible &= k_position >= q_position - window",
        _KERNELS,
        "a sliding window is one token too wide",
    ),
    Fault(
        "kernels/reference.py",
        "                scores = self.soft_cap(scores, options.soft_cap)",
        "                pass",
        _KERNELS,
        "the soft cap of attention is ignored",
    ),
    Fault(
        "kernels/reference.py",
        "    Activation.SILU: F.silu,",
        "    Activation.SILU: F.gelu,",
        _KERNELS,
        "the activation is another one",
    ),
    Fault(
        "kernels/reference.py",
        "torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)",
        _KERNELS,
        "positions rotate the wrong way round",
    ),
    Fault(
        "engine/request.py",
        "    if set(map(type, token_ids)) - {int}:",
        "    if not all(isinstance(token, int) for token in token_ids):",
        _REQUEST,
        "true is token 1",
    ),
    Fault(
        "engine/request.py",
        "max(token_ids) < limits.vocab_size",
        "max(token_ids) <= limits.vocab_size",
        _REQUEST,
        "one token too many is in the vocabulary",
    ),
    Fault(
        "engine/request.py",
        '            _check_token_ids(output, limits, "outputs")\n',
        "            pass\n",
        _REQUEST,
        "tokens of a moved request are not checked",
    ),
    Fault(
        "engine/engine_thread.py",
        "        if isinstance(request_id, str):\n            self._inbox",
        "        if True:\n            self._inbox",
        _ENGINE,
        "an abort of nothing stops the engine",
    ),
    Fault(
        "engine/scheduling/intake.py",
        "        total = check(request, self._limits)",
        "        total = len(request.token_ids) + (request.params.max_tokens or 1)",
        _ENGINE,
        "what a caller changes after it has submitted it reaches the model",
    ),
    Fault(
        "engine/engine.py",
        "            elif no_memory and part[0].length > 1:",
        "            elif False:",
        _ENGINE,
        "a long chunk that finds too little memory alone fails",
    ),
    Fault(
        "engine/llm.py",
        "        return RequestResult(request.token_ids, last[min(last)].cached_tokens, sequences, error)",
        "        return RequestResult(request.token_ids, last[min(last)].cached_tokens, sequences)",
        _LLM,
        "a failed request looks like one that has ended",
    ),
    Fault(
        "engine/execution/recorded_steps.py",
        "        self._metadata.context_lens[:count] = metadata.context_lens\n",
        "",
        _RECORDED,
        "a replayed step sees the contexts of the recorded one",
    ),
    Fault(
        "engine/execution/recorded_steps.py",
        "        self._metadata.block_tables[:count, : metadata.block_tables.shape[1]] = metadata.block_tables\n",
        "",
        _RECORDED,
        "a replayed step reads the blocks of others",
    ),
    Fault(
        "engine/execution/recorded_steps.py",
        "if not possible or not batch.decodes or",
        "if not possible or",
        _RECORDED,
        "a prompt is replayed as if each token were a request",
    ),
    Fault(
        "engine/execution/batch.py",
        "    decodes = bool(samples.all()) and total == len(chunks) > 0",
        "    decodes = total == len(chunks) > 0",
        (*_BATCH, *_RECORDED),
        "a chunk of one token that does not sample is taken for a decode",
    ),
    Fault(
        "kernels/cpu/calls.py",
        "        if kept_for_all:",
        "        if False:",
        _RECORDED,
        "the sampled rows of attention and of the residual share a buffer",
    ),
    Fault(
        "kernels/cpu/calls.py",
        "            self._kept.append(buffer)\n",
        "            self._buffers.pop(use)\n",
        _RECORDED,
        "a recording allocates its buffers anew, and keeps none of them",
    ),
]
