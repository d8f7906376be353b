"""Options of a scoring engine, each defined once as a field with its command-line option."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def within(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of finite numbers from `low` to `high`."""

    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a number within {low:g}..{high:g}, got {text}")
        return value

    return number


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object ({error}), got {text}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found


def engine_arguments(text: str) -> str:
    """Check that the text is a JSON object of objects; return it unchanged."""
    if not all(isinstance(each, dict) for each in json_object(text).values()):
        raise argparse.ArgumentTypeError(f'must be {{"vllm": {{...}}}} or {{"hf": {{...}}}}, got {text}')
    return text


def adapter(text: str) -> tuple[str, str]:
    """Return name and folder of `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"[\w-]+", name) or not folder:
        rule = "must be NAME=FOLDER, with a name of letters, digits, - and _"
        raise argparse.ArgumentTypeError(f"{rule}; got {text!r}")
    return name, folder


def option(default: Any, help: str, **keywords: Any) -> Any:
    """Return a field whose metadata are keyword arguments of argparse."""
    return field(default=default, metadata={"help": help, **keywords})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Model and execution options of a worker."""

    ckpt_path: str = option(MISSING, "model folder with its tokenizer", required=True)
    adapters: tuple[tuple[str, str], ...] = option(
        (), "LoRA adapters (PEFT folders) of the model by a name that requests give; others are for the model itself",
        type=adapter, nargs="+", metavar="NAME=FOLDER",
    )
    n_logprobs: int = option(64, "largest K of a request", type=positive)
    tp_size: int = option(1, "GPUs per model, tensor parallel (vllm)", type=positive)
    backend: str = option("auto", "auto: vllm if installed", choices=["auto", "vllm", "hf"])
    max_model_len: int | None = option(None, "longest sequence, in tokens", type=positive)
    gpu_memory_utilization: float = option(0.9, "fraction of GPU memory (vllm)", type=within(0.01, 1.0))
    dtype: str = option("auto", "auto: as stored (vllm: half precision for float32); float32 on the CPU")
    engine_kwargs: str = option(
        "{}", 'further arguments as JSON: {"vllm": {...}} for vllm.LLM, {"hf": {...}} for from_pretrained',
        type=engine_arguments,
    )
    device: str = option("auto", "auto: the GPU if there is one", choices=["auto", "cpu", "cuda"])
    turns: str | None = option(
        None, "folder for locks: of the workers with this folder and the same GPUs only one at a time has its model "
        "there, the others on the host", metavar="FOLDER",
    )
    trust_remote_code: bool = option(False, "run code from the model folder", action="store_true")

    def arguments_of(self, engine: str) -> dict[str, Any]:
        """Return the entry of `engine_kwargs` for an engine."""
        return dict(json.loads(self.engine_kwargs).get(engine, {}))

    @staticmethod
    def add_to(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
        """Add the options to a parser, except the fields in `without`."""
        for each in fields(EngineOptions):
            if each.name not in without:
                parser.add_argument("--" + each.name.replace("_", "-"), default=each.default, **each.metadata)

    @classmethod
    def parsed(cls, arguments: argparse.Namespace) -> EngineOptions:
        given = {**vars(arguments), "adapters": tuple(getattr(arguments, "adapters", ()))}
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})

    def command_line(self) -> list[str]:
        """Return command-line arguments that `parsed` reads as these options, without --ckpt-path."""
        values = {"--" + each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)[1:]}
        adapters = [f"{name}={folder}" for name, folder in values.pop("--adapters")]
        found = [name if value is True else f"{name}={value}" for name, value in values.items() if value]
        return [*found, *(["--adapters", *adapters] if adapters else [])]
