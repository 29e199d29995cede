# SPDX-License-Identifier: Apache-2.0
"""What a request must satisfy to enter the engine, and the settings it gets when it names none."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from cedar.config.engine import EngineConfig
from cedar.config.model import ModelConfig
from cedar.engine.replay import boundary_rows
from cedar.engine.request import DEFAULT_MAX_TOKENS, DecoderReplay, EncoderReplay, GenerationRequest
from cedar.engine.work import Runner
from cedar.errors import invalid


@dataclass(frozen=True)
class ModelFacts:
    """What the engine has to know of the checkpoint.

    eos_token_id: ends a generation, unless the request says otherwise. num_valid_ids: ids from here on are padding of the
    head (no token, no Engram hash): neither accepted nor sampled. window: W, the rows of a BOUNDED tail. halo: the rows
    of an EXACT one. image_token_id: refused, there is no vision tower.
    """

    eos_token_id: int
    num_valid_ids: int
    window: int
    halo: int
    image_token_id: int | None = None

    @classmethod
    def of(cls, config: ModelConfig, tokenizer_length: int) -> ModelFacts:
        """From a checkpoint's configuration and the length of its tokenizer, which may be below the head's."""
        rows = boundary_rows(config)
        return cls(
            eos_token_id=config.eos_token_id,
            num_valid_ids=min(tokenizer_length, config.vocab_size),
            window=rows[DecoderReplay.BOUNDED],
            halo=rows[DecoderReplay.EXACT],
            image_token_id=config.image_token_id,
        )


class Admission:
    """Checks requests against one model, one configuration and one runner's memory."""

    def __init__(self, runner: Runner, config: EngineConfig, facts: ModelFacts) -> None:
        self._runner = runner
        self._facts = facts
        self._encoder_replay = EncoderReplay(config.encoder_replay_mode)
        self._decoder_replay = DecoderReplay(config.decoder_replay_mode)
        self._default_timeout_ms = config.default_timeout_ms

    def decoder_replay(self, request: GenerationRequest) -> DecoderReplay:
        """Prompt log-probabilities need every row through every layer; else the request's mode, else the setting."""
        if request.sampling.prompt_logprobs is not None:
            return DecoderReplay.OFF
        return request.decoder_replay or self._decoder_replay

    def encoder_replay(self, request: GenerationRequest) -> EncoderReplay:
        """Prompt log-probabilities are those of a full run, and so is what follows; else the request's mode, else the setting."""
        if request.sampling.prompt_logprobs is not None:
            return EncoderReplay.OFF
        return request.encoder_replay or self._encoder_replay

    def end_ids(self, request: GenerationRequest) -> frozenset[int]:
        """Ids that end the generation. ``ignore_eos`` drops the end of sentence alone, not ``stop_token_ids``."""
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.ignore_eos:
            return stop_ids
        return stop_ids | {self._facts.eos_token_id if sampling.end_id is None else sampling.end_id}

    def timeout_ms(self, request: GenerationRequest) -> int:
        """Milliseconds from arrival; 0: no deadline."""
        return request.timeout_ms or self._default_timeout_ms

    def check(self, request: GenerationRequest) -> int:
        """Raise INVALID_ARGUMENT, or return the ``max_tokens`` that holds."""
        self._check_ids(request)
        max_tokens = self._max_tokens(request)
        positions = len(request.input_ids) + max_tokens - 1
        if not self._runner.fits(positions, self.decoder_replay(request)):
            raise invalid(
                "max_tokens" if request.sampling.max_tokens is not None else "input_ids",
                f"{len(request.input_ids)} prompt tokens and up to {max_tokens} more never fit in the kv budget of "
                f"{self._runner.usage().bytes_total} bytes",
                "a shorter prompt, fewer max_tokens, or a server with a larger kv_cache_bytes",
            )
        return max_tokens

    def _check_ids(self, request: GenerationRequest) -> None:
        allowed = f"token ids from 0 to {self._facts.num_valid_ids - 1}"
        sampling = request.sampling
        named = [("input_ids", id_) for id_ in (min(request.input_ids), max(request.input_ids))]
        named += [("stop_token_ids", id_) for id_ in sampling.stop_token_ids]
        named += [("end_id", sampling.end_id)] if sampling.end_id is not None else []
        for field, id_ in named:
            if not 0 <= id_ < self._facts.num_valid_ids:
                raise invalid(field, f"{id_} is outside the vocabulary", allowed)
        if self._facts.image_token_id is not None and self._facts.image_token_id in request.input_ids:
            raise invalid("input_ids", f"{self._facts.image_token_id} is the image token", "text only; images are not served")

    def _max_tokens(self, request: GenerationRequest) -> int:
        context, prompt = self._runner.max_model_len, len(request.input_ids)
        left = context - prompt
        if left < 1:
            raise invalid(
                "input_ids", f"{prompt} tokens leave no room for an output token", f"at most {context - 1} (max_model_len - 1)"
            )
        wanted = request.sampling.max_tokens
        if wanted is None:
            wanted = self._default_max_tokens(request, min(DEFAULT_MAX_TOKENS, left))
        elif wanted > left:
            raise invalid("max_tokens", f"is {wanted}, but {prompt} prompt tokens leave {left}", f"1 to {left}")
        if request.sampling.min_tokens > wanted:
            raise invalid("min_tokens", f"is {request.sampling.min_tokens}", f"0 to {wanted} (max_tokens)")
        return wanted

    def _default_max_tokens(self, request: GenerationRequest, most: int) -> int:
        """As many as the KV budget holds beside the prompt, ``most`` at most, and 1 where even that is too much for it."""
        prompt, replay = len(request.input_ids), self.decoder_replay(request)
        too_many = bisect_left(range(1, most + 1), True, key=lambda count: not self._runner.fits(prompt + count - 1, replay))
        return max(1, too_many)
