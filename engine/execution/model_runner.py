"""Runs one step on the device: batch, decoder, sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import abc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from engine.capacity import kv_bytes_per_token
from engine.config import EngineConfig
from engine.devices import resolve_device, usable_cores
from engine.errors import ConfigError
from engine.execution.batch import Batch, Layout, lay_out
from engine.execution.calibration import MAX_BUDGET
from engine.execution.recorded_steps import RecordedSteps
from engine.execution.sampler import Sampler, SampleRow, both_allowed, choices_of, edit_after
from engine.kv.kv_cache import KVCache
from engine.kv.pool_size import available_memory, free_ram, plan_pool
from engine.kv.transfers import Transfers
from engine.models.config import ModelConfig, context_length
from engine.models.folders import local_folder, name_of
from engine.models.identity import ModelIdentity, model_revision, tokenizer_digest
from engine.models.loader import load_model
from engine.prompt_logprobs import PromptLogprobs
from engine.request import ModelLimits
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Choice, Outcome
from engine.scheduling.sequence import ScheduledChunk, Sequence
from engine.scheduling.speculation import MAX_ROWS
from engine.seeds import sequence_seed
from engine.sizes import format_bytes
from engine.structured.matcher import Matcher
from kernels import AttentionMetadata, get_kernels
from kernels.interface import Choices

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = 64
"""Rows of a prompt whose logits are held at once."""

_MANY_ROWS = 17  # float32 products on a GPU have a kernel of their own from here on

LogitsHook = Callable[[abc.Sequence[Sequence], Tensor], None]
"""Sees the sequences that sample in a step and their logits, float32 ``[S, vocab]``, before sampling.

Not those of drafts.
"""


class ModelRunner:
    """Owns the weights, the KV tensor and the sampler of one engine. Used by one thread.

    Raises:
        ConfigError: the model cannot be loaded, or there is too little memory for it and its KV pool.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.device = resolve_device(config.device)
        self.num_threads = config.num_threads or usable_cores()
        if self.device.type == "cpu" and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        folder = self.folder = local_folder(config.model)
        try:
            kernels = get_kernels(config.kernels, self.device, self.num_threads)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            self.decoder = load_model(
                folder, kernels, config.dtype, self.device, config.weights, config.max_model_len
            )
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise ConfigError(
                f"the model in {folder} does not fit the memory of {self.device}: {format_bytes(free)} of "
                f"{format_bytes(total)} are free; choose a smaller model or dtype, or another device"
            ) from error
        self._one_torch_thread = self.device.type == "cpu" and kernels.own_threads
        self.model: ModelConfig = self.decoder.config
        self.dtype: torch.dtype = self.decoder.dtype
        self.max_model_len = context_length(config.max_model_len, self.model)
        types = ", ".join(filter(None, (str(self.dtype), self.decoder.weight_form)))
        self.identity = ModelIdentity(model_revision(folder), types, tokenizer_digest(folder))
        self.model_key = (self.identity.revision, self.identity.dtype, config.block_size)
        """What the KV of a block depends on besides its tokens and namespace."""

        self.bytes_per_token = kv_bytes_per_token(self.model, self.dtype.itemsize)
        reserve = self._step_bytes(config.token_budget or 2048, config.max_num_seqs)
        available = available_memory(self.device, config.memory_fraction, reserve)
        self.memory = plan_pool(
            config, self.device.type, self.bytes_per_token, self.max_model_len, available, free_ram()
        )
        self.kv_cache = KVCache(
            self.model,
            self.memory.num_blocks,
            config.block_size,
            self.dtype,
            self.device,
            self.memory.host_blocks,
        )
        self._steps = RecordedSteps(
            self.decoder,
            self.kv_cache.pool,
            config.token_budget or MAX_BUDGET,
            min(max(config.max_num_seqs, MAX_ROWS), config.token_budget or MAX_BUDGET),
            -(-self.max_model_len // config.block_size),
        )
        self.sampler = Sampler(self.decoder.kernels)
        self.eos_token_ids = self.model.eos_token_ids
        self.on_logits: LogitsHook | None = None
        self._many = False  # many_steps() is entered
        self._probe_cache = KVCache(self.model, 1, 1, self.dtype, self.device)
        logger.info(
            "%s (%s, %.0f M parameters) in %s on %s with %s kernels, %s",
            name_of(folder),
            self.model.architecture,
            self.model.num_parameters / 1e6,
            types.removeprefix("torch."),
            self.device,
            kernels.name,
            "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads",
        )
        logger.info(
            "KV pool: %d tokens in %d blocks of %d, %s a token, %s in all; %.1f sequences of %d tokens fit",
            self.memory.tokens,
            self.memory.num_blocks,
            config.block_size,
            format_bytes(self.bytes_per_token),
            format_bytes(self.memory.bytes),
            self.memory.tokens / self.max_model_len,
            self.max_model_len,
        )
        if self.memory.host_blocks:
            logger.info(
                "swap space: %s of RAM, %d tokens in %d blocks; recovery of preempted requests: %s",
                format_bytes(self.memory.host_bytes),
                self.memory.host_blocks * config.block_size,
                self.memory.host_blocks,
                config.recovery,
            )

    def limits(self) -> ModelLimits:
        """The limits for requests here."""
        return ModelLimits(
            self.model.vocab_size, self.max_model_len, self.memory.num_blocks, self.memory.block_size
        )

    def run(self, chunks: abc.Sequence[ScheduledChunk]) -> list[Outcome]:
        """Compute ``chunks`` and choose for each that samples, in their order.

        The outcome is a token, or for a sequence of a group, the candidates that the group's next step needs.
        For a chunk with drafts, it is one such choice for each row before which all drafts were right. Running
        the same chunks again writes the same keys and values and chooses the same tokens, so a step that failed
        half-way may be repeated in parts.
        """
        if self._many:
            return self._run(chunks)
        with self.many_steps():
            return self._run(chunks)

    @contextlib.contextmanager
    def many_steps(self) -> Iterator[None]:
        """Set what each step needs of torch once, for all steps that this thread runs in here.

        Torch's few small operations of a step are not worth a second pool that spins on the kernels' cores.
        """
        threads, many = torch.get_num_threads(), self._many
        if self._one_torch_thread:
            torch.set_num_threads(1)
        self._many = True
        try:
            with torch.inference_mode():
                yield
        finally:
            self._many = many
            if self._one_torch_thread:
                torch.set_num_threads(threads)

    def _run(self, chunks: abc.Sequence[ScheduledChunk]) -> list[Outcome]:
        self.kv_cache.before_writing(self._written(chunks))
        sampling = [chunk for chunk in chunks if chunk.samples]
        rows = [
            self._sample_row(chunk.sequence, drafts)
            for chunk in sampling
            for drafts in range(1 + len(chunk.drafts))
        ]
        # A row that draws has more panels computed, and for itself alone, so it counts twice.
        work = sum(1 if row.params.greedy else 2 for row in rows)
        few = 0 < work <= self.decoder.screened_rows and self.on_logits is None
        logits = self._logits(chunks, choices_of(rows) if few else None)
        if not sampling:
            return []
        if self.on_logits is not None:
            self.on_logits([chunk.sequence for chunk in sampling], logits[_first_rows(sampling)])
        choices = self.sampler.sample(logits, rows)
        return [*choices] if len(rows) == len(sampling) else _verified(sampling, choices)

    def _logits(self, chunks: abc.Sequence[ScheduledChunk], choices: Choices | None) -> Tensor:
        layout = lay_out(chunks, self.kv_cache.block_size)
        scored = [] if layout.decodes else _scored_rows(chunks)
        if scored:
            return self._forward_scoring(layout.batch(self.device), scored)
        return self._steps.forward(layout, choices)

    def advance_grammars(self, chunks: abc.Sequence[ScheduledChunk]) -> list[tuple[Sequence, str]]:
        """Compute which tokens the grammars of sampling sequences allow next; call before :meth:`run`.

        Returns the sequences whose grammar cannot continue, and why; tokens chosen for them do not count.
        """
        failed: list[tuple[Sequence, str]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.grammar is None or not chunk.samples:
                continue
            matcher = sequence.matcher
            if matcher is None:
                matcher = sequence.matcher = Matcher(sequence.grammar)
            unwanted = self._forbidden(sequence)
            if sequence.params.ignore_eos:
                unwanted += self.eos_token_ids
            new = sequence.token_ids[sequence.output_start + matcher.advanced :]
            error = matcher.advance(new, unwanted)
            if error is not None:
                failed.append((sequence, error))
        return failed

    def _forward_scoring(self, batch: Batch, scored: abc.Sequence[_ScoredRows]) -> Tensor:
        """As :meth:`RecordedSteps.forward`; also gathers the log probabilities of prompts.

        Their logits are computed ``_SCORED_AT_ONCE`` rows at a time: those of a long prompt would fill the
        memory.
        """
        decoder, num_samples = self.decoder, batch.sample_rows.shape[0]
        rows = [row for each in scored for row in each.rows]
        all_rows = torch.cat([batch.sample_rows, torch.tensor(rows, device=self.device)])
        hidden = decoder.kernels.in_buffers(
            lambda: decoder.hidden(batch.token_ids, self.kv_cache.pool, batch.metadata, all_rows)
        ).clone()
        begin = num_samples
        for each in scored:
            asked = each.asked
            first, tokens = len(asked.entries), each.tokens
            for start in range(0, len(tokens), _SCORED_AT_ONCE):
                some = tokens[start : start + _SCORED_AT_ONCE]
                logits = decoder.logits(hidden[begin + start : begin + start + len(some)])
                asked.put(first + start, self.sampler.score(logits, some, asked.top))
            begin += len(tokens)
        if not num_samples:
            return hidden.new_empty(0, self.model.vocab_size, dtype=torch.float32)
        return decoder.logits(hidden[:num_samples])

    @torch.inference_mode()
    def transfer(self, transfers: Transfers, chunks: abc.Sequence[ScheduledChunk] = ()) -> tuple[float, float]:
        """Copy the blocks that the step of ``chunks`` begins with; return the seconds of swap-out and swap-in.

        See :meth:`KVCache.transfer`. Unlike :meth:`run` it must not be repeated: sources may be overwritten.
        """
        return self.kv_cache.transfer(transfers, set(self._written(chunks)) if transfers.swap_out else ())

    def _written(self, chunks: abc.Sequence[ScheduledChunk]) -> Iterator[int]:
        """The blocks that ``chunks`` write keys and values to."""
        size = self.kv_cache.block_size
        for chunk in chunks:
            first, last = chunk.start // size, (chunk.start + chunk.num_rows - 1) // size
            yield from chunk.sequence.block_table[first : last + 1]

    @torch.inference_mode()
    def prefill(self, tokens: int) -> None:
        """Compute a prompt of ``tokens`` tokens in the first blocks, to the end; for calibration."""
        self.forward_alone([0] * tokens, self.kv_cache)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def decode(self, rows: int) -> None:
        """Run a step that samples ``rows`` sequences of a token each, in the first blocks; for calibration."""
        places = list(range(min(rows, self.memory.tokens, self.max_model_len)))
        size, contexts = self.kv_cache.block_size, [place + 1 for place in places]
        layout = Layout(
            token_ids=[0] * len(places),
            query_start=[0, *contexts],
            context_lens=contexts,
            block_tables=[list(range(place // size + 1)) for place in places],
            positions=places,
            slot_mapping=places,
            sample_rows=places,
        )
        params = SamplingParams()
        with self.many_steps():
            logits = self._steps.forward(layout)
            self.sampler.sample(logits, [SampleRow(params, 0, place) for place in places])

    @torch.inference_mode()
    def probe(self) -> None:
        """Run one token through the whole model, apart from every request; raises if the model cannot run."""
        self.forward_alone([0], self._probe_cache)

    @torch.inference_mode()
    def record_steps(self) -> None:
        """Make the recordings that steps need, so that the first request does not wait for them."""
        self._steps.prepare()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run each kind of step once, because a GPU's kernels are compiled at first use, which takes seconds.

        Runs a long prompt, and the first and last token of the longest sequence; the pool must be empty. Then
        runs the output head for many rows, because each of these steps samples only one.
        """
        longest = min(self.max_model_len, self.memory.tokens)
        for tokens, start in ((min(longest, 256), 0), (1, 0), (1, longest - 1)):
            self.forward_alone([0] * tokens, self.kv_cache, start)
        rows = torch.zeros((_MANY_ROWS, self.model.hidden_size), dtype=self.dtype, device=self.device)
        self.decoder.kernels.linear(rows, self.decoder.head)

    def forward_alone(self, token_ids: list[int], cache: KVCache, start: int = 0) -> Tensor:
        """Logits ``[1, vocab]`` after ``token_ids``, which come after ``start`` tokens.

        All lie in the first blocks of ``cache``; the new ones' KV overwrites what is there.
        """
        count, size = len(token_ids), cache.block_size
        context = start + count
        positions = torch.arange(start, context, device=self.device)
        blocks = torch.arange(-(-context // size), dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([context], dtype=torch.int32, device=self.device),
            block_tables=blocks[None],
            positions=positions,
            slot_mapping=positions.clone(),
            max_query_len=count,
            max_context_len=context,
        )
        tokens = torch.tensor(token_ids, device=self.device)
        last = torch.tensor([count - 1], device=self.device)
        forward = partial(self.decoder.forward, tokens, cache.pool, metadata, last)
        return self.decoder.kernels.in_buffers(forward).clone()

    def _forbidden(self, sequence: Sequence, drafts: int = 0) -> tuple[int, ...]:
        params = sequence.params
        if sequence.num_generated + drafts >= params.min_tokens:
            return ()
        return params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)

    def _sample_row(self, sequence: Sequence, drafts: int) -> SampleRow:
        """For the row after a sequence's tokens and ``drafts`` drafts."""
        params = sequence.params
        row = SampleRow(params, sequence.seed, len(sequence.token_ids) + drafts)
        if sequence.matcher is None:
            row.forbidden = self._forbidden(sequence, drafts)
        else:
            row.allowed = torch.from_numpy(sequence.matcher.mask)  # without the forbidden ones
        if sequence.edits is not None:
            row.allowed = both_allowed(row.allowed, sequence.edits.allowed)
            row.edit = edit_after(sequence.edits, sequence.token_ids)
            row.forbidden += sequence.edits.banned(sequence.token_ids)
        if params.logprobs is not None:
            row.top = params.logprobs
        elif sequence.prompt_logprobs is not None:
            row.logprobs = True  # they are returned with candidates
        group = sequence.group
        if group is None:
            return row
        if group.search is not None:
            row.best = group.search.num_candidates
            return row
        if not group.forked:
            seeds = tuple(sequence_seed(sequence.seed, number) for number in range(1, params.width))
            row.extra_seeds = seeds
        row.logprobs = params.ranked
        return row

    def _step_bytes(self, tokens: int, rows: int) -> int:
        """Bytes of one step's activations and logits, rounded up generously."""
        model = self.model
        width = 4 * model.hidden_size + 3 * model.intermediate_size
        width += 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return tokens * width * self.dtype.itemsize + 4 * rows * model.vocab_size * 4


@dataclasses.dataclass(frozen=True, slots=True)
class _ScoredRows:
    """Rows of a step whose logits say how likely the prompt's next tokens are."""

    asked: PromptLogprobs
    rows: range  # of the step
    tokens: list[int]  # what follows each


def _scored_rows(chunks: abc.Sequence[ScheduledChunk]) -> list[_ScoredRows]:
    found, begin = [], 0
    for chunk in chunks:
        sequence, asked = chunk.sequence, chunk.sequence.prompt_logprobs
        if asked is not None:
            wanted = asked.rows(chunk.start, chunk.length)
            if wanted:
                shift = begin - chunk.start
                tokens = sequence.token_ids[wanted.start + 1 : wanted.stop + 1]
                found.append(_ScoredRows(asked, range(wanted.start + shift, wanted.stop + shift), tokens))
        begin += chunk.num_rows
    return found


def _first_rows(sampling: abc.Sequence[ScheduledChunk]) -> list[int]:
    """The place of each chunk's first row among the rows that are sampled from."""
    counts = [1 + len(chunk.drafts) for chunk in sampling]
    return [end - count for end, count in zip(accumulate(counts), counts, strict=True)]


def _verified(sampling: abc.Sequence[ScheduledChunk], choices: abc.Sequence[Choice]) -> list[Outcome]:
    """The choices of each chunk, up to the first one that differs from its next draft."""
    following = iter(choices)
    outcomes: list[Outcome] = []
    for chunk in sampling:
        own = list(islice(following, 1 + len(chunk.drafts)))
        right = 0
        while right < len(chunk.drafts) and _token(own[right]) == chunk.drafts[right]:
            right += 1
        outcomes.append(tuple(own[: right + 1]) if chunk.drafts else own[0])
    return outcomes


def _token(choice: Choice) -> int | None:
    """The token drawn; ``None`` where every token is forbidden."""
    if isinstance(choice, int):
        return choice
    return choice.tokens[0] if choice.tokens else None
