"""Descriptions of the calls to workers, for messages: "waiting for ...", "died during ..."."""

DESCRIPTIONS = {
    "begin": "the start of the worker processes", "begin_step": "the start of a step",
    "placement": "the query of the workers' places", "address": "the choice of a port",
    "all_reduce": "the all-reduce test", "initialize": "the loading of the models",
    "weight_layout": "the connection of the pools", "join_weight_sync": "the connection of the pools",
    "publish": "the weight sync", "send_weights": "the weight sync", "receive_weights": "the weight sync",
    "load_checkpoint": "the reading of the checkpoint", "save_checkpoint": "the writing of the checkpoint",
    "take_snapshot": "the copying of the checkpoint to the host", "write_snapshot": "the writing of the checkpoint",
    "snapshot_written": "the writing of the checkpoint", "finish_snapshot": "the writing of the checkpoint",
    "device_metrics": "the query of the workers' metrics", "write_profiles": "the writing of torch's profile",
    "generate": "the generation", "accumulate": "the update", "update": "the update",
    "update_critic": "the critic's update", "compute_values": "the computation of the critic's values",
    "compute_logprobs": "the computation of log-probabilities",
    "compute_topk": "the computation of the student's most likely tokens",
    "compute_divergences": "the computation of divergences",
    "compute_reward_scores": "the reward model's scoring",
    "compute_ref_logprobs": "the computation of the reference policy's log-probabilities",
    "compute_ref_topk": "the computation of the reference policy's most likely tokens",
    "compute_own_topk": "the scoring by the student's own weights",
    "synchronize": "the end of earlier work", "settle": "the end of unfinished work",
}  # fmt: skip
"""Description of each method of `Worker`."""
