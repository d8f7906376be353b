"""The short paths of rollouts on a GPU: asynchronous scheduling, the newer model runner and its steps, CUDA graphs."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from same_tokens import check_cases, check_two_ranks

from hybrid_gkd.testing import make_tiny_model

pytestmark = pytest.mark.gpu
TIMEOUT = 600.0


def test_short_paths_give_the_same_tokens(tmp_path):
    folder = make_tiny_model(tmp_path / "model", num_words=200)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check_cases, folder, "cuda").result(TIMEOUT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_so_do_two_ranks_of_tensor_parallelism(tmp_path):
    check_two_ranks(make_tiny_model(tmp_path / "model", num_words=200), "cuda", TIMEOUT)
