"""The pages of this repository as the tests read them, and where each command in them is run.

A new command in a page belongs into one of the three dictionaries below: tests/unit/test_docs.py refuses it otherwise.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROTOCOL = ROOT / "hybrid_gkd" / "teacher" / "PROTOCOL.md"
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", PROTOCOL, *sorted((ROOT / "docs").glob("*.md"))
]
LOG = sorted((ROOT / "benchmarks" / "log").glob("*.md"))
"""Measurements of earlier code: tables and links are checked, while commands, keys and paths may be gone."""

QWEN = "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
LARGE = "actor_rollout_ref.teacher.model.path=Qwen/Qwen3-8B"
DISTIL = f"bash run_gkd.sh {QWEN} {LARGE}"
FILES = "data.train_files=train.jsonl data.val_files=val.jsonl"
POOLS = "actor_rollout_ref.hybrid_engine=false trainer.n_gpus_per_node=1 rollout.n_gpus_per_node=1"
TEACHER = ".venv/bin/python -m hybrid_gkd.teacher"

KEYS, MORE_KEYS = f"{TEACHER} keys --out teacher_keys", f"{TEACHER} keys --out teacher_keys --client second"
SERVE = (
    "bash hybrid_gkd/teacher/start_server.sh --ckpt-path Qwen/Qwen3-8B --workers 4 --tp-size 2 --n-logprobs 64 "
    "--host 0.0.0.0 --port 15555 --keys teacher_keys/server"
)
JOIN = (
    "bash hybrid_gkd/teacher/join_server.sh --ckpt-path Qwen/Qwen3-8B --proxy-addr HOST:15556 "
    "--keys teacher_keys/worker"
)
STATUS = f"{TEACHER} status --addr HOST:15555 --keys teacher_keys/client"
GIVEN_TEACHER = (
    f"bash run_gkd.sh {QWEN} data.train_files=train.jsonl actor_rollout_ref.teacher.server_ip=teacher-machine "
    "actor_rollout_ref.teacher.server_port=15555 actor_rollout_ref.teacher.keys=teacher_keys/client"
)
DRY_RUN = f"bash run_gkd.sh --dry-run {QWEN} {LARGE} {FILES}"
ONE_CARD = (
    f"bash run_gkd.sh --config-name one_gpu {QWEN} actor_rollout_ref.teacher.model.path=Qwen/Qwen3-1.7B "
    "data.train_files=train.jsonl"
)
REPORT = ".venv/bin/python -m hybrid_gkd.report outputs/hybrid_gkd/first"
PPO = (
    f"bash run_gkd.sh --config-name ppo {QWEN} data.train_files=train.jsonl reward.answer_key=answer reward.name=gsm8k"
)
ANSWERS = "data.train_files=answers.jsonl data.response_key=response data.max_response_length=2048"
OWN_OBJECTS = (
    "bash run_gkd.sh distillation.loss_fn=my_loss.py:skewed_kl",
    "bash run_gkd.sh reward.custom_reward_function.path=my_reward.py reward.custom_reward_function.name=score",
    "bash run_gkd.sh actor_rollout_ref.rollout.name=my_engine.py:MyEngine",
    "bash run_gkd.sh trainer.logger=[console,my_tracker.py:MyTracker]",
)

RUN_BY_TEST_DOCS = {KEYS, MORE_KEYS, SERVE, JOIN, STATUS, GIVEN_TEACHER, DRY_RUN, ONE_CARD, PPO, *OWN_OBJECTS}
"""tests/integration/test_docs_commands.py runs these as they stand, with short settings behind them."""

_COMMAND_LINE, _RECIPES = "tests/integration/test_command_line.py", "tests/integration/test_recipes.py"
_SELF = "tests/integration/test_self_distillation.py::test_the_student_with_the_solution_teaches_the_one_without"
_AHEAD = f"{_COMMAND_LINE}::test_generation_ahead_of_the_update_trains_every_batch_and_says_how_stale_it_was"
_GOLDEN = "tests/integration/test_golden.py::test_a_run_computes_what_it_always_did"
_METRICS = "tests/unit/reporting/test_metrics.py::test_docs_page_is_the_table"
_REPORT = "tests/unit/reporting/test_report_page.py"
_DOCTOR = "tests/integration/test_doctor.py::test_a_run_that_would_start"
_DASHBOARD = "tests/unit/reporting/test_dashboard.py::test_the_specification_is_printed_without_a_login"
_GENERATE = "tests/integration/test_generate.py::test_a_reward_and_the_limit_of_tokens_leave_answers_out"
_SOLUTION = "tests/integration/test_teacher_prompts.py::test_a_teacher_with_a_solution_scores_what_is_wrong"
_SCORE = "tests/integration/test_score.py::test_answers_are_scored_once_and_a_run_needs_no_teacher_for_them"
_GPU_DEMO = (
    "tests/integration/test_gpu_demo.py::test_the_recipe_builds_its_models_and_runs_from_them_become_a_page"
)
RUN_ELSEWHERE = {
    f"{TEACHER} score answers.jsonl --student Qwen/Qwen3-0.6B --ckpt-path Qwen/Qwen3-8B --out scores "
    "data.max_response_length=2048": _SCORE,
    f"{TEACHER} generate train.jsonl --ckpt-path Qwen/Qwen3-8B --out answers.jsonl -n 4 --max-tokens 2048 "
    "--temperature 0.7 --reward gsm8k --answer-key answer --min-reward 1": _GENERATE,
    f"bash run_gkd.sh {QWEN} data.train_files=train.jsonl "
    "actor_rollout_ref.teacher.model.path=microsoft/Phi-4-mini-instruct distillation.cross_tokenizer=spans":
        "tests/integration/test_cross_tokenizer_run.py::test_a_student_learns_from_a_teacher_with_other_tokens",
    "python -m hybrid_gkd.reporting.dashboard --project hybrid_gkd --json": _DASHBOARD,
    "bash run_gkd.sh": f"{_RECIPES}::test_the_embedded_default_brings_the_student_close_to_its_teacher",
    "bash run_gkd.sh --supervise --config-name gpu_demo trainer.save_freq=20":
        f"{_COMMAND_LINE}::test_a_supervised_run_whose_driver_is_killed_ends_with_all_of_its_steps",
    "bash run_gkd.sh --config-name self_distillation": _SELF,
    f"bash run_gkd.sh --config-name prompt_distillation {QWEN} {FILES}":
        "tests/integration/test_self_distillation.py::test_a_system_prompt_becomes_weights",
    f"bash run_gkd.sh {QWEN} actor_rollout_ref.teacher.source=initial data.teacher_prompt_key=with_solution "
    f"data.max_teacher_prompt_length=4096 {FILES} reward.answer_key=answer reward.name=gsm8k "
    "trainer.best_metric=val/accuracy": _SELF,
    f"bash run_gkd.sh {QWEN} {LARGE} {FILES} trainer.experiment_name=first":
        f"{_COMMAND_LINE}::test_a_run_trains_and_says_where_everything_is",
    f"{DISTIL} {ANSWERS} trainer.warmup_steps_sft=200 distillation.on_policy_fraction=1":
        f"{_RECIPES}::test_given_answers_warm_a_student_up_and_are_mixed_with_its_own",
    f"bash run_gkd.sh {QWEN} {ANSWERS} distillation.enabled=false": _GPU_DEMO,
    f"{DISTIL} {FILES} reward.answer_key=answer reward.name=gsm8k actor_rollout_ref.rollout.n=4 "
    "distillation.use_task_rewards=true distillation.distillation_loss_coef=0.3 "
    "distillation.distillation_loss_coef_schedule=cosine":
        f"{_RECIPES}::test_a_policy_gradient_of_the_teacher_beside_task_rewards",
    f"{DISTIL} {FILES} reward.answer_key=answer reward.name=gsm8k actor_rollout_ref.rollout.n=4 "
    "distillation.teacher_prompt_fn=my_prompts.py:with_a_solution data.max_teacher_prompt_length=2560": _SOLUTION,
    f"bash run_gkd.sh {POOLS} trainer.scheduler=one_step_off": _AHEAD,
    f".venv/bin/python -m hybrid_gkd.doctor {QWEN} {LARGE} {FILES}": _DOCTOR,
    ".venv/bin/python -m hybrid_gkd.evaluate Qwen/Qwen3-0.6B outputs/hybrid_gkd/first/global_step_* --data val.jsonl "
    f"{LARGE}": f"{_COMMAND_LINE}::test_models_and_checkpoints_are_validated_into_one_table",
    ".venv/bin/python -m hybrid_gkd.metrics": _METRICS,
    REPORT: f"{_REPORT}::test_the_command_writes_into_the_run_folder_or_compares",
    f"{REPORT} outputs/hybrid_gkd/second": f"{_REPORT}::test_the_command_writes_into_the_run_folder_or_compares",
    f"{REPORT} --serve 8080": f"{_REPORT}::test_serving_follows_the_run_and_answers_this_machine_alone",
    ".venv/bin/python tests/golden.py forward_kl": _GOLDEN,
    "bash run_gkd.sh --config-path . --config-name several":
        "tests/integration/test_several_teachers.py::test_each_row_is_scored_by_its_teacher_and_a_resumed_run_is_the_same",
}
"""Command -> the test that runs it with models and data of its own."""

_RAY = "`ray stop` ends every Ray process of the machine"
_SUITE = "runs this test"
_NODES = "needs several nodes"
NOT_RUN = {
    "python -m hybrid_gkd.reporting.dashboard --project hybrid_gkd": "needs a login at wandb",
    "python -m hybrid_gkd.reporting.dashboard --project hybrid_gkd --config RUN/config.yaml": "needs a login at wandb",
    "bash run_gkd.sh --install-only": "installs; tests/run.sh begins with it",
    "export RAY_AUTH_MODE=token": _RAY,
    ".venv/bin/ray start --head --port 6379": _RAY,
    f"bash run_gkd.sh ray_init.address=HEAD:6379 trainer.nnodes=2 trainer.n_gpus_per_node=8 "
    f"trainer.default_local_dir=/shared/outputs {GIVEN_TEACHER.removeprefix('bash run_gkd.sh ')}": _NODES,
    ".venv/bin/python benchmarks/results_compress.py make compress --teacher HuggingFaceTB/SmolLM2-135M-Instruct "
    "--drop 12,14,16,18 --train openai/gsm8k:main:train --val openai/gsm8k:main:test": "downloads a model",
    "bash run_gkd.sh --config-name one_gpu actor_rollout_ref.model.path=compress/student "
    "actor_rollout_ref.teacher.model.path=compress/teacher data.train_files=compress/train.jsonl "
    "data.val_files=compress/val.jsonl data.max_prompt_length=256 data.max_response_length=256 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.lr=3e-4 "
    "actor_rollout_ref.rollout.val_kwargs.temperature=1": "needs the models of the command before it",
    "bash tests/run.sh": _SUITE,
    "bash tests/run.sh --fast": _SUITE,
    "bash tests/run.sh --durations=20": _SUITE,
    "bash tests/run.sh tests/unit -k loss": _SUITE,
    "bash tests/run.sh -m gpu": "needs a GPU",
    ".venv/bin/python benchmarks/weight_sync.py --shape tiny --gpus 2 --device cpu": "measures for half a minute",
}
"""Command -> why no test runs it."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> dict[str, list[str]]:
    """Every command of a bash block, on one line -> the pages that it is in."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in re.sub(r" *\\\n *", " ", block).splitlines():
                command = re.sub(r"\s+#.*", "", line).strip()
                if command:
                    found.setdefault(command, []).append(page.name)
    return found


def example(name: str, language: str = "python") -> str:
    """The file of docs/examples, or the block of the pages that begins with `# <name>`."""
    file = ROOT / "docs" / "examples" / name
    if file.exists():
        return file.read_text(encoding="utf-8")
    (text,) = (block for page in PAGES for block in blocks(page, language) if block.startswith(f"# {name}\n"))
    return text


def arguments(command: str) -> list[str] | None:
    """Return the arguments of a command for `python -m hybrid_gkd` or its doctor; None for another program."""
    for program in ("bash run_gkd.sh", ".venv/bin/python -m hybrid_gkd.doctor"):
        if command == program or command.startswith(f"{program} "):
            return shlex.split(command.removeprefix(program))
    return None
