"""`vllm.LLM` in this process, built within seconds: what a rollout or a teacher never asks for is not prepared."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

WARMUP_ARGUMENTS = frozenset({"jit_monitor_mode", "jit_monitor_verbose", "kernel_config", "observability_config"})
"""Of `vllm.LLM`: who gives one decides about kernels that are compiled late, and gets vLLM's warm-up."""


def load_llm(
    llm_class: Any, arguments: dict[str, Any], given: dict[str, Any], hf_config: Any, *, alone: bool = True
) -> Any:
    """`llm_class(**arguments)` for the model of `hf_config`.

    `given` are arguments of the user: they take the place of others, those of `compilation_config` one by one. Unless
    vLLM is `alone` in this process, it leaves the classes of transformers as they are. Raises whatever vLLM raises.
    """
    merged = arguments | given
    ours, theirs = (each.get("compilation_config") for each in (arguments, given))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        merged["compilation_config"] = ours | theirs
    inspect_here(getattr(hf_config, "architectures", None) or [])
    with contextlib.ExitStack() as stack:
        if not WARMUP_ARGUMENTS & given.keys():
            stack.enter_context(without_kernel_warmup())
        if not alone:
            stack.enter_context(without_changed_classes())
        return llm_class(**merged)


def inspect_here(architectures: list[str]) -> None:
    """Import the classes of a model in this process, which needs them at once.

    To look at one that it has not seen yet, vLLM starts a process that imports all of vLLM again, about ten seconds:
    this process could otherwise be one that must not touch the GPU before it forks.
    """
    from vllm.model_executor.models import ModelRegistry

    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if type(entry).__name__ == "_LazyRegisteredModel":
            try:
                ModelRegistry.register_model(name, entry.load_model_cls())
            except Exception as error:  # then vLLM finds out by itself, and says what is wrong
                logger.debug("vLLM's %s was not imported: %s", name, error)


@contextlib.contextmanager
def without_kernel_warmup() -> Iterator[None]:
    """Let the newer model runner compile a kernel of the sampler when something asks for it, not all of them at once.

    Filters, penalties, grammars and bad words take a quarter of a minute the first time, and rollouts have none. So
    nobody is warned of a kernel that is compiled at its first use.
    """
    nothing = [("vllm.v1.worker.gpu_worker", "warmup_kernels"), ("vllm.utils.jit_monitor", "activate")]
    with _replaced(dict.fromkeys(nothing, lambda *args, **kwargs: None)):
        yield


@contextlib.contextmanager
def without_changed_classes() -> Iterator[None]:
    """Keep vLLM's Transformers backend from changing the class of a decoder, which the student has too.

    vLLM runs an architecture that it has not written itself (OLMo, SmolLM3) with the code of transformers, and prepares
    the decoder's class in place for torch.compile: another base class, `__init__` and `__call__`. No model of the class
    could be built outside vLLM from then on. Without it vLLM does not compile such a decoder, which a rollout engine
    asks for only where `compilation_config` does (see `decode_graph_args`).
    """
    decorator = ("vllm.model_executor.models.transformers.base", "support_torch_compile")
    with _replaced({decorator: lambda **kwargs: lambda cls: cls}):
        yield


@contextlib.contextmanager
def _replaced(values: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Give names of modules, each (module, name), other values; not every version of vLLM has all of them."""
    with contextlib.ExitStack() as stack:
        for (path, name), value in values.items():
            with contextlib.suppress(ImportError):
                module = importlib.import_module(path)
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        yield
