# SPDX-License-Identifier: Apache-2.0
"""Profiles (what load, on what machine) and the requests that they stand for, as perf_analyzer's input data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROFILES = Path(__file__).with_name("profiles")
# Plain words: a text prompt must tokenize to something like text, whatever the vocabulary.
_TEXT = """
the a of to and in is it that for was on are as with they at be this from or had by hot but some what there we can out other were
all your when use word how said each she which their time if will way about many then them would write like so these her long make
thing see him two has look more day could go come did my sound no most number who over know water
"""
_WORDS = _TEXT.split()


class ProfileError(Exception):
    """A profile file that is missing or wrong; the message names the field."""


class Profile(BaseModel):
    """One load on one kind of machine (the files in profiles/)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: Literal["run", "not run"]  # whether perf/results holds numbers of this profile
    hardware: str
    serve: str  # the command that starts the server it is meant for
    model: str = "cedar"
    concurrency: list[int] = Field(min_length=1)
    requests_per_slot: int = Field(ge=1)  # a level sends concurrency x this many requests
    min_requests: int = Field(default=8, ge=1)
    warmup_requests: int = Field(default=2, ge=0)  # sent before the first level, not counted
    prompt_tokens: list[int] = Field(min_length=1)  # lengths of the prompts, drawn evenly
    output_tokens: list[int] = Field(min_length=1)  # max_tokens with ignore_eos, drawn evenly
    text_share: float = Field(ge=0, le=1)  # share of requests with text_input (a word per token); the rest send input_ids
    token_ids: tuple[int, int]  # lowest and highest id drawn for input_ids
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    timeout_s: float = Field(default=600, gt=0)  # the longest that one level may take

    def requests(self, concurrency: int) -> int:
        return max(self.min_requests, concurrency * self.requests_per_slot)


def load_profile(name: str) -> Profile:
    """By name (profiles/NAME.yaml) or by path. Raises `ProfileError`."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ProfileError(f"no profile {name!r}; there are {known}, or give a path to a .yaml file")
    try:
        return Profile.model_validate(yaml.safe_load(path.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise ProfileError(f"{path}: {error}") from error


def requests(profile: Profile, count: int, name: str, cache_salt: str) -> list[dict[str, Any]]:
    """``count`` requests, the same for the same profile and ``name``. Prompts are drawn for each request, and ``cache_salt``
    parts them from everything cached before, so that no prefix is found by accident."""
    draw = random.Random(f"{profile.seed}/{name}")
    low, high = profile.token_ids
    out = []
    for index in range(count):
        length = draw.choice(profile.prompt_tokens)
        # Spread evenly instead of drawn, so that a small run holds the stated share.
        if int((index + 1) * profile.text_share) > int(index * profile.text_share):
            prompt: dict[str, Any] = {"text_input": [" ".join(draw.choice(_WORDS) for _ in range(length))]}
        else:
            prompt = {"input_ids": {"content": [draw.randint(low, high) for _ in range(length)], "shape": [length]}}
        out.append(
            {
                **prompt,
                "max_tokens": [draw.choice(profile.output_tokens)],
                "ignore_eos": [True],
                "temperature": [float(profile.temperature)],
                "seed": [draw.getrandbits(32)],
                "sampling_parameters": [json.dumps({"cache_salt": cache_salt})],
            }
        )
    return out
