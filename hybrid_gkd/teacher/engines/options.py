"""The options of a scoring engine, each once: a field, and its option on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def engine_arguments(text: str) -> str:
    """A JSON object of objects, as it is."""
    given = json.loads(text)
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise argparse.ArgumentTypeError(f'must be {{"vllm": {{...}}}} or {{"hf": {{...}}}}, got {text}')
    return text


def option(default: Any, help: str, **keywords: Any) -> Any:
    """A field whose metadata are the keywords of argparse."""
    return field(default=default, metadata={"help": help, **keywords})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The model of a worker and how it is run."""

    ckpt_path: str = option(MISSING, "model folder with its tokenizer", required=True)
    n_logprobs: int = option(64, "largest K that a request may ask for", type=positive)
    tp_size: int = option(1, "GPUs that share one model (vllm)", type=positive)
    backend: str = option("auto", "auto: vllm if installed", choices=["auto", "vllm", "hf"])
    max_model_len: int | None = option(None, "longest sequence, in tokens", type=positive)
    gpu_memory_utilization: float = option(0.9, "share of GPU memory (vllm)", type=float)
    dtype: str = option("auto", "auto: as stored (vllm: float32 in half precision); float32 on the CPU")
    engine_kwargs: str = option(
        "{}", 'JSON, more arguments: {"vllm": {...}} for vllm.LLM, {"hf": {...}} for from_pretrained',
        type=engine_arguments,
    )
    device: str = option("auto", "auto: the GPU if there is one", choices=["auto", "cpu", "cuda"])
    trust_remote_code: bool = option(False, "run code from the model folder", action="store_true")

    def arguments_of(self, engine: str) -> dict[str, Any]:
        """What `engine_kwargs` has for an engine."""
        return dict(json.loads(self.engine_kwargs).get(engine, {}))

    @staticmethod
    def add_to(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
        """`without`: fields of which a command has no option."""
        for each in fields(EngineOptions):
            if each.name not in without:
                parser.add_argument("--" + each.name.replace("_", "-"), default=each.default, **each.metadata)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace) -> EngineOptions:
        given = vars(arguments)
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})

    def command_line(self) -> list[str]:
        """The arguments that `parsed` reads as the same options."""
        values = {"--" + each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        return [name if value is True else f"{name}={value}" for name, value in values.items() if value]
