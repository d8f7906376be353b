"""A minimal rollout engine: one token at a time, without a cache, from the student's own distribution."""

from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.engine import RolloutEngine
from hybrid_gkd.types import GenerationRequest, SamplingParams


@dataclass
class Draft:
    request: GenerationRequest
    sampling: SamplingParams
    random: torch.Generator  # a completion depends on its own seed alone
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class MyEngine(RolloutEngine):
    description = "my engine 1.0"  # for the report
    dtype = torch.float32  # the weights are published in it
    can_pause = True

    def __init__(self, config, *, device, stop_token_ids):
        if config.actor_rollout_ref.rollout.top_p != 1 or config.actor_rollout_ref.rollout.top_k != -1:
            raise WorkerError("my_engine.py draws from the whole distribution: top_p=1 and top_k=-1")
        hf_config = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
        with torch.random.fork_rng():  # the weights come later; the worker's random state stays as it is
            self.model = AutoModelForCausalLM.from_config(hf_config, dtype=self.dtype).to(device).eval()
        self.device, self.stop_token_ids, self.drafts = device, stop_token_ids, []
        self.weight_bytes = sum(weight.nbytes for weight in self.model.parameters())

    def add(self, requests, sampling):
        self.drafts += [Draft(each, sampling, torch.Generator().manual_seed(each.seed)) for each in requests]

    @property
    def has_unfinished(self):
        return bool(self.drafts)

    @property
    def computed_tokens(self):
        return sum(len(draft.ids) for draft in self.drafts)

    def step(self):
        for draft in self.drafts:
            self.write_token(draft)
        ended = [self.status(draft) for draft in self.drafts]
        finished = [self.record(draft, status) for draft, status in zip(self.drafts, ended, strict=True) if status]
        self.drafts = [draft for draft, status in zip(self.drafts, ended, strict=True) if not status]
        return finished

    def pause(self):
        paused = [self.record(draft, "paused") for draft in self.drafts]
        self.drafts = []
        return paused

    @torch.no_grad()
    def write_token(self, draft):
        ids = torch.tensor([[*draft.request.prompt_ids, *draft.ids]], device=self.device)
        logits = self.model(ids).logits[0, -1, : self.num_ids].float().cpu()  # rows beyond are no tokens
        row = (logits / (draft.sampling.temperature or 1.0)).log_softmax(-1)
        greedy = draft.sampling.temperature == 0
        token = int(row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=draft.random))
        draft.ids.append(token)
        draft.logprobs.append(float(row[token]))

    def status(self, draft):
        if draft.ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(draft.ids) == draft.sampling.max_tokens else None

    def record(self, draft, status):
        logprobs = draft.logprobs if draft.sampling.logprobs else None
        return self.sample(draft.request, draft.ids, status=status, logprobs=logprobs)

    @torch.no_grad()
    def load_weights(self, weights, version):
        own = self.model.state_dict(keep_vars=True)
        for name, tensor in weights:  # full tensors under their Hugging Face names; all of them have to be taken
            own[name].copy_(tensor)
        self.weight_version = version

    def verify_weights(self, weights):
        own = self.model.state_dict(keep_vars=True)
        different = [name for name, tensor in weights if not torch.equal(own[name], tensor.to(own[name]))]
        if different:
            raise WorkerError(f"the engine holds another {different[0]} than the student")
