"""Every rollout engine with a tiny model, in a process of its own: vLLM changes the process that imports it."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from hybrid_gkd.rollout.engine import generate_samples, make_engine
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.testing import make_tiny_model, tiny_config
from hybrid_gkd.workers.process_group import GroupMember

STOP_TOKENS = [*range(100, 112), 256]  # of 260, so that many samples end with one; the last is the models' own
MAX_NUM_SEQS, MAX_TOKENS, SEEDS, NUM_IDS = 4, 24, (1, 2), 260
TIMEOUT = 300.0


class EngineProcess:
    """Runs functions on the engines of a process, `call(function, name, *args)` -> function(engine, *args).

    Args:
        folder: for the models, of the weights `SEEDS`.
        names: of the engines, as `actor_rollout_ref.rollout.name`.
        overrides: of the configuration.
    """

    def __init__(self, folder, names, device="cpu", overrides=()):
        for seed in SEEDS:
            make_tiny_model(folder / str(seed), seed=seed, vocab_size=NUM_IDS + 16)
        context, arguments = multiprocessing.get_context("spawn"), (folder, names, device, overrides)
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_make_engines, initargs=arguments)

    def call(self, function, name, *args):
        return self.pool.submit(_call, function, name, args).result(TIMEOUT)


_ENGINES, _MODELS = {}, {}


def _make_engines(folder, names, device, overrides):
    _MODELS.update(folder=folder, device=device)
    for name in names:
        config = tiny_config(
            f"trainer.device={device}", "data.max_prompt_length=16", f"data.max_response_length={MAX_TOKENS}",
            f"actor_rollout_ref.rollout.max_num_seqs={MAX_NUM_SEQS}",
            "actor_rollout_ref.rollout.max_num_batched_tokens=64", "actor_rollout_ref.rollout.verify_weights=true",
            f"actor_rollout_ref.rollout.name={name}", *overrides, model=f"{folder}/{SEEDS[0]}",
        )  # fmt: skip
        if not _ENGINES:
            member = GroupMember(config, role="worker", rank=0, size=1, device_type=device)
            member.join(member.address(), Timeout(60.0))
        import torch

        _ENGINES[name] = make_engine(config, device=torch.device(device), stop_token_ids=STOP_TOKENS, num_ids=NUM_IDS)


def _call(function, name, args):
    return function(_ENGINES[name], *args)


def weights(seed):
    """In the process of the engines: the parameters of a model, as a worker publishes them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_MODELS["folder"] / str(seed)).to(_MODELS["device"])
    return [(name, weight.detach()) for name, weight in model.named_parameters(remove_duplicate=False)]


def load(engine, seed, version):
    engine.load_weights(((name, weight.to(engine.dtype)) for name, weight in weights(seed)), version)
    return engine.weight_version


def draw(engine, requests, sampling):
    """Samples by their ids."""
    found = [sample for part in generate_samples(engine, requests, sampling) for sample in part]
    assert not engine.has_unfinished
    return by_id(found)


def draw_and_pause(engine, requests, sampling, steps):
    """Samples of the first steps, those of `pause`, and whether anything is left then."""
    engine.add(requests, sampling)
    finished = [sample for _ in range(steps) for sample in engine.step()]
    assert engine.has_unfinished
    paused = engine.pause()
    return by_id(finished), by_id(paused), engine.has_unfinished


def by_id(samples):
    found = {sample.id: sample for sample in samples}
    assert len(found) == len(samples)
    return found
