"""Build `vllm.LLM` in this process within seconds, without preparing features that rollouts and teachers never use."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

WARMUP_ARGUMENTS = frozenset({"jit_monitor_mode", "jit_monitor_verbose", "kernel_config", "observability_config"})
"""Arguments of `vllm.LLM` about kernel compilation; if the user sets one, vLLM's warm-up is kept."""
MERGED = ("compilation_config", "hf_overrides")
"""Arguments of `vllm.LLM` with entries of their own."""


def load_llm(
    llm_class: Any, arguments: dict[str, Any], given: dict[str, Any], hf_config: Any, *, alone: bool = True
) -> Any:
    """Return `llm_class(**arguments)` for the model of `hf_config`.

    `given`: arguments of the user, which take precedence, those in `MERGED` one by one. Unless vLLM is `alone` in this
    process, classes of transformers are left unchanged. Raises whatever vLLM raises.
    """
    merged = arguments | given
    for name in MERGED:
        ours, theirs = (each.get(name) for each in (arguments, given))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            merged[name] = ours | theirs
    inspect_here(getattr(hf_config, "architectures", None) or [])
    with contextlib.ExitStack() as stack:
        if not WARMUP_ARGUMENTS & given.keys():
            stack.enter_context(without_kernel_warmup())
        if not alone:
            stack.enter_context(without_changed_classes())
        return llm_class(**merged)


def inspect_here(architectures: list[str]) -> None:
    """Import the classes of a model in this process.

    Otherwise vLLM starts a process that imports all of vLLM again to inspect an unknown class, which takes ten seconds;
    it does so for processes that must not touch the GPU before a fork.
    """
    from vllm.model_executor.models import ModelRegistry

    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if type(entry).__name__ == "_LazyRegisteredModel":
            try:
                ModelRegistry.register_model(name, entry.load_model_cls())
            except Exception as error:  # then vLLM inspects it and raises
                logger.debug("vLLM's %s was not imported: %s", name, error)


@contextlib.contextmanager
def without_kernel_warmup() -> Iterator[None]:
    """Let the newer model runner compile sampler kernels on first use instead of all at the start.

    Kernels of filters, penalties, grammars and bad words take a quarter of a minute, and rollouts do not use them. The
    warning about late compilation is disabled too.
    """
    nothing = [("vllm.v1.worker.gpu_worker", "warmup_kernels"), ("vllm.utils.jit_monitor", "activate")]
    with _replaced(dict.fromkeys(nothing, lambda *args, **kwargs: None)):
        yield


@contextlib.contextmanager
def without_changed_classes() -> Iterator[None]:
    """Keep vLLM's Transformers backend from changing the class of a decoder that the student shares.

    vLLM runs architectures without its own implementation (OLMo, SmolLM3) with the code of transformers, and prepares
    the decoder's class in place for torch.compile: another base class, `__init__` and `__call__`. Afterwards no model
    of the class could be built outside of vLLM. Without this change vLLM does not compile such a decoder, which a
    rollout engine requests only with `compilation_config` (see `decode_graph_args`).
    """
    decorator = ("vllm.model_executor.models.transformers.base", "support_torch_compile")
    with _replaced({decorator: lambda **kwargs: lambda cls: cls}):
        yield


@contextlib.contextmanager
def _replaced(values: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Replace names of modules, (module, name), by other values; names that this vLLM does not have are skipped."""
    with contextlib.ExitStack() as stack:
        for (path, name), value in values.items():
            with contextlib.suppress(ImportError):
                module = importlib.import_module(path)
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        yield
