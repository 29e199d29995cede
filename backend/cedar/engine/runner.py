# SPDX-License-Identifier: Apache-2.0
"""`ModelRunner`: the network, its caches, and the steps it runs (the `cedar.engine.work.Runner` of a real checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cedar.cache.store import KVCache
from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.engine.batch import BatchBuilder, Chunk, EncoderBatch
from cedar.engine.budget import cache_formats, plan_cache
from cedar.engine.device import CpuThreads, free_memory, resolve_device, resolve_dtype
from cedar.engine.graphs import DecodeGraphs
from cedar.engine.hits import PrefixHits, SnapshotTask
from cedar.engine.memory import ModelSequence
from cedar.engine.replay import EncodedSequence, SeamSizes
from cedar.engine.request import DecoderReplay
from cedar.engine.work import DecodeWork, MemoryUsage, PrefillWork, Prompt, SequenceMemory, StepResult, StepWork, TailWork
from cedar.errors import invalid
from cedar.model.checkpoint import load_weights
from cedar.model.embedded import embedded_model_dir
from cedar.model.engram import EngramHasher, TokenMap
from cedar.model.transformer import Boundary, Transformer
from cedar.ops.abi import OPERATIONS
from cedar.ops.fp4_tiles import TILE_DEPTH
from cedar.ops.provider import REFERENCE, Choice, choose, using

Progress = Callable[[int, int, str], None]


class ModelRunner:
    """Runs steps. One engine thread calls it.

    After an exception from `step` the sequences of that step are in an undefined state and can only be closed.
    """

    def __init__(
        self,
        model: Transformer,
        hasher: EngramHasher,
        cache: KVCache,
        device: torch.device,
        threads: CpuThreads,
        *,
        max_model_len: int,
        prefix_cache: bool = True,
        ops: Choice | None = None,
    ) -> None:
        self.config = model.config
        self.vocab_size = model.config.vocab_size
        self.max_model_len = max_model_len
        self.model = model
        self.cache = cache
        self.page_tokens = cache.page_tokens
        self._device = device
        self._threads = threads
        self._ops = ops
        self.operations = REFERENCE if ops is None else ops.summary
        can_record = device.type == "cpu" and ops is not None and ops.native_ops == set(OPERATIONS)
        self._graphs = DecodeGraphs(model, cache, cache.tables) if can_record else None
        self._batches = BatchBuilder(model.config, hasher, cache.tables, device)
        self._seam = SeamSizes.of(model.config, model.dtype, cache.window(model.config.cut).record)
        self._hits = PrefixHits(cache, model.config.sliding_window, self._seam.rows, enabled=prefix_cache)

    @classmethod
    def load(cls, settings: EngineConfig, progress: Progress | None = None) -> ModelRunner:
        """Load ``settings.model`` (a checkpoint directory; empty: the embedded model).

        Raises `CedarError` naming the setting or the tensors that are wrong.
        """
        directory = Path(settings.model) if settings.model else embedded_model_dir()
        config = ModelConfig.load(directory)
        max_model_len = settings.max_model_len or config.max_position_embeddings
        if max_model_len > config.max_position_embeddings:
            raise invalid(
                "max_model_len", f"is {max_model_len}", f"at most max_position_embeddings ({config.max_position_embeddings})"
            )
        device = resolve_device(settings)
        dtype = resolve_dtype(settings, device)
        ops = choose(settings.ops, device)
        threads = CpuThreads(config, settings, device, native_ops=ops.native_ops == set(OPERATIONS))
        threads.use()
        hasher = EngramHasher(config, TokenMap(_tokenizer(directory)))
        with device:
            model = Transformer(
                config,
                dtype,
                act_quant=settings.act_quant,
                fake_quant=settings.fake_quant,
                weight_dtype=weights_kept_as(config, device, dtype, ops.native_ops),
            )
        load_weights(model, directory, progress)
        model.eval()
        formats = cache_formats(config, dtype, fake_quant=settings.fake_quant, global_kv=settings.global_kv)
        budget = settings.kv_cache_bytes or int(free_memory(device) * settings.kv_cache_share)
        sizes = plan_cache(config, formats, settings, dtype, budget)
        cache = KVCache(config, formats, sizes, device)
        return cls(
            model, hasher, cache, device, threads, max_model_len=max_model_len, prefix_cache=settings.prefix_cache, ops=ops
        )

    def open(self, prompt: Prompt, num_tokens: int) -> ModelSequence | None:
        """See `Runner.open`."""
        hit = self._hits.find(prompt)
        seq = self._open(prompt.decoder_replay, num_tokens, prompt, hit.pages)
        if seq is None:
            return None
        try:
            self._hits.begin(seq, prompt, hit)
        except BaseException:
            self.close(seq)
            raise
        return seq

    def open_alone(self, decoder_replay: DecoderReplay, num_tokens: int) -> ModelSequence | None:
        """As `open`, for a sequence that finds nothing and leaves nothing behind (`cedar score`)."""
        return self._open(decoder_replay, num_tokens, None, [])

    def _open(
        self, decoder_replay: DecoderReplay, num_tokens: int, prompt: Prompt | None, shared: list[int]
    ) -> ModelSequence | None:
        blocks = self.cache.open(self._seam.bytes(decoder_replay, num_tokens), shared, num_tokens)
        if blocks is None:
            return None
        seam = EncodedSequence(self._seam, decoder_replay, self._device, num_tokens)
        return ModelSequence(blocks, seam, self._batches.lookback, prompt)

    def gains(self, leader: SequenceMemory, seq: SequenceMemory, prompt: Prompt, num_tokens: int) -> bool:
        """See `Runner.gains`."""
        return self._hits.promises(_own(leader), prompt) and self._hits.gains(_own(seq), prompt, num_tokens)

    def finds_more(self, seq: SequenceMemory, prompt: Prompt) -> bool:
        """See `Runner.finds_more`."""
        return self._hits.gains(_own(seq), prompt, self._hits.find(prompt).tokens)

    def reserve(self, seq: SequenceMemory, num_tokens: int) -> bool:
        """See `Runner.reserve`."""
        return self.cache.reserve(_own(seq).blocks, num_tokens)

    def close(self, seq: SequenceMemory, *, forget: bool = False) -> None:
        """See `Runner.close`. Legal in every state of the sequence."""
        own = _own(seq)
        self.cache.close(own.blocks, forget=forget)
        own.seam.release()

    def clear_cache(self) -> int:
        """See `Runner.clear_cache`."""
        return self.cache.clear()

    def fits(self, num_tokens: int, decoder_replay: DecoderReplay) -> bool:
        """See `Runner.fits`."""
        return num_tokens <= self.max_model_len and self.cache.fits(num_tokens, self._seam.bytes(decoder_replay, num_tokens))

    def usage(self) -> MemoryUsage:
        """See `Runner.usage`."""
        cache, sizes = self.cache, self.cache.sizes
        return MemoryUsage(
            bytes_total=sizes.budget_bytes,
            bytes_used=cache.bytes_used,
            pages_total=sizes.num_pages,
            pages_used=cache.pages_used,
            sequences=cache.sequences,
            kv_bytes_per_token=cache.kv_bytes_per_token,
            bytes_cached=cache.bytes_cached,
        )

    def begin_replay(self, seq: SequenceMemory, hit: int, prefix_ids: Sequence[int]) -> int:
        """Continue after a prefix hit of ``hit`` tokens (any parity), whose compressed entries ``seq`` holds.

        prefix_ids: token ids of positions [0, hit). A hit of at most W tokens is dropped: everything would be recomputed anyway.
        Otherwise the last W hit tokens are run again from R = hit - W to rebuild windows and open rows: their compressed groups
        are not rewritten, and no window key below R is seen. Returns R, where the next chunk must start (0: no hit).
        """
        own = _own(seq)
        if own.decoding or own.encoded or len(prefix_ids) != hit:
            raise RuntimeError(
                f"begin_replay: needs a sequence before its last chunk and {hit} prefix ids, got {len(prefix_ids)}"
            )
        start = max(0, hit - self.config.sliding_window)
        own.replay(start, hit if start else 0, prefix_ids)
        return start

    def step(self, work: StepWork) -> StepResult:
        """See `Runner.step`."""
        _check(work, self.vocab_size, self.max_model_len)
        with torch.inference_mode(), using(self._ops):
            return self._step(work, tail_rows=None)

    def kept_logits(self, seq: SequenceMemory) -> tuple[int, Tensor]:
        """As a step with the tail of ``seq`` alone, but the logits of all its rows that are computed to the end (score).

        Returns the first such position and float32 [rows, vocab].
        """
        work = StepWork(tails=[TailWork(seq)])
        _check(work, self.vocab_size, self.max_model_len)
        own = _own(seq)
        first_kept = own.seam.first_kept(own.num_computed, own.replay_start)
        first = min(own.seam.first_exact(own.num_computed, own.replay_start), own.num_computed - 1)
        with torch.inference_mode(), using(self._ops):
            logits = self._step(work, tail_rows=first - first_kept).logits
        assert logits is not None
        return first, logits

    def _step(self, work: StepWork, tail_rows: int | None) -> StepResult:
        parts: list[tuple[ModelSequence, Sequence[int]]] = [(_own(item.seq), item.token_ids) for item in work.prefills]
        parts += [(_own(item.seq), (item.token_id,)) for item in work.decodes]
        tasks: list[SnapshotTask] = []
        try:
            for seq, ids in parts:
                tasks += self._hits.tasks(seq, seq.num_computed + len(ids))
            result = self._run(work, [_chunk(seq, ids, tasks) for seq, ids in parts], tail_rows)
        except BaseException:
            self._hits.drop(tasks)
            raise
        self._hits.publish([seq for seq, _ in parts], tasks)
        return result

    def _run(self, work: StepWork, chunks: list[Chunk], tail_rows: int | None) -> StepResult:
        if self._graphs is not None and len(work.decodes) == len(chunks) and not (work.tails or any(c.snapshots for c in chunks)):
            self._threads.use(len(chunks))
            ids, engram_rows = self._batches.tokens(chunks)
            logits = self._graphs.run([chunk.segment for chunk in chunks], torch.from_numpy(ids), engram_rows)
            for chunk in chunks:
                chunk.seq.advance(chunk.token_ids)
            return StepResult(logits)
        encoded = self._encode(chunks) if chunks else None
        if encoded is not None:
            self._keep_boundary(work.prefills, *encoded)
        all_rows = [n for n, item in enumerate(work.prefills) if _own(item.seq).mode is DecoderReplay.OFF]
        in_decoder = all_rows + list(range(len(work.prefills), len(chunks)))
        tails = [_own(item.seq) for item in work.tails]
        tails_run = [seq for seq in tails if seq.mode is not DecoderReplay.OFF]
        hidden, spans = torch.empty(0, self.config.hidden_size, dtype=self.model.dtype, device=self._device), []
        if tails_run or in_decoder:
            batch = self._batches.decoder(tails_run, in_decoder, encoded)
            self._threads.use(batch.plan.num_rows)
            hidden, spans = self.model.decode(batch.boundary, batch.plan, self.cache), batch.spans
        result = self._logits(work, tails, all_rows, hidden, spans, tail_rows)
        for chunk in chunks:
            chunk.seq.advance(chunk.token_ids)
        for item in work.prefills:
            _own(item.seq).encoded = item.last
        for seq in tails:
            seq.encoded, seq.decoding = False, True
            seq.seam.release()
            self.cache.discharge(seq.blocks)
        return result

    def _encode(self, chunks: list[Chunk]) -> tuple[EncoderBatch, Boundary]:
        batch = self._batches.encoder(chunks)
        self._threads.use(batch.plan.num_rows)
        return batch, self.model.encode(self.model.streams(batch.token_ids), batch.engram_rows, batch.plan, self.cache)

    def _keep_boundary(self, prefills: Sequence[PrefillWork], batch: EncoderBatch, boundary: Boundary) -> None:
        for item, span in zip(prefills, batch.spans, strict=False):
            seq = _own(item.seq)
            if seq.mode is not DecoderReplay.OFF:
                seq.seam.append(item.start, boundary.streams[span], boundary.pre[span], boundary.window.staged[span])
            # what is not finite stays in the streams, so the last of them tell of all that was stored
            seq.finite = seq.finite and bool(torch.isfinite(boundary.streams[span]).all())

    def _logits(
        self,
        work: StepWork,
        tails: list[ModelSequence],
        all_rows: list[int],
        hidden: Tensor,
        spans: list[slice],
        tail_rows: int | None,
    ) -> StepResult:
        """One head product for every row that is asked for. Decoder spans: tails that ran, OFF chunks, decodes."""
        asked: list[Tensor] = []
        span = iter(spans)
        for seq in tails:
            if seq.mode is DecoderReplay.OFF:
                assert seq.seam.last_hidden is not None
                asked.append(seq.seam.last_hidden)
                continue
            rows = next(span)
            asked.append(hidden[rows.stop - 1 : rows.stop] if tail_rows is None else hidden[rows.start + tail_rows : rows.stop])
        prompt: dict[int, Tensor] = {}
        for number in all_rows:
            item, rows = work.prefills[number], next(span)
            if item.last:
                _own(item.seq).seam.last_hidden = hidden[rows.stop - 1 : rows.stop].clone()
            if item.all_logits:
                prompt[number] = hidden[rows]
        if work.decodes:
            asked.append(hidden[hidden.shape[0] - len(work.decodes) :])
        counts = [rows.shape[0] for rows in (*asked, *prompt.values())]
        if not counts:
            return StepResult(None)
        logits = self.model.logits(torch.cat([*asked, *prompt.values()]))
        parts = torch.split(logits, [sum(counts[: len(asked)]), *counts[len(asked) :]])
        return StepResult(parts[0] if asked else None, dict(zip(prompt, parts[1:], strict=True)))


def _chunk(seq: ModelSequence, token_ids: Sequence[int], tasks: Sequence[SnapshotTask]) -> Chunk:
    return Chunk(seq, token_ids, tuple((task.position, task.slot) for task in tasks if task.seq is seq))


def weights_kept_as(config: ModelConfig, device: torch.device, dtype: torch.dtype, native_ops: set[str]) -> torch.dtype | None:
    """How weights that the checkpoint quantises are kept: None: in the compute dtype; float8_e4m3fn: as they are.

    The library reads narrower weights as they are; PyTorch would convert them in every product. A GPU's bodies are of bfloat16.
    """
    if device.type == "cpu":
        return torch.bfloat16 if native_ops == set(OPERATIONS) else None
    if dtype is not torch.bfloat16:
        return None
    reads = {"mxfp8_linear", "wo_a", "moe_fp4"} <= native_ops and config.hidden_size % TILE_DEPTH == 0
    return torch.float8_e4m3fn if reads else torch.bfloat16


def _own(seq: SequenceMemory) -> ModelSequence:
    assert isinstance(seq, ModelSequence)
    return seq


def _check(work: StepWork, vocab_size: int, max_model_len: int) -> None:
    """Raise RuntimeError when the engine breaks an invariant: better than wrong numbers or another sequence's rows."""
    items: list[PrefillWork | TailWork | DecodeWork] = [*work.prefills, *work.tails, *work.decodes]
    seqs = [_own(item.seq) for item in items]
    if not seqs:
        raise RuntimeError("step: no work")
    if len({id(seq) for seq in seqs}) < len(seqs):
        raise RuntimeError("step: a sequence appears twice")
    for item, seq in zip(items, seqs, strict=True):
        kind = type(item).__name__
        if seq.blocks.closed:
            raise RuntimeError(f"step: {kind} of a closed sequence")
        if isinstance(item, TailWork):
            if not seq.encoded:
                raise RuntimeError("step: TailWork of a sequence whose last chunk has not run")
            continue
        start, ids = (item.start, item.token_ids) if isinstance(item, PrefillWork) else (item.position, (item.token_id,))
        if seq.encoded or seq.decoding != isinstance(item, DecodeWork):
            raise RuntimeError(f"step: {kind} of a sequence that is {'decoding' if seq.decoding else 'not decoding'}")
        if start != seq.num_computed:
            raise RuntimeError(f"step: {kind} at position {start}, the sequence is at {seq.num_computed}")
        if not ids or start + len(ids) > max_model_len:
            raise RuntimeError(f"step: {kind} of {len(ids)} tokens at {start}, the limit is {max_model_len}")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise RuntimeError(f"step: {kind} has a token id outside 0..{vocab_size - 1}")
        if isinstance(item, PrefillWork) and item.all_logits and seq.mode is not DecoderReplay.OFF:
            raise RuntimeError(f"step: all_logits needs decoder replay off, the sequence has {seq.mode}")


def _tokenizer(directory: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise invalid(f"{directory}/tokenizer.json", f"cannot be read ({error})", "the checkpoint's tokenizer") from error
