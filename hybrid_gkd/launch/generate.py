"""Generate completions: `python -m hybrid_gkd.teacher generate FILE ... --ckpt-path MODEL --out ANSWERS`

vLLM samples as in a rollout, with a seed per completion, so that results depend neither on the batch composition nor on
interruptions. A completion is written when it is finished and, if a reward is requested, scored.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import sys
import zlib
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.architectures import cannot_be_split
from hybrid_gkd.config import Config
from hybrid_gkd.data.given import FINISH_REASON
from hybrid_gkd.data.prompts import EXTRA_INFO, Columns, make_prompts, read_rows, without_nulls
from hybrid_gkd.data.tables import EveryColumn, Source, find_sources, read_table, short
from hybrid_gkd.errors import ConfigError, DataError, ModelError, describe_error, rename_section
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.command_line import run_command
from hybrid_gkd.launch.completion_file import ROW, SAMPLE, CompletionFile, Progress, files_of
from hybrid_gkd.launch.data_checks import check_data_sources, check_right_answers
from hybrid_gkd.launch.presence import check_model_folder
from hybrid_gkd.models.fingerprint import fingerprint
from hybrid_gkd.models.spec import position_limit, read_config
from hybrid_gkd.models.tokenizer import decode, load_tokenizer, num_token_ids, stop_token_ids
from hybrid_gkd.ppo.steps import request_seeds
from hybrid_gkd.rollout.engine import RolloutEngine
from hybrid_gkd.rollout.engine import generate_samples as samples_of
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.teacher.engines.options import EngineOptions, json_object, positive, within
from hybrid_gkd.types import GenerationRequest, Pair, Sample, SampleId, SamplingParams, Task

logger = logging.getLogger(__name__)

REWARDS = ("gsm8k", "math", "exact_match", "by_data_source")
IRRELEVANT_ARGUMENTS = {
    "out", "debug", "tp_size", "gpu_memory_utilization", "device", "trust_remote_code", "max_model_len",
}  # fmt: skip
"""Arguments that do not affect the completions."""
OWN_ARGUMENTS = {
    "model", "tokenizer", "dtype", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "seed",
    "trust_remote_code", "load_format", "generation_config", "skip_tokenizer_init",
}  # fmt: skip
"""vLLM arguments that have their own option here, or a fixed value."""
GROUPS_WAITING = 256
"""Maximum number of groups of finished completions that wait for their rewards; generation then pauses."""
OPTION_NAMES = {
    "data.train_files": "FILE", "data.prompt_key": "--prompt-key", "data.reward_fn_key": "--reward-fn-key",
    "reward.answer_key": "--answer-key", "reward.custom_reward_function.name": "--reward",
    "reward.custom_reward_function.path": "--reward", "reward.name": "--reward",
    "actor_rollout_ref.rollout.engine_kwargs.": "--engine-kwargs ", "actor_rollout_ref.rollout.name": "vLLM",
    " or a value in reward.custom_reward_function.reward_kwargs": "", ", or raise reward.timeout": "",
    " (reward.timeout)": "", " (data.max_unpacked_gigabytes)": "",
}  # fmt: skip
"""Configuration key in messages -> argument of this command in its place; advice on keys without one is left out."""
OWN_COLUMNS = (FINISH_REASON, ROW, SAMPLE, "reward", "rejected")
"""Columns that this command writes beside the completion."""
SEQUENCES_ON_A_GPU = 1024
"""`max_num_seqs` on a GPU; the KV cache limits large models to fewer."""
CUT_FRACTION = 0.05
"""Fraction of completions left out as cut above which the others no longer stand for what the model writes."""


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    options = parse(arguments)
    return run_command(lambda stopping: generate(options), debug=options.debug)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; exit on a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_gkd.teacher generate",
        description="Write a model's completions of prompts to a JSON Lines file, which data.train_files reads with "
        "data.response_key. The same command continues an incomplete file.",
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="prompts, in any format of data.train_files")
    add("--out", required=True, help="JSON Lines file with all columns, the completion, its finish reason and reward")
    add("-n", "--n", type=positive, default=1, help="completions of each prompt")
    add("--prompt-key", default="prompt", help="column with the prompt, as data.prompt_key")
    add("--response-key", default="response", help="column for the completion")
    add("--apply-chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help='for the chat template, such as {"enable_thinking": false}')
    add("--filter-overlong-prompts", action="store_true",
        help="skip rows whose prompt leaves no room for --max-tokens, instead of failing")
    add("--max-tokens", type=positive, default=1024, help="maximum number of tokens of a completion (%(default)s)")
    add("--temperature", type=within(0, math.inf), default=1.0, help="sampling temperature; 0 is greedy (%(default)s)")
    add("--top-p", type=within(1e-6, 1), default=1.0, help="nucleus mass (%(default)s)")
    add("--top-k", type=int, default=-1, help="-1 keeps the whole vocabulary")
    add("--seed", type=int, default=0, help="seed from which the seed of each completion is derived")
    add("--keep-cut", action="store_true",
        help="keep completions cut by --max-tokens, which a run reads without an end; they are rejected by default")
    add("--reward", metavar="NAME", help=f"compute a reward: {', '.join(REWARDS)}, or file.py:function")
    add("--answer-key", help="column with the right answer, as reward.answer_key")
    add("--reward-fn-key", default="data_source", help="column with the name of the data set, as data.reward_fn_key")
    add("--min-reward", type=within(-math.inf, math.inf), help="reject completions with a lower reward")
    add("--debug", action="store_true", help="show the traceback of an error")
    EngineOptions.add_to(parser, without=("n_logprobs", "backend", "adapters", "turns"))
    options = parser.parse_args(arguments)
    if options.temperature == 0 and options.n > 1:
        parser.error("--n must be 1 with --temperature 0: all greedy completions of a prompt are the same")
    if options.temperature == 0 and (options.top_p, options.top_k) != (1, -1):
        parser.error("--top-p and --top-k need a --temperature above 0, which is greedy")
    if options.top_k == 0 or options.top_k < -1:
        parser.error(f"--top-k must be -1 or at least 1, got {options.top_k}")
    if options.response_key in OWN_COLUMNS:
        rule = f"must not be {', '.join(OWN_COLUMNS)}, which this command writes beside the completion"
        parser.error(f"--response-key {rule}; got {options.response_key}")
    if options.seed < 0:
        parser.error(f"--seed must not be negative, got {options.seed}")
    if options.reward is not None and options.reward not in REWARDS and ":" not in options.reward:
        parser.error(f"--reward must be one of {', '.join(REWARDS)}, or file.py:function; got {options.reward}")
    if options.reward in REWARDS and options.answer_key is None:
        parser.error(f"--reward {options.reward} needs --answer-key, the column with the right answer")
    for name in ("min_reward", "answer_key", "reward_fn_key"):
        if options.reward is None and getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} needs --reward")
    if unknown := sorted(json.loads(options.engine_kwargs).keys() - {"vllm"}):
        parser.error(f"--engine-kwargs: the only engine is vllm, got arguments of {', '.join(unknown)}")
    if taken := OWN_ARGUMENTS & EngineOptions.parsed(options).arguments_of("vllm").keys():
        parser.error(f"--engine-kwargs vllm {', '.join(sorted(taken))}: has an option of its own, or a fixed value")
    return options


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, prompts and rows, read before the model is loaded."""

    tokenizer: Any
    stop_token_ids: list[int]
    tasks: list[Task]
    rows: list[dict[str, Any]]
    """All columns of every row, by `Task.index`."""


def generate(options: argparse.Namespace) -> int:
    """Generate the missing completions. Raises HybridGKDError."""
    with contextlib.ExitStack() as stack:
        for key, name in OPTION_NAMES.items():
            stack.enter_context(rename_section(key, name))
        inputs = read_inputs(options)
        config = make_config(options, max(len(task.token_ids) for task in inputs.tasks))
        functions = None
        if options.reward is not None:
            config.data.reward_fn_key = options.reward_fn_key
            functions = load_functions(config.reward)
            facts = Facts(config, reward=functions, train_prompts=inputs.tasks)
            check_data_sources(facts)
            check_right_answers(facts)
            if any(function.needs_all for function in functions.values()):
                rule = "must score one completion at a time: which completions form a list would depend on timing"
                raise ConfigError("--reward", rule, options.reward)
        file = CompletionFile(Path(options.out), stored_arguments(options, inputs))
        stack.enter_context(contextlib.closing(file))
        requests = missing_requests(options, inputs.tasks, file.done)
        if requests:
            if file.done:
                logger.info("%s: %d completions exist, %d are missing", file.path, len(file.done), len(requests))
            scorer = None
            if functions is not None:
                scorer = RewardScorer(functions, inputs.tokenizer, config)
                stack.enter_context(contextlib.closing(scorer))
            engine = load_engine(config, options, inputs)
            draw(Recorder(options, inputs, file, scorer), engine, requests, options)
        print(summary(options, file, inputs.tasks), flush=True)
        if options.reward is None:
            warn_of_cut(options, file)
    return 0


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Read the tokenizer and check model and rows. Raises DataError, ModelError or ConfigError."""
    path, key = options.ckpt_path, "FILE"
    check_model_folder("--ckpt-path", path)
    if rule := cannot_be_split(read_config(path, options.trust_remote_code, {}), options.tp_size):
        raise ConfigError("--tp-size", f"{rule} ({path})", options.tp_size)
    tokenizer = load_tokenizer(path, options.trust_remote_code)
    ends = stop_token_ids(path, tokenizer)
    if not ends:
        rule = "so completions would never end; set eos_token in its tokenizer_config.json"
        raise ModelError(f"--ckpt-path {path}: defines no end-of-sequence token, {rule}")
    columns = Columns(
        prompt_key=options.prompt_key, answer_key=options.answer_key, data_source_key=options.reward_fn_key,
        extra_info=":" in (options.reward or ""),
    )
    sources = find_sources(options.files, key)
    check_outputs(options, sources)
    tables = read_rows(options.files, columns, key=key)
    tasks = make_prompts(
        tables, key=key, tokenizer=tokenizer, max_prompt_length=2**31, truncation="error",
        filter_overlong_prompts=False, apply_chat_template_kwargs=options.apply_chat_template_kwargs,
    )
    rows = list(itertools.chain(*(read_every_column(source, f"{key}: {source.name!r}") for source in sources)))
    check_columns(rows, options)
    return Inputs(tokenizer, ends, filter_by_length(tasks, options), rows)


def check_outputs(options: argparse.Namespace, sources: list[Source]) -> None:
    """Raise ConfigError if a file that this command writes is one of the FILEs, or in a folder of them."""
    for path, source in itertools.product(files_of(Path(options.out)), sources):
        if path.resolve().is_relative_to(Path(source.name).expanduser().resolve()):
            rule = f"must not be written where prompts are read: {path} belongs to FILE {source.name!r}"
            raise ConfigError("--out", rule, options.out)


def read_every_column(source: Source, where: str) -> list[dict[str, Any]]:
    """Return rows that give the same prompts when they are read again as JSON. Raises DataError.

    Arrow's nulls for the fields of other rows are left out, but in `EXTRA_INFO`: reward functions get that as it is.
    """
    _, rows = read_table(source, where, EveryColumn())
    if not source.of_arrow:
        return rows
    return [
        {name: value if name == EXTRA_INFO else without_nulls(value) for name, value in row.items()} for row in rows
    ]


def check_columns(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Raise DataError if a column would be overwritten, or has a value that JSON cannot represent."""
    added = [options.response_key, *(name for name in OWN_COLUMNS if options.reward or name != "reward")]
    for number, row in enumerate(rows, 1):
        if taken := [name for name in added if name in row]:
            hint = "; --response-key sets another name" if taken[0] == options.response_key else ""
            raise DataError(f"FILE, row {number}: already has the column {taken[0]!r}, which this command writes{hint}")
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                rule = f"has a value that JSON cannot represent ({describe_error(error)})"
                raise DataError(f"FILE, row {number}, column {name!r}: {rule}; got {short(value)}") from error


def filter_by_length(tasks: list[Task], options: argparse.Namespace) -> list[Task]:
    """Return the tasks whose prompt leaves room for --max-tokens. Raises DataError if others must not be skipped."""
    limit, field = position_limit(read_config(options.ckpt_path, options.trust_remote_code, {}).get_text_config())
    if options.max_model_len is not None and options.max_model_len < (limit or math.inf):
        limit, field = options.max_model_len, "--max-model-len"
    if limit is None:
        return tasks
    found = [task for task in tasks if len(task.token_ids) + options.max_tokens <= limit]
    rule = f"--max-tokens {options.max_tokens} leaves prompts {max(0, limit - options.max_tokens)} tokens ({field})"
    if len(found) < len(tasks) and not options.filter_overlong_prompts:
        first = next(task for task in tasks if len(task.token_ids) + options.max_tokens > limit)
        raise DataError(
            f"FILE, row {first.row}: the prompt has {len(first.token_ids)} tokens, but {rule}; lower it, or use "
            f"--filter-overlong-prompts to skip {len(tasks) - len(found)} of {len(tasks)} rows"
        )
    if not found:
        raise DataError(f"FILE: all {len(tasks)} prompts are too long: {rule}")
    if len(found) < len(tasks):
        logger.warning("skipped %d of %d rows with longer prompts: %s", len(tasks) - len(found), len(tasks), rule)
    return found


def stored_arguments(options: argparse.Namespace, inputs: Inputs) -> dict[str, Any]:
    """Return option name -> value of everything that affects the completions, with checksums of the files' contents."""
    found = {
        "FILE" if name == "files" else f"--{name.replace('_', '-')}": value
        for name, value in vars(options).items() if name not in IRRELEVANT_ARGUMENTS
    }
    checksum = 0
    for task in inputs.tasks:
        row = json.dumps([task.row, inputs.rows[task.index]]).encode()
        checksum = zlib.crc32(row, zlib.crc32(task.token_ids.tobytes(), checksum))
    found |= {"rows and prompts of FILE (checksum)": f"{checksum:08x}"}
    if options.reward is not None and (code := reward_file(options.reward)).is_file():
        found |= {"file of --reward (checksum)": f"{FileSum.of(code).crc32:08x}"}
    if os.path.isdir(options.ckpt_path):  # a hub id may not be downloaded yet
        found |= {"weights in --ckpt-path (hash)": fingerprint(options.ckpt_path)}
    return found


def reward_file(reward: str) -> Path:
    """Return the file of a loaded reward function, `file.py:function` or `module:function`; it may not exist."""
    source = reward.rpartition(":")[0]
    return Path(getattr(sys.modules.get(source), "__file__", None) or source).expanduser()


def make_config(options: argparse.Namespace, longest_prompt: int) -> Config:
    """Return the configuration of engine and rewards. Raises ConfigError for a missing device or reward."""
    config = Config()
    arr, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    arr.model.path, arr.model.trust_remote_code = options.ckpt_path, options.trust_remote_code
    config.data.max_prompt_length, config.data.max_response_length = longest_prompt, options.max_tokens
    rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization = options.tp_size, options.gpu_memory_utilization
    rollout.max_model_len, rollout.seed, rollout.free_cache_engine = options.max_model_len, options.seed, False
    rollout.fast_paths = options.tp_size == 1  # these need the model runner in this process
    rollout.engine_kwargs.vllm = {
        "load_format": "auto", "distributed_executor_backend": "uni" if options.tp_size == 1 else "mp",
        "disable_custom_all_reduce": False, "skip_tokenizer_init": False,
    } | EngineOptions.parsed(options).arguments_of("vllm")  # fmt: skip
    config.reward.answer_key = options.answer_key
    if options.reward in REWARDS:
        config.reward.name = options.reward
    elif options.reward is not None:
        own = config.reward.custom_reward_function
        own.path, _, own.name = options.reward.rpartition(":")
    return config


def load_engine(config: Config, options: argparse.Namespace, inputs: Inputs) -> RolloutEngine:
    """Load vLLM with the weights of the folder. Raises ConfigError or ModelError."""
    vllm_compat.check_version()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < options.tp_size:
        raise ConfigError("--tp-size", f"{torch.cuda.device_count()} GPUs are visible here", options.tp_size)
    if device == "cuda":
        config.actor_rollout_ref.rollout.engine_kwargs.vllm["dtype"] = options.dtype
        config.actor_rollout_ref.rollout.max_num_seqs = SEQUENCES_ON_A_GPU
    elif options.dtype not in ("auto", "float32"):
        raise ConfigError("--dtype", "must be auto or float32 on the CPU", options.dtype)
    from hybrid_gkd.rollout.vllm import VLLMRolloutEngine

    try:
        engine = VLLMRolloutEngine(
            config, device=torch.device(device), stop_token_ids=inputs.stop_token_ids,
            num_ids=num_token_ids(inputs.tokenizer),
        )
    except ModelError:
        raise
    except Exception as error:  # whatever vLLM raises for an unsupported model or device
        raise ModelError(f"--ckpt-path {options.ckpt_path}: vLLM cannot load it: {describe_error(error)}") from error
    engine.weight_version = 0  # the weights of the folder
    return engine


def missing_requests(
    options: argparse.Namespace, tasks: list[Task], done: set[tuple[int, int]]
) -> list[GenerationRequest]:
    """Return a request for each missing completion, seeded by its row and number."""
    return [
        GenerationRequest(id=SampleId(0, task.index, number), prompt_ids=task.token_ids, seed=seed)
        for task in tasks
        for number, seed in enumerate(request_seeds(options.seed, task.index, options.n))
        if (task.row, number) not in done
    ]


class Recorder:
    """Writes finished completions with their rewards to the file, one group at a time."""

    def __init__(self, options: argparse.Namespace, inputs: Inputs, file: CompletionFile, scorer: RewardScorer | None):
        self.file, self.scorer = file, scorer
        self._options, self.inputs = options, inputs

    def begin(self, pairs: list[Pair]) -> None:
        """Start computing rewards that run in other processes; return at once."""
        if self.scorer is not None:
            self.scorer.begin(self._worth_scoring(pairs))

    def _worth_scoring(self, pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if pair[1].status != "length" or self._options.keep_cut]

    def record(self, pairs: list[Pair]) -> None:
        """Wait for the rewards and write the lines. Raises HybridGKDError."""
        rewards = dict[SampleId, float]()
        if self.scorer is not None:
            scored = self._worth_scoring(pairs)
            rewards = dict(zip((sample.id for _, sample in scored), self.scorer.scores(scored), strict=True))
        self.file.append([self._line(task, sample, rewards.get(sample.id)) for task, sample in pairs])

    def _line(self, task: Task, sample: Sample, reward: float | None) -> dict[str, Any]:
        text = decode(self.inputs.tokenizer, task, sample)
        if sample.status == "length":
            text = text.rstrip("\ufffd")  # a character of which some bytes are missing
        line = self.inputs.rows[task.index] | {
            self._options.response_key: text, FINISH_REASON: sample.status, ROW: task.row, SAMPLE: sample.id.number,
        }
        if reward is not None:
            line["reward"] = reward
        if sample.status == "length" and not self._options.keep_cut:
            line["rejected"] = "length"
        elif not text.strip():
            line["rejected"] = "empty"
        elif reward is not None and reward < (-math.inf if (least := self._options.min_reward) is None else least):
            line["rejected"] = "reward"
        return line


def draw(
    recorder: Recorder, engine: RolloutEngine, requests: list[GenerationRequest], options: argparse.Namespace
) -> None:
    """Generate, and record finished completions in another thread at the same time. Raises HybridGKDError."""
    by_index, file = {task.index: task for task in recorder.inputs.tasks}, recorder.file
    sampling = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
    )
    missing = Counter(request.id.row for request in requests)
    progress = Progress(missing, len(by_index), lambda: describe_kept(file))
    waiting = deque[tuple[list[Pair], Future[None]]]()

    def settle(limit: int) -> None:
        while waiting and (len(waiting) > limit or waiting[0][1].done()):
            pairs, future = waiting.popleft()
            future.result()
            for _, sample in pairs:
                progress.add(sample.id.row, sample.num_trained)
        progress.show()

    with ThreadPoolExecutor(1, thread_name_prefix="answers") as writer:
        try:
            for finished in samples_of(engine, requests, sampling):
                if finished:
                    pairs = [(by_index[sample.id.row], sample) for sample in finished]
                    recorder.begin(pairs)
                    waiting.append((pairs, writer.submit(recorder.record, pairs)))
                settle(GROUPS_WAITING)
            settle(0)
            progress.show(last=True)
        finally:
            writer.shutdown(wait=False, cancel_futures=True)
            progress.close()


def describe_kept(file: CompletionFile) -> str:
    """Return the fraction of completions that are kept, as text."""
    total = file.num_kept + file.reasons.total()
    return f"{file.num_kept / total:.1%} kept" if total else ""


def warn_of_cut(options: argparse.Namespace, file: CompletionFile) -> None:
    """Log a warning if so many completions were cut and left out that a student of the others would end too early."""
    cut = file.reasons["length"] / max(1, file.num_kept + file.reasons.total())
    if cut > CUT_FRACTION:
        logger.warning(
            "%.0f %% of the completions were cut by --max-tokens %d and left out: a student of the others alone learns "
            "to end too early; --keep-cut keeps them (without an end), or set a higher --max-tokens",
            100 * cut, options.max_tokens,
        )  # fmt: skip


def summary(options: argparse.Namespace, file: CompletionFile, tasks: list[Task]) -> str:
    """Describe the contents of the file and the number of rejected completions by reason."""
    names = {
        "length": f"truncated at --max-tokens {options.max_tokens}", "empty": "empty",
        "reward": f"below --min-reward {options.min_reward}",
    }
    left = ", ".join(f"{count} {names[reason]}" for reason, count in sorted(file.reasons.items()))
    total = file.num_kept + file.reasons.total()
    out = f"; {left} (in {file.rejected_path})" if left else ""
    return f"{file.path}: kept {file.num_kept} of {total} completions of {len(tasks)} rows{out}"
