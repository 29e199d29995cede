# SPDX-License-Identifier: Apache-2.0
"""`EngineConfig`: one flat dataclass that is every setting of Cedar.

Precedence: flag > environment ``CEDAR_<NAME>`` > YAML (``CEDAR_CONFIG``, else ``cedar.yaml`` beside the model repository)
> default. `cedar serve` hands flags on as environment, so every process of a server reads the same settings.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from cedar.errors import invalid

SHIPPED_REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
"""The model repository of the checkout that this package lies in (it may not exist: an installed wheel)."""


def _flag(default: Any, text: str, *choices: str) -> Any:
    """A field whose help text is also the README's table row; ``choices`` limits a string."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Every setting. Field ``a_b`` is flag ``--a-b``, environment ``CEDAR_A_B`` and YAML key ``a_b``."""

    # what is served
    model: str = _flag("", "checkpoint directory; empty: the embedded model, cedar-small")
    device: str = _flag("auto", "where the network runs", "auto", "cpu", "cuda")
    dtype: str = _flag("auto", "arithmetic of activations; auto: bfloat16 on cuda, float32 on cpu", "auto", "float32", "bfloat16")
    fake_quant: bool = _flag(True, "the cache and index quantisers (part of the model; off only for equivalence tests)")
    act_quant: bool = _flag(False, "FP8 activations of the quantised linears (speed option of the kernels)")
    global_kv: str = _flag("nvfp4", "records of the long-range KV; fp8 takes 1.8 times the bytes (comparison)", "nvfp4", "fp8")
    ops: str = _flag("auto", "provider of the fused operations", "auto", "reference", "native")
    cpu_threads: int = _flag(0, "threads of the CPU arithmetic; 0: as many as cores")
    # memory and scheduling
    max_model_len: int = _flag(0, "longest prompt + output in tokens; 0: the checkpoint's max_position_embeddings")
    max_num_seqs: int = _flag(64, "sequences that hold memory at one time")
    max_waiting: int = _flag(256, "bounded waiting queue; beyond it requests get UNAVAILABLE")
    max_num_batched_tokens: int = _flag(512, "token budget of one step, and so the longest prefill chunk")
    kv_cache_bytes: int = _flag(0, "KV budget in bytes; 0: kv_cache_share of the free memory")
    kv_cache_share: float = _flag(0.25, "share of the free memory for the KV budget")
    page_tokens: int = _flag(64, "tokens per page of the global cache, and so the step of prefix hits (a multiple of 16)")
    prefix_cache: bool = _flag(True, "prompts reuse the pages of earlier ones with the same beginning (and the same cache_salt)")
    swa_bounded_replay: bool = _flag(True, "both replay sides; --no-swa-bounded-replay sets both off")
    encoder_replay: str = _flag("", "encoder side; empty: by swa_bounded_replay", "", "bounded", "off")
    decoder_replay: str = _flag("", "decoder side; empty: by swa_bounded_replay", "", "bounded", "exact", "off")
    # requests
    default_timeout_ms: int = _flag(0, "deadline of requests that name none; 0: none")
    max_output_bytes: int = _flag(1 << 22, "ceiling of one request's emitted text, in bytes")
    max_prompt_bytes: int = _flag(1 << 24, "ceiling of text_input and messages, in bytes")
    step_timeout_ms: int = _flag(600000, "a step that takes longer has hung: the engine process ends and is started afresh")
    lease_ms: int = _flag(5000, "an encoded sequence that nobody attaches to is freed after this")
    tick_ms: int = _flag(250, "interval of progress ticks and keep-alives, and so of seeing a cancel while no token comes")
    coalesce_ms: int = _flag(10, "longest time tokens wait to share a message when the receiver lags")
    drain_timeout_ms: int = _flag(30000, "longest wait for running requests at SIGTERM")
    # server
    host: str = _flag("127.0.0.1", "address the server listens on")
    http_port: int = _flag(8000, "HTTP port")
    grpc_port: int = _flag(8001, "gRPC port")
    metrics_port: int = _flag(8002, "Prometheus port of Triton")
    engine_metrics_port: int = _flag(0, "the engine's own /metrics; 0: off")
    engine_address: str = _flag("", "an engine that runs elsewhere (unix:… or host:port); empty: start one")
    engine_start_timeout_ms: int = _flag(600000, "longest wait for the engine to load its model")
    model_repository: str = _flag("", "Triton model repository; empty: the one that Cedar ships")
    tritonserver: str = _flag("", "tritonserver executable; empty: PATH, /opt/tritonserver, the test bundle")
    log_level: str = _flag("info", "log level", "debug", "info", "warning", "error")

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        yaml_path: Path | None = None,
    ) -> EngineConfig:
        """Merge the four sources. ``flags``: only those the user gave (None values are dropped)."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        path = yaml_path or _yaml_path(flags or {}, env)
        if path is not None:
            values.update(_from_yaml(path))
        hints = get_type_hints(cls)
        for f in fields(cls):
            name = f"CEDAR_{f.name.upper()}"
            if env.get(name):
                values[f.name] = _coerce(name, env[name], hints[f.name])
        for key, value in (flags or {}).items():
            if value is not None:
                if key not in hints:
                    raise invalid(f"--{key.replace('_', '-')}", "no such setting", "see cedar serve --help")
                values[key] = _coerce(f"--{key.replace('_', '-')}", value, hints[key])
        config = cls(**values)
        config.validate()
        return config

    def validate(self) -> None:
        """Raise `cedar.errors.CedarError` naming the first field whose value is out of range."""
        for f in fields(self):
            choices = f.metadata["choices"]
            if choices and getattr(self, f.name) not in choices:
                raise invalid(f.name, f"is {getattr(self, f.name)!r}", " | ".join(c or "(empty)" for c in choices))
        at_least_one = ("max_num_seqs", "max_waiting", "max_num_batched_tokens", "max_output_bytes", "max_prompt_bytes")
        for name in (*at_least_one, "lease_ms", "tick_ms", "step_timeout_ms", "engine_start_timeout_ms"):
            if getattr(self, name) < 1:
                raise invalid(name, f"is {getattr(self, name)}", "at least 1")
        for name in ("max_model_len", "kv_cache_bytes", "default_timeout_ms", "coalesce_ms", "drain_timeout_ms", "cpu_threads"):
            if getattr(self, name) < 0:
                raise invalid(name, f"is {getattr(self, name)}", "0 or more")
        for name in (f.name for f in fields(self) if f.name.endswith("_ms")):
            if getattr(self, name) >= 2**31:
                raise invalid(name, f"is {getattr(self, name)}", f"at most {2**31 - 1}")
        if self.page_tokens < 16 or self.page_tokens % 16:
            raise invalid("page_tokens", f"is {self.page_tokens}", "a positive multiple of 16")
        if not 0.0 < self.kv_cache_share <= 0.95:
            raise invalid("kv_cache_share", f"is {self.kv_cache_share}", "above 0 and at most 0.95")
        for name in ("http_port", "grpc_port", "metrics_port", "engine_metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise invalid(name, f"is {getattr(self, name)}", "0 to 65535")

    @property
    def encoder_replay_mode(self) -> str:
        """bounded | off, after the precedence of the per-side switch over `swa_bounded_replay`."""
        return self.encoder_replay or ("bounded" if self.swa_bounded_replay else "off")

    @property
    def decoder_replay_mode(self) -> str:
        """bounded | exact | off, likewise."""
        return self.decoder_replay or ("bounded" if self.swa_bounded_replay else "off")

    def as_env(self) -> dict[str, str]:
        """Every setting as environment for a child process, which reads no YAML: a default may have overruled one."""
        values = ((f"CEDAR_{f.name.upper()}", getattr(self, f.name)) for f in fields(self))
        settings = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values}
        return settings | {"CEDAR_CONFIG": os.devnull}


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that are no setting but look like one -> that one. Others are not ours to judge: a cluster may name its own
    service variables ``CEDAR_…`` too."""
    settings = [f"CEDAR_{f.name.upper()}" for f in fields(EngineConfig)]
    names = (name for name in env if name.startswith("CEDAR_") and name not in settings)
    close = {name: difflib.get_close_matches(name, settings, n=1, cutoff=0.85) for name in names}
    return {name: match[0] for name, match in close.items() if match}


def _yaml_path(flags: Mapping[str, Any], env: Mapping[str, str]) -> Path | None:
    """``CEDAR_CONFIG`` must exist; ``cedar.yaml`` beside the model repository is optional."""
    if env.get("CEDAR_CONFIG"):
        path = Path(env["CEDAR_CONFIG"])
        if not path.exists():
            raise invalid("CEDAR_CONFIG", f"{path} does not exist", "a readable YAML file")
        return path
    repository = flags.get("model_repository") or env.get("CEDAR_MODEL_REPOSITORY") or SHIPPED_REPOSITORY
    path = Path(repository).resolve().parent / "cedar.yaml"
    return path if path.is_file() else None


_NOTHING = ("", "~", "null")
"""How YAML writes a key without a value."""


def _from_yaml(path: Path) -> dict[str, Any]:
    """Values as they are written; a key without a value counts as absent. The field decides the type, not YAML: its
    ``off`` is no boolean where a replay mode is meant."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise invalid(str(path), f"not readable as YAML ({error})", "a mapping of settings") from error
    if not isinstance(data, dict):
        raise invalid(str(path), f"holds a {type(data).__name__}", "a mapping of settings")
    hints = get_type_hints(EngineConfig)
    unknown = [str(key) for key in data if key not in hints]
    if unknown:
        raise invalid(f"{path}: {', '.join(unknown)}", "no such setting", ", ".join(sorted(hints)))
    return {key: _coerce(f"{path}: {key}", value, hints[key]) for key, value in data.items() if value not in _NOTHING}


def _coerce(name: str, value: Any, kind: Any) -> Any:
    """Text to the field's type; a boolean is true/false (1/0, yes/no, on/off)."""
    kind = get_args(kind)[0] if get_args(kind) else kind
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            text = str(value).strip().lower()
            if text in ("true", "1", "yes", "on"):
                return True
            if text in ("false", "0", "no", "off"):
                return False
            raise ValueError
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        if isinstance(value, (list, dict)) or (kind in (int, float) and isinstance(value, bool)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        allowed = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
        raise invalid(name, f"is {value!r}", allowed) from None
